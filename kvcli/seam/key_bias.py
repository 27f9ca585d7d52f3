"""The biases of a model's key projections."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kvcli.seam.layer import LayerAttention
from kvcli.seam.probe import probe
from kvcli.spec import ModelSpec


def key_biases(model: nn.Module, spec: ModelSpec) -> list[Tensor | None]:
    """The constant that each layer's projection adds to every pre-RoPE key.

    Args:
        model: a causal language model.
        spec: its shapes.

    Returns:
        float32 [num_kv_heads, head_dim] for each layer, its channels in the order of `kvcli.rope`; None where there is
        no bias of a projection of keys alone, or where the keys are normalized after it, so that it is no constant.
    """
    return [_key_bias(layer, spec) for layer in probe(model).layers]


def _key_bias(layer: LayerAttention, spec: ModelSpec) -> Tensor | None:
    bias = getattr(getattr(layer.module, "k_proj", None), "bias", None)
    normalized = any("norm" in name for name, _ in layer.module.named_modules())
    if bias is None or normalized or bias.numel() != spec.num_kv_heads * spec.head_dim:
        return None
    heads = bias.detach().to(torch.float32, copy=True).view(spec.num_kv_heads, spec.head_dim)
    return layer.in_order(heads)
