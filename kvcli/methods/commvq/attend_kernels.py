"""Attention over CommVQ's codes (arXiv 2506.18879): key scores, value bits summed under the softmax, value codebook."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.kernels.launch import unsupported_shape
from kvcli.methods.commvq import score_kernels, value_codebook_kernels, value_kernels
from kvcli.methods.commvq.layer import CommVQLayer
from kvcli.methods.encoded import EncodedTokens, PartialAttention


def unsupported(codec: CommVQLayer) -> str | None:
    """Why the kernels do not support a layer's shapes, or None."""
    return score_kernels.unsupported(codec.key) or value_kernels.unsupported(codec.value)


def fused_attend(codec: CommVQLayer, query: Tensor, encoded: EncodedTokens, scaling: float) -> PartialAttention:
    """Attention over CommVQ's codes; see `kvcli.methods.encoded.AttendCodes`.

    Raises:
        UsageError: shapes that `unsupported` refuses.
    """
    if reason := unsupported(codec):
        raise unsupported_shape(reason)
    fp32_dot = query.dtype == torch.float32
    scores = score_kernels.key_scores(codec, query, encoded, scaling, fp32_dot)
    sums, lse = value_kernels.bit_sums(scores, encoded, fp32_dot)
    out = value_codebook_kernels.apply_codebook(codec.value, sums, query.shape, fp32_dot)
    return out, lse.view(query.shape[:3])
