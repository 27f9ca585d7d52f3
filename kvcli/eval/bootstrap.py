"""Confidence intervals and paired differences by the bootstrap, from figures of units that are resampled as wholes.

Tokens are not independent: a token's error depends on the text around it and lasts. What is resampled are therefore
units that are nearly independent of each other: blocks of consecutive tokens, prompts or documents. This module does
not know what they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import bootstrap

CONFIDENCE = 0.95
MIN_UNITS = 8
"""Fewest units for which an interval is given: with fewer, a bootstrap's intervals are much too narrow."""

_RESAMPLES = 9999
_VALUES_AT_ONCE = 2**22
_ROUNDING = 1e-12

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % confidence interval.

    Attributes:
        mean: over all units, weighted.
        low: lower end of the interval; None where there is none: too few units, or units that are all equal.
        high: its upper end.
    """

    mean: float
    low: float | None = None
    high: float | None = None

    @property
    def excludes_zero(self) -> bool | None:
        """Whether 0 is outside of the interval; None where there is no interval."""
        return None if self.low is None or self.high is None else self.low > 0 or self.high < 0


def estimate(values: Sequence[float], weights: Sequence[float], seed: int = 0) -> Estimate:
    """A weighted mean and its interval (bias-corrected and accelerated bootstrap, `scipy.stats.bootstrap`).

    Args:
        values: one mean per unit, such as the mean KL of a block of tokens.
        weights: what each unit counts, such as its tokens.
        seed: of the resampling.
    """
    x, w = np.asarray(values, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    mean = float((x * w).sum() / w.sum())
    # rounding apart: resampling values that are all the same has nothing to vary
    if len(x) < MIN_UNITS or not np.isfinite(x).all() or np.ptp(x) <= _ROUNDING * float(np.abs(x).max()):
        return Estimate(mean)
    found = bootstrap(
        (x * w, w),
        _ratio,
        paired=True,
        vectorized=True,
        confidence_level=CONFIDENCE,
        n_resamples=_RESAMPLES,
        batch=max(1, _VALUES_AT_ONCE // len(x)),
        method="BCa",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    low, high = float(found.low), float(found.high)
    return Estimate(mean, low, high) if math.isfinite(low + high) else Estimate(mean)


def paired_difference(
    values: Sequence[float], others: Sequence[float], weights: Sequence[float], seed: int = 0
) -> Estimate:
    """The mean of `values - others` over the same units, and its interval.

    Units are compared with themselves, so what makes one unit harder than another, for both rows alike, drops out.

    Args:
        values: one mean per unit.
        others: those of the row compared with, of the same units in the same order.
        weights: what each unit counts.
        seed: of the resampling.
    """
    return estimate([a - b for a, b in zip(values, others, strict=True)], weights, seed)


def _ratio(sums: Array, weights: Array, axis: int = -1) -> Array:
    """The weighted mean: sums over weights."""
    ratio: Array = sums.sum(axis=axis) / weights.sum(axis=axis)
    return ratio
