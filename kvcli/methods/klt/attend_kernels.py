"""Attention over KLT's codes: scores of all tokens, softmax with the sum of values, merge of the splits."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.methods.klt.codec import KLTKey, KLTValue
from kvcli.methods.klt.score_kernels import key_scores
from kvcli.methods.klt.value_kernels import value_sum
from kvcli.methods.layer_codec import EncodedTokens, LayerCodec, PartialAttention

KLTLayer = LayerCodec[KLTKey, KLTValue]


def unsupported(codec: KLTLayer) -> str | None:
    """Why these kernels cannot read a layer's codes; None if they can."""
    return f"bands of {codec.key.width} channels, an odd number" if codec.key.width % 2 else None


def fused_attend(codec: KLTLayer, query: Tensor, encoded: EncodedTokens, scaling: float) -> PartialAttention:
    """softmax(scaling q K^T) V over encoded tokens, an `AttendCodes`; float32 queries are multiplied in float32.

    Raises:
        CacheError: positions that are not consecutive.
    """
    scores = key_scores(codec.key, codec.offset, query, encoded, scaling)
    out, lse = value_sum(codec.value, scores, encoded, query.dtype == torch.float32)
    return out.view(query.shape), lse.view(query.shape[:3])
