"""Confidence intervals and paired differences by the bootstrap, and gates for continuous integration that use them.

Tokens are not independent: a token's error depends on the text around it and lasts. What is resampled are therefore
units that are nearly independent of each other: blocks of consecutive tokens, prompts or documents.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import bootstrap

from kvcli.errors import UsageError
from kvcli.eval.records import ROW_OPTIONS, Difference, EvalRecord, Metric, Unit, check_labels, series_of
from kvcli.models.fingerprint import differs

CONFIDENCE = 0.95
MIN_UNITS = 8
"""Fewest units for which an interval is given: with fewer, a bootstrap's intervals are much too narrow."""

_RESAMPLES = 9999
_VALUES_AT_ONCE = 2**22
_ROUNDING = 1e-12

NEGLIGIBLE_SHARE = 0.01
"""A difference below this share of the former value passes: other hardware rounds differently."""

_NEGLIGIBLE = 1e-5


@dataclass(frozen=True)
class Estimate:
    """A weighted mean over units, with its 95 % confidence interval; None where units are too few or all equal."""

    mean: float
    low: float | None = None
    high: float | None = None

    @property
    def excludes_zero(self) -> bool | None:
        """Whether 0 is outside of the interval; None where there is no interval."""
        return None if self.low is None or self.high is None else self.low > 0 or self.high < 0


def estimate(values: Sequence[float], weights: Sequence[float], seed: int = 0) -> Estimate:
    """A weighted mean and its interval (bias-corrected and accelerated bootstrap, `scipy.stats.bootstrap`).

    The values are one per unit, such as the mean KL of a block of tokens, and the weights what each unit counts, such
    as its tokens; the seed is that of the resampling.
    """
    x, w = np.asarray(values, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    mean = float(np.average(x, weights=w))
    # rounding apart: resampling values that are all the same has nothing to vary
    if len(x) < MIN_UNITS or not np.isfinite(x).all() or np.ptp(x) <= _ROUNDING * float(np.abs(x).max()):
        return Estimate(mean)

    def ratio(sums: NDArray[np.float64], weights: NDArray[np.float64], axis: int = -1) -> Any:
        return sums.sum(axis=axis) / weights.sum(axis=axis)

    interval = bootstrap(
        (x * w, w),
        ratio,
        paired=True,
        vectorized=True,
        confidence_level=CONFIDENCE,
        n_resamples=_RESAMPLES,
        batch=max(1, _VALUES_AT_ONCE // len(x)),
        method="BCa",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    low, high = float(interval.low), float(interval.high)
    return Estimate(mean, low, high) if math.isfinite(low + high) else Estimate(mean)


def paired_difference(
    values: Sequence[float], others: Sequence[float], weights: Sequence[float], seed: int = 0
) -> Estimate:
    """The mean of `values - others` over the same units in the same order, and its interval; as `estimate` otherwise.

    Units are compared with themselves, so what makes one unit harder than another, for both rows alike, drops out.
    """
    return estimate([a - b for a, b in zip(values, others, strict=True)], weights, seed)


def metrics_of(units: Sequence[Unit], compared: EvalRecord | None, seed: int = 0) -> dict[str, Metric]:
    """The figures of units, each with its interval and its difference to a row of the same run, if there is one."""
    metrics = {}
    others = {} if compared is None else series_of(compared.units)
    for name, series in series_of(units).items():
        own, versus = estimate(series.values, series.weights, seed), None
        if compared is not None:
            x = paired_difference(series.values, others[name].values, series.weights, seed)
            mean = x.mean if math.isfinite(x.mean) else None
            versus = Difference(to=compared.label, mean=mean, low=x.low, high=x.high, real=x.excludes_zero)
        mean = own.mean if math.isfinite(own.mean) else None
        metrics[name] = Metric(mean=mean, low=own.low, high=own.high, better=series.better, difference=versus)
    return metrics


@dataclass(frozen=True)
class GateResult:
    """One comparison of a row."""

    gate: str  # `max_kld`, `max_flips` or `baseline`
    label: str
    metric: str
    value: float
    limit: float  # the highest value that passes, or the former value
    passed: bool
    reason: str = ""  # one sentence, empty if passed


def check_limits(records: Sequence[Any], max_kld: float | None, max_flips: float | None) -> list[GateResult]:
    """Compares means of rows of `kl` or `layers` with limits: KL in nats per token, flips in percent."""
    results = []
    for record in records:
        for gate, metric, value, limit, unit in (
            ("max_kld", "kl_mean", record.kl_mean, max_kld, "nats per token"),
            ("max_flips", "flips", 100 * record.flips, max_flips, "%"),
        ):
            if limit is not None:
                reason = f"{record.label}: {metric} {value:.4g} {unit} is more than {limit:g}" * (not value <= limit)
                results.append(GateResult(gate, record.label, metric, value, limit, not reason, reason))
    return results


def check_baseline(records: Sequence[EvalRecord], former: Sequence[EvalRecord], seed: int = 0) -> list[GateResult]:
    """Compares rows with former records of the same labels, unit by unit.

    A figure is worse where the 95 % interval of its paired difference is on the bad side of 0, or all units differ
    alike, and the difference is not negligible. UsageError: as `find_former`.
    """
    results = []
    for record in records:
        theirs = series_of(find_former(record, former).units)
        for name, ours in series_of(record.units).items():
            if not ours.gated:
                continue
            difference = paired_difference(ours.values, theirs[name].values, ours.weights, seed)
            value, limit = (float(np.average(x.values, weights=x.weights)) for x in (ours, theirs[name]))
            reason, sign = "", 1 if ours.better == "lower" else -1
            end = difference.low if sign > 0 else difference.high
            negligible = sign * difference.mean <= max(_NEGLIGIBLE, NEGLIGIBLE_SHARE * abs(limit))
            if not negligible and (end is None or sign * end > 0):  # None: all units differ alike
                reason = f"{record.label}: {name} {value:.4g} is significantly worse than {limit:.4g}"
                if difference.low is not None:
                    ends = f"{difference.low:+.4g} to {difference.high:+.4g}"
                    reason += f" (difference {difference.mean:+.4g}, 95 % interval {ends})"
            results.append(GateResult("baseline", record.label, name, value, limit, not reason, reason))
    return results


def find_former(record: EvalRecord, former: Sequence[EvalRecord]) -> EvalRecord:
    """The last former record of a row; UsageError: none, or of another model, text or setting, or of too few units."""
    check_labels(record.suite, [record.label], former)
    other = [other for other in former if (other.suite, other.label) == (record.suite, record.label)][-1]
    if differs(record.fingerprint, other.fingerprint):
        raise UsageError(f"the baseline's row '{other.label}' is of another model ({other.model})")
    if record.protocol != other.protocol or len(record.units) != len(other.units):
        asked = {name: ours for name, ours in record.options.items() if name not in ROW_OPTIONS}
        pairs = [(name, other.options.get(name), ours) for name, ours in asked.items()]
        differing = ", ".join(f"{name} {theirs} there, {ours} here" for name, theirs, ours in pairs if theirs != ours)
        raise UsageError(
            f"the baseline's row '{other.label}' was not measured on the same text in the same way "
            f"({differing or 'its text differs'}); measure the baseline again"
        )
    if (count := len(record.units)) < MIN_UNITS:
        raise UsageError(f"{count} units ({record.unit}) are too few to compare with a baseline; measure {MIN_UNITS}")
    return other
