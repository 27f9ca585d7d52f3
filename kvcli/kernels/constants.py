"""Numbers that reference codecs and kernels share. This module imports nothing."""

FP16_MAX = 65504.0
"""The largest finite float16."""

TINY = 1e-30
"""Lower bound of divisors that may be 0, so that 0 / 0 is 0 instead of NaN."""
