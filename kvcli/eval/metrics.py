"""The figures of a row: means over its units with intervals, and differences to another row over the same units."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from kvcli.eval.bootstrap import estimate, paired_difference
from kvcli.eval.records import (
    Difference,
    DriftPrompt,
    Metric,
    NeedlePrompt,
    RecallPrompt,
    Record,
    TaskDocument,
    TokenBlock,
)

Better = Literal["lower", "higher"]


class Figure(NamedTuple):
    """One figure of a kind of unit.

    Attributes:
        name: in `Record.metrics`.
        field: of the unit.
        better: which direction is better.
        weight: field that says what a unit counts; None: all units count the same.
        gated: whether `--baseline` looks at it.
    """

    name: str
    field: str
    better: Better
    weight: str | None = None
    gated: bool = True


FIGURES: dict[type, tuple[Figure, ...]] = {
    TokenBlock: (
        Figure("kl_mean", "kl", "lower", "tokens"),
        Figure("flips", "flips", "lower", "tokens"),
        Figure("nll", "nll", "lower", "predicted", gated=False),
    ),
    NeedlePrompt: (Figure("exact", "exact", "higher"), Figure("prefix", "prefix", "higher")),
    RecallPrompt: (Figure("exact", "exact", "higher"), Figure("quoted", "quoted", "higher")),
    DriftPrompt: (Figure("equal", "equal", "higher"), Figure("agreed", "agreed", "higher")),
}
"""The figures of every kind of unit but documents of tasks, which have those of their tasks."""


@dataclass(frozen=True)
class Series:
    """One figure of every unit, in order."""

    values: list[float]
    weights: list[float]
    better: Better
    gated: bool = True


def series_of(units: Sequence[Any]) -> dict[str, Series]:
    """The figures of units of one kind, by name."""
    made: dict[str, Series] = {}
    if not units:
        return made
    if isinstance(units[0], TaskDocument):
        for unit in units:
            series = made.setdefault(f"{unit.task}/{unit.metric}", Series([], [], unit.better))
            series.values.append(unit.value)
            series.weights.append(1.0)
        return made
    for figure in FIGURES[type(units[0])]:
        values = [float(getattr(unit, figure.field)) for unit in units]
        weights = [1.0 if figure.weight is None else float(getattr(unit, figure.weight)) for unit in units]
        made[figure.name] = Series(values, weights, figure.better, figure.gated)
    return made


def metrics_of(units: Sequence[Any], compared: Record | None, seed: int = 0) -> dict[str, Metric]:
    """The figures of units, each with its interval and its difference to a row of the same run.

    Args:
        units: of the row.
        compared: the row to compare with; None for that row itself.
        seed: of the bootstrap.
    """
    made = {}
    others = {} if compared is None else series_of(compared.units)
    for name, series in series_of(units).items():
        own, versus = estimate(series.values, series.weights, seed), None
        if compared is not None:
            found = paired_difference(series.values, others[name].values, series.weights, seed)
            versus = Difference(
                to=compared.label, mean=_finite(found.mean), low=found.low, high=found.high, real=found.excludes_zero
            )
        made[name] = Metric(mean=_finite(own.mean), low=own.low, high=own.high, better=series.better, difference=versus)
    return made


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
