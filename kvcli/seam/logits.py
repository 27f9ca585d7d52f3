"""Logits from last hidden states, so that a caller can compute those of a few tokens at a time."""

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
    base = backbone(model)
    stand_in = _ComputedStates(base, states)
    replace_module(model, base, stand_in)
    try:
        ids = torch.zeros(states.shape[:2], dtype=torch.int64, device=states.device)
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
        return logits
    finally:
        replace_module(model, stand_in, base)


class _ComputedStates(nn.Module):
    """Replaces the layers of a model, and every part of them, and returns given hidden states."""

    def __init__(self, base: nn.Module, states: Tensor) -> None:
        super().__init__()
        self._base, self.states = [base], states  # in a list: not a part of this module

    def forward(self, *args: Any, **kwargs: Any) -> _Output:
        return _Output(self.states)

    def __getattr__(self, name: str) -> Any:
        """Attributes of the base model; OPT calls a part of it, others read a field."""
        attribute = getattr(self._base[0], name)
        return self if isinstance(attribute, nn.Module) else attribute


class _Output:
    """Last hidden states, and None for everything else."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]
