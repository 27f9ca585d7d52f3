"""Attention over CommVQ's codes: scores from key codes, value bits weighted by the softmax, then the value codebook."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.methods.base import LayerCodec
from kvcli.methods.commvq.keys import CommVQKeyCodec
from kvcli.methods.commvq.score_kernels import key_scores
from kvcli.methods.commvq.value_kernels import apply_codebook, bit_sums
from kvcli.methods.commvq.values import CommVQValueCodec
from kvcli.methods.encoded import EncodedTokens, PartialAttention


def fused_attend(codec: LayerCodec, query: Tensor, part: EncodedTokens, scaling: float) -> PartialAttention:
    """Attention over CommVQ's codes; see `kvcli.methods.encoded.AttendCodes`.

    Raises:
        UsageError: a shape the kernels do not support.
    """
    key, value = codec.key, codec.value
    assert isinstance(key, CommVQKeyCodec)
    assert isinstance(value, CommVQValueCodec)
    exact = query.dtype == torch.float32
    scores = key_scores(key, query, part, scaling, exact)
    sums, lse = bit_sums(value, scores, part, exact)
    return apply_codebook(value, sums, query.shape, exact), lse.view(query.shape[:3])
