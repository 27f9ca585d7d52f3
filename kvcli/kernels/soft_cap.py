"""Capped scores in Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def capped(scores, SOFT_CAP: tl.constexpr):
    """SOFT_CAP * tanh(scores / SOFT_CAP)."""
    return SOFT_CAP * (2.0 * tl.sigmoid(scores * (2.0 / SOFT_CAP)) - 1.0)
