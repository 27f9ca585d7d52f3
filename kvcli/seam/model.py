"""The attention of all layers of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvcli.errors import ModelError, UnsupportedModelError
from kvcli.rope import NoRope, Rope
from kvcli.seam.decoder import decoder_layers, find_decoder
from kvcli.seam.latent import has_latents
from kvcli.seam.layer import ChannelOrder, LayerAttention
from kvcli.seam.rotary import rope_arguments
from kvcli.spec import NO_ROPE, ModelSpec, layer_kinds

ATTENTION_NAME = "kvcli"
"""The attention implementation of a model that is attached."""

SHARED_CONFIG = "another model that has the same config object is attached; detach it, or load a copy of the config"

_WINDOWED = ("sliding_attention", "chunked_attention")
"""Kinds of layers that call the attention function, too, and keep transformers' own cache."""


@dataclass(frozen=True)
class ModelAttention:
    """The attention of the layers of a model.

    Attributes:
        layers: those of full attention, in their order.
        modules: all attention modules that go through transformers' attention interface, in the order of a pass.
        rope: the rotation of keys, of the model's own rotary module or none.
        implementation: the attention implementation that the model was loaded with.
        notes: one line each about what is not as usual.
        drops_state: whether transformers' code for it drops the state of earlier passes in one of several tokens.
    """

    layers: tuple[LayerAttention, ...]
    modules: tuple[nn.Module, ...]
    rope: Rope
    spec: ModelSpec
    implementation: str | None
    notes: tuple[str, ...] = ()
    drops_state: bool = False

    def check_later_passes(self) -> None:
        """Raises ModelError where a text cannot be read in several passes."""
        if self.drops_state:
            raise ModelError("transformers' code of this model drops the state of earlier passes: read a text in one")

    @property
    def rotating_themselves(self) -> list[nn.Module]:
        """Modules that need what the rotary module returns."""
        if isinstance(self.rope, NoRope):
            return []
        others = [layer.module for layer in self.layers if not layer.own_rotation]
        return [module for module in self.modules if module not in others]

    def key_biases(self) -> list[Tensor | None]:
        """The constant that each layer's projection adds to every pre-RoPE key.

        Returns:
            float32 [num_kv_heads, head_dim] for each layer, its channels in the order of `kvcli.rope`; None where there
            is no bias of a projection of keys alone, or where the keys are normalized after it, so that it is no
            constant.
        """
        biases = (getattr(getattr(layer.module, "k_proj", None), "bias", None) for layer in self.layers)
        shape = (self.spec.num_kv_heads, self.spec.head_dim)
        return [
            None
            if bias is None
            or any("norm" in name for name, _ in layer.module.named_modules())
            or bias.numel() != shape[0] * shape[1]
            else layer.in_order(bias.detach().to(torch.float32, copy=True).view(shape))
            for layer, bias in zip(self.layers, biases, strict=True)
        ]


def attention_of_config(model: nn.Module) -> ModelAttention:
    """The attention that a model's config describes: on the `meta` device nothing can be compared.

    Raises:
        UnsupportedModelError: no full attention, or a layer without a part that knows its place in a cache.
    """
    config: Any = model.config
    spec = ModelSpec.from_config(config)
    modules, full = [], []
    kinds = layer_kinds(config.get_text_config(decoder=True))
    for layer, kind in zip(decoder_layers(model), kinds, strict=True):
        if kind not in ("full_attention", *_WINDOWED):
            continue
        parts = (part for child in layer.children() for part in reversed([*child.modules()]))
        module = next((part for part in parts if isinstance(getattr(part, "layer_idx", None), int)), None)
        if module is None:
            raise UnsupportedModelError(f"no part of {type(layer).__name__} is known to attend; it cannot be planned")
        modules.append(module)
        if kind not in _WINDOWED:
            full.append(module)
    if spec.latent and not all(map(has_latents, full)):
        raise UnsupportedModelError("this transformers caches keys and values of all heads in place of latents (MLA)")
    rotary: Any = getattr(find_decoder(model), "rotary_emb", None)
    rotated = rotary is not None and spec.rope.rope_type != NO_ROPE
    rope: Rope = NoRope(spec.rope.rotary_dim, torch.device("meta"))
    if rotated:
        rope = Rope(rotary, arguments=rope_arguments(rotary))
    order: ChannelOrder = "last halves" if spec.latent else "halves"
    layers = tuple(
        LayerAttention(layer_idx, module, rotated, order, rotary_dim=spec.rope.rotary_dim, latent=spec.latent)
        for layer_idx, module in enumerate(full)
    )
    return ModelAttention(layers, tuple(modules), rope, spec, config._attn_implementation)
