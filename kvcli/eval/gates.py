"""Gates for continuous integration: limits of KL and flips, and no row significantly worse than a former record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvcli.errors import UsageError
from kvcli.eval.bootstrap import MIN_UNITS, Estimate, paired_difference
from kvcli.eval.records import Better, EvalRecord, check_labels
from kvcli.fingerprint import differs

NEGLIGIBLE_SHARE = 0.01
"""A difference below this share of the former value passes: other hardware rounds differently."""

_NEGLIGIBLE = 1e-5
_COMPARED_OPTIONS = ("corpus", "corpus_split", "seq_len", "num_sequences", "chunk", "seed", "max_new_tokens")


@dataclass(frozen=True)
class GateResult:
    """One comparison of a row with what was asked for.

    Attributes:
        gate: `max_kld`, `max_flips` or `baseline`.
        label: of the row.
        metric: what is compared.
        value: of the row.
        limit: the highest value that passes, or the former value.
        passed: whether the gate is met.
        reason: one sentence; empty if passed.
    """

    gate: str
    label: str
    metric: str
    value: float
    limit: float
    passed: bool
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain JSON values."""
        return asdict(self)


def check_limits(records: Sequence[Any], max_kld: float | None, max_flips: float | None) -> list[GateResult]:
    """Compares measured means with limits.

    Args:
        records: rows of `kl` or `layers`.
        max_kld: highest mean KL, nats per token.
        max_flips: highest share of flips, in percent.
    """
    results = []
    for record in records:
        for gate, metric, value, limit, unit in (
            ("max_kld", "kl_mean", record.kl_mean, max_kld, "nats per token"),
            ("max_flips", "flips", 100 * record.flips, max_flips, "%"),
        ):
            if limit is not None:
                passed = value <= limit
                reason = "" if passed else f"{record.label}: {metric} {value:.4g} {unit} is more than {limit:g}"
                results.append(GateResult(gate, record.label, metric, value, limit, passed, reason))
    return results


def check_baseline(records: Sequence[EvalRecord], former: Sequence[EvalRecord], seed: int = 0) -> list[GateResult]:
    """Compares rows with former records of the same labels, unit by unit.

    A figure is worse where the 95 % interval of its paired difference is on the bad side of 0, or all units differ
    alike, and the difference is not negligible.

    Raises:
        UsageError: a row without a former record, or one measured on another model, on another text or in another way,
            or with too few units.
    """
    results = []
    for record in records:
        other = find_former(record, former)
        theirs = record.series(other.units)
        for name, ours in record.series(record.units).items():
            if not ours.gated:
                continue
            found = paired_difference(ours.values, theirs[name].values, ours.weights, seed)
            value, limit = (_mean(x.values, x.weights) for x in (ours, theirs[name]))
            passed = not _is_worse(found, limit, ours.better)
            reason = (
                ""
                if passed
                else (f"{record.label}: {name} {value:.4g} is significantly worse than {limit:.4g}{_interval(found)}")
            )
            results.append(GateResult("baseline", record.label, name, value, limit, passed, reason))
    return results


def find_former(record: EvalRecord, former: Sequence[EvalRecord]) -> EvalRecord:
    """The last former record of a row.

    Raises:
        UsageError: there is none that can be compared with; the message says why.
    """
    check_labels(record.suite, [record.label], former)
    other = [other for other in former if (other.suite, other.label) == (record.suite, record.label)][-1]
    if differs(record.fingerprint, other.fingerprint):
        raise UsageError(f"the baseline's row '{other.label}' is of another model ({other.model})")
    if record.protocol != other.protocol or len(record.units) != len(other.units):
        pairs = [(name, other.options.get(name), record.options.get(name)) for name in _COMPARED_OPTIONS]
        differing = ", ".join(f"{name} {theirs} there, {ours} here" for name, theirs, ours in pairs if theirs != ours)
        raise UsageError(
            f"the baseline's row '{other.label}' was not measured on the same text in the same way "
            f"({differing or 'its text differs'}); measure it again"
        )
    if len(record.units) < MIN_UNITS:
        raise UsageError(
            f"{len(record.units)} units ({record.unit}) are too few to compare with a baseline; measure {MIN_UNITS}"
        )
    return other


def _is_worse(found: Estimate, former: float, better: Better) -> bool:
    sign = 1 if better == "lower" else -1
    if sign * found.mean <= max(_NEGLIGIBLE, NEGLIGIBLE_SHARE * abs(former)):
        return False
    if found.low is None or found.high is None:  # all units differ alike
        return True
    return found.low > 0 if better == "lower" else found.high < 0


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(values, weights, strict=True)) / sum(weights)


def _interval(found: Estimate) -> str:
    if found.low is None or found.high is None:
        return ""
    return f" (difference {found.mean:+.4g}, 95 % interval {found.low:+.4g} to {found.high:+.4g})"
