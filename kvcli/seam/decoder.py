"""Finds the layers of a model, and computes logits without them."""

from __future__ import annotations

import re
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from kvcli.errors import ModelError

_TABLE = re.compile(r"(wpe|embed_positions|positions?_embed\w*)\.weight$|(embed_positions|pos_encoding)$")
_RESERVED = 8
"""Rows of a table that are no position's, at most; OPT has two."""


def find_decoder(model: nn.Module) -> nn.Module:
    """The module that owns the list of all decoder layers.

    Raises:
        ModelError: no module owns a list of as many layers as the config says.
    """
    return _find(model)[0]


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The decoder layers of a model, in their order."""
    return _find(model)[1]


def _find(model: nn.Module) -> tuple[nn.Module, nn.ModuleList]:
    config: Any = model.config
    count = getattr(config.get_text_config(decoder=True), "num_hidden_layers", "decoder")
    get_decoder: Any = getattr(model, "get_decoder", None)
    # a tower for images may have as many layers
    first = () if get_decoder is None else get_decoder().modules()
    for module in chain(first, model.modules()):
        for child in module.children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return module, child
    raise ModelError(f"{type(model).__name__} has no list of its {count} layers; it cannot be attached")


def backbone(model: Any) -> Any:
    """The model without its output layer; called with token ids, it returns the last hidden states."""
    base = model.base_model
    return find_decoder(model) if base is model else base


def replace_module(model: nn.Module, module: nn.Module, by: nn.Module) -> None:
    """Puts another module in the place of one."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if child is module and parent is not by:
                setattr(parent, name, by)


def text_model(model: nn.Module) -> Any:
    """The part of a model that has the attention implementation of its decoder layers.

    That is the model itself, unless it has parts for images or sound: their attention stays as it is.
    """
    decoder: Any = find_decoder(model)
    alone = getattr(decoder, "config", model.config) is model.config or not hasattr(decoder, "set_attn_implementation")
    return model if alone else decoder


def position_table(model: Any) -> int | None:
    """Tokens of a text at most, of a model that looks positions up in a table, as GPT-2 and OPT; None of others."""
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 0
    for name, x in chain(model.named_parameters(), model.named_buffers()):
        if limit and _TABLE.search(name) and x.dim() == 2 and limit <= len(x) <= limit + _RESERVED:
            return int(limit)
    return None


def logits_of(model: Any, states: Tensor) -> Tensor:
    """Logits by the model's own code, with its soft cap or scale if it has one.

    The model is attached or not; no other thread may use it meanwhile. From last hidden states of `backbone`, [batch,
    time, hidden_size], to [batch, time, vocab_size].
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
