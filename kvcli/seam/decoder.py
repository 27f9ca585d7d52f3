"""Finds the layers of a model."""

from __future__ import annotations

from itertools import chain
from typing import Any

from torch import nn

from kvcli.errors import ModelError


def find_decoder(model: nn.Module) -> nn.Module:
    """The module that owns the list of all decoder layers.

    Raises:
        ModelError: no module owns a list of as many layers as the config says.
    """
    config: Any = model.config
    count = config.get_text_config(decoder=True).num_hidden_layers
    get_decoder: Any = getattr(model, "get_decoder", None)
    # a tower for images may have as many layers
    first = () if get_decoder is None else get_decoder().modules()
    for module in chain(first, model.modules()):
        if _layers(module, count) is not None:
            return module
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


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The decoder layers of a model, in their order."""
    config: Any = model.config
    layers = _layers(find_decoder(model), config.get_text_config(decoder=True).num_hidden_layers)
    assert layers is not None
    return layers


def _layers(module: nn.Module, count: int) -> nn.ModuleList | None:
    lists = (child for child in module.children() if isinstance(child, nn.ModuleList))
    return next((layers for layers in lists if len(layers) == count), None)
