"""Numbers that reference codecs and kernels share. This module imports no torch."""

import math

FP16_MAX = 65504.0
"""The largest finite float16."""

FP16_BELOW_MAX = 65472.0
"""The float16 before it: a stored number above this one may have been clamped to `FP16_MAX`."""

TINY = 1e-30
"""Lower bound of divisors that may be 0, so that 0 / 0 is 0 instead of NaN."""


def norm_unit(width: int) -> float:
    """The unit of stored L2 norms of `width` channels: a power of two, sqrt(width) or more.

    A norm of numbers that float16 holds is then in the range of float16, too.
    """
    return 2.0 ** math.ceil(math.log2(width) / 2)
