"""The attention of a model on the `meta` device, from its config: without numbers nothing can be compared."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from kvcli.errors import UnsupportedModelError
from kvcli.rope import NoRope, Rope
from kvcli.seam.decoder import decoder_layers, find_decoder
from kvcli.seam.layer import LayerAttention
from kvcli.seam.model import ModelAttention
from kvcli.seam.rotary import RotarySource
from kvcli.spec import NO_ROPE, ModelSpec, layer_kinds

_WINDOWED = ("sliding_attention", "chunked_attention")
"""Kinds of layers that call the attention function, too, and keep transformers' own cache."""


def assume(model: nn.Module) -> ModelAttention:
    """The attention that a model's config describes, not verified by running it; see `kvcli.seam.probe`.

    Args:
        model: a causal language model of transformers on the `meta` device.

    Raises:
        UnsupportedModelError: a config of a model without full attention.
    """
    config: Any = model.config
    spec = ModelSpec.from_config(config)
    kinds = layer_kinds(config.get_text_config(decoder=True))
    attending = [
        (_attention(layer), kind)
        for layer, kind in zip(decoder_layers(model), kinds, strict=True)
        if kind in ("full_attention", *_WINDOWED)
    ]
    full = [module for module, kind in attending if kind not in _WINDOWED]
    rotary, source = getattr(find_decoder(model), "rotary_emb", None), None
    if rotary is not None and spec.rope.rope_type != NO_ROPE:
        by_layers = "layer_type" in inspect.signature(rotary.forward).parameters
        source = RotarySource(rotary, ("full_attention",) if by_layers else ())
    rope: Rope = NoRope(spec.rope.rotary_dim, model.device) if source is None else source.rope  # type: ignore[arg-type]
    layers = tuple(
        LayerAttention(layer_idx, module, rotated=source is not None, rotary_dim=spec.rope.rotary_dim)
        for layer_idx, module in enumerate(full)
    )
    modules = tuple(module for module, _ in attending)
    return ModelAttention(layers, modules, source, rope, spec, config._attn_implementation)


def _attention(layer: nn.Module) -> nn.Module:
    """The attention module of a decoder layer.

    Raises:
        UnsupportedModelError: none of its parts knows its place in a cache.
    """
    for part in layer.children():
        if isinstance(getattr(part, "layer_idx", None), int):
            return part
    raise UnsupportedModelError(f"no part of {type(layer).__name__} is known to attend; it cannot be planned")
