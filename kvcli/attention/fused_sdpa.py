"""The attention that PyTorch's SDPA would choose on a GPU, with its log-sum-exp, which SDPA itself does not return."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from kvcli.methods.layer_codec import PartialAttention


def fused_sdpa(query: Tensor, key: Tensor, value: Tensor, scaling: float, *, causal: bool) -> PartialAttention | None:
    """softmax(q k^T * scaling) v by FlashAttention or cuDNN.

    Args:
        query: [batch, num_heads, query_len, head_dim].
        key: [batch, num_kv_heads, kv_len, head_dim], rotated like the query and of its dtype.
        value: like key.
        scaling: factor of the scores.
        causal: whether query i sees keys 0 to i only; then kv_len is query_len.

    Returns:
        out in the query's dtype with any strides, and lse float32 [batch, num_heads, query_len]; None where SDPA would
        choose neither, as for float32 and without an NVIDIA GPU.
    """
    if query.device.type != "cuda" or torch.version.hip is not None or query.dtype == torch.float32:
        return None
    choice = torch._fused_sdp_choice(
        query, key, value, None, 0.0, causal, scale=scaling, enable_gqa=query.shape[1] > key.shape[1]
    )
    ops = torch.ops.aten
    if choice == SDPBackend.CUDNN_ATTENTION.value:
        out, lse = ops._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, causal, False, scale=scaling
        )[:2]
    elif choice == SDPBackend.FLASH_ATTENTION.value and query.shape[-1] % 8 == 0:
        out, lse = ops._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False, scale=scaling)[:2]
    else:
        return None
    return out, lse.reshape(query.shape[:3])
