"""Attention over scalar codes (KIVI, SQuat): keys per channel, before or after RoPE, values per token.

Two kernels per layer, and a third if the tokens are split: scores of all tokens, softmax with the weighted sum of the
values, merge of the splits. No key or value is written in full precision.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvcli.kernels.launch import unsupported_shape
from kvcli.methods.encoded import EncodedTokens, PartialAttention
from kvcli.methods.layer_codec import LayerCodec
from kvcli.methods.scalar.per_channel import PerChannelCodec
from kvcli.methods.scalar.per_token import PerTokenValue
from kvcli.methods.scalar.score_kernels import key_scores, unsupported_keys
from kvcli.methods.scalar.value_kernels import unsupported_values, value_sum

ScalarLayer = LayerCodec[PerChannelCodec[Any], PerTokenValue]


def unsupported(codec: ScalarLayer) -> str | None:
    """Why these kernels cannot read a layer's codes; None if they can."""
    if codec.offset is not None:
        return "keys less an offset"
    return unsupported_keys(codec.key) or unsupported_values(codec.value)


def fused_attend(codec: ScalarLayer, query: Tensor, encoded: EncodedTokens, scaling: float) -> PartialAttention:
    """softmax(scaling q K^T) V over encoded tokens, an `AttendCodes`; float32 queries are multiplied in float32.

    Args:
        codec: of the layer.
        query: [batch, num_heads, query_len, head_dim], rotated.
        encoded: the layer's encoded tokens.
        scaling: factor of the scores.

    Returns:
        out float32 [batch, num_heads, query_len, head_dim] and lse float32 [batch, num_heads, query_len].

    Raises:
        UsageError: the kernels do not support the layer's shapes.
    """
    reason = unsupported(codec)
    if reason is not None:
        raise unsupported_shape(reason)
    fp32_dot = query.dtype == torch.float32
    scores = key_scores(codec.key, query, encoded, scaling, fp32_dot)
    out, lse = value_sum(codec.value, scores, encoded, fp32_dot)
    return out.view(query.shape), lse.view(query.shape[:3])
