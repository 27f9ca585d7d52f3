"""Logits of last hidden states that were computed before: of a few tokens at a time, where all would be too many."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kvcli.seam.decoder import backbone, replace_module


def logits_of(model: Any, states: Tensor) -> Tensor:
    """Logits by the model's own code, with its soft cap or scale if it has one.

    Args:
        model: a causal language model, attached or not; no other thread may use it meanwhile.
        states: last hidden states of `backbone`, [batch, time, hidden_size].

    Returns:
        [batch, time, vocab_size].
    """
    whole = backbone(model)
    given = _Given(whole, states)
    replace_module(model, whole, given)
    try:
        ids = torch.zeros(states.shape[:2], dtype=torch.int64, device=states.device)
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
        return logits
    finally:
        replace_module(model, given, whole)


class _Given(nn.Module):
    """Stands in for the layers of a model, and for every part of them, and returns what they computed."""

    def __init__(self, whole: nn.Module, states: Tensor) -> None:
        super().__init__()
        self._whole, self.states = [whole], states  # in a list: not a part of this module

    def forward(self, *args: Any, **kwargs: Any) -> _Output:
        return _Output(self.states)

    def __getattr__(self, name: str) -> Any:
        """OPT calls a part of its base model; others read a field of it."""
        found = getattr(self._whole[0], name)
        return self if isinstance(found, nn.Module) else found


class _Output:
    """Last hidden states, and None for everything else."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]
