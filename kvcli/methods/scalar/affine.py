"""Asymmetric uniform quantization of groups: x = code * scale + zero, with 16-bit scale and zero.

scale = (max - min) / (2^b - 1) and zero = min of each group, as in KIVI section 3.1. Codes are chosen for the scale and
zero as stored, so their rounding is not paid twice; a group whose values are equal has scale 0 and decodes to its zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

AFFINE_BITS = (1, 2, 4, 8)
"""Widths that divide a byte."""

_LIMIT = torch.finfo(torch.float16).max


def quantize(groups: Tensor, n_bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantizes along the last axis.

    Args:
        groups: [..., group_size]; values beyond the range of float16 are clamped to it.
        n_bits: bits a code.

    Returns:
        codes: int32 [..., group_size].
        scale: float16 [..., 1].
        zero: float16 [..., 1].
    """
    groups = groups.float().clamp(-_LIMIT, _LIMIT)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    levels = 2**n_bits - 1
    zero = low.half()
    # by a tensor: for a number CUDA multiplies with its rounded inverse, and codes would differ from the CPU's
    scale = ((high - low) / torch.full_like(low, levels)).clamp(max=_LIMIT).half()
    step = scale.float()
    # a range too small for float16 is stored as scale 0: all codes are 0 then
    codes = torch.where(step > 0, (groups - zero.float()) / step.clamp_min(1e-30), 0.0)
    return codes.round().clamp(0, levels).int(), scale, zero


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Inverse of `quantize`, in float32; scale and zero broadcast against the codes."""
    return codes.float() * scale.float() + zero.float()
