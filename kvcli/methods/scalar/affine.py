"""Asymmetric uniform quantization of groups: x = code * scale + zero, with 16-bit scale and zero.

scale = (max - min) / (2^b - 1) and zero = min of each group, as in KIVI (arXiv 2402.02750) section 3.1. Codes are
chosen for scale and zero as stored, so that their rounding adds no second error; a group of equal values has scale 0
and decodes to its zero, exactly if it is float16. A scale cannot exceed 65504: at one bit, a group of a larger range
loses half of the excess at either end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.kernels.constants import FP16_MAX


def max_magnitude(n_bits: int) -> float:
    """Largest magnitude of numbers of which every group is in the range of scale and zero."""
    return FP16_MAX / 2 if n_bits == 1 else FP16_MAX


def quantize(groups: Tensor, n_bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantizes along the last axis.

    Args:
        groups: [..., group_size]; values beyond the range of float16 are clamped to it.
        n_bits: bits per code.

    Returns:
        codes: int32 [..., group_size].
        scale: float16 [..., 1].
        zero: float16 [..., 1].
    """
    groups = groups.float().clamp(-FP16_MAX, FP16_MAX)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    levels = 2**n_bits - 1
    if levels == 1:
        excess = (high - low - FP16_MAX).clamp_min(0) * 0.5
        low, high = low + excess, high - excess
    zero = low.half()
    # divided by a tensor: CUDA multiplies by the rounded inverse of a number, and codes would differ from the CPU's
    scale = ((high - low) / torch.full_like(low, levels)).half()
    # a range too small for float16 is stored as scale 0: the quotients are infinite or 0 / 0, and all codes are 0 then
    codes = ((groups - zero.float()) / scale.float()).nan_to_num_(0.0, 0.0, 0.0)
    return codes.round_().clamp_(0, levels).int(), scale, zero


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Inverse of `quantize`: float32 of the codes' shape; scale and zero broadcast against the codes."""
    return codes.float() * scale.float() + zero.float()
