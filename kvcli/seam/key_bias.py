"""The biases of a model's key projections."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kvcli.seam.patch import find_decoder
from kvcli.spec import ModelSpec


def key_biases(model: nn.Module, spec: ModelSpec) -> list[Tensor | None]:
    """The constant that each layer's projection adds to every pre-RoPE key.

    Args:
        model: a causal language model.
        spec: its shapes.

    Returns:
        float32 [num_kv_heads, head_dim] for each layer; None where there is no bias, or where the keys are normalized
        after the projection, so that it is no constant.
    """
    return [_key_bias(layer.self_attn, spec) for layer in find_decoder(model).layers]  # type: ignore[union-attr]


def _key_bias(attention: nn.Module, spec: ModelSpec) -> Tensor | None:
    bias = getattr(getattr(attention, "k_proj", None), "bias", None)
    if bias is None or getattr(attention, "k_norm", None) is not None or bias.numel() != spec.kv_dim:
        return None
    return bias.detach().to(torch.float32, copy=True).view(spec.num_kv_heads, spec.head_dim)
