"""How a model without numbers is taken to attend: on the `meta` device nothing can be compared."""

from __future__ import annotations

from typing import Any

from torch import nn

from kvcli.rope import NoRope, Rope
from kvcli.seam.decoder import decoder_layers, find_decoder
from kvcli.seam.layer import LayerAttention
from kvcli.seam.model import ModelAttention
from kvcli.seam.rotary import RotarySource
from kvcli.spec import NO_ROPE, ModelSpec, layer_kinds


def assume(model: nn.Module) -> ModelAttention:
    """What a model's config says, without a look at what the model computes; see `kvcli.seam.probe`.

    Args:
        model: a causal language model of transformers on the `meta` device.

    Raises:
        UnsupportedModelError: a config of a model without full attention.
    """
    config: Any = model.config
    spec = ModelSpec.from_config(config)
    kinds = layer_kinds(config.get_text_config(decoder=True))
    modules: list[nn.Module] = [
        layer.self_attn  # type: ignore[misc]
        for layer, kind in zip(decoder_layers(model), kinds, strict=True)
        if kind == "full_attention"
    ]
    rotary, source = getattr(find_decoder(model), "rotary_emb", None), None
    if rotary is not None and spec.rope.rope_type != NO_ROPE:
        source = RotarySource(rotary)
    rope: Rope = NoRope(spec.rope.rotary_dim, model.device) if source is None else source.rope  # type: ignore[arg-type]
    layers = tuple(
        LayerAttention(layer_idx, module, rotated=source is not None, rotary_dim=spec.rope.rotary_dim)
        for layer_idx, module in enumerate(modules)
    )
    return ModelAttention(layers, tuple(modules), source, rope, spec, config._attn_implementation)
