"""The records of `kvcli eval`: one schema for all suites, checked when written and when read; what tables say of them.

docs/records.md describes every field. A suite adds a class of units.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product, takewhile
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from kvcli.commands.sizes import number
from kvcli.commands.suite import Records
from kvcli.errors import UsageError
from kvcli.registry import BASELINE, EVAL_SUITES, get_suite
from kvcli.storage.atomic import read_records, to_json

Better = Literal["lower", "higher"]

STAR = "*: the 95 % interval of the difference excludes 0"
"""Part of a table's title, for `difference`."""

UNCOMPRESSED = "uncompressed"
"""Label of the row of the model itself, with transformers' own cache."""

ROW_OPTIONS = {*("model", "method", "setting", "artifact", "recipe", "impl"), "device", "dtype", "out", "baseline"}
ROW_OPTIONS.add("compare_with")
"""Options that say what a row is of and where it goes, not how it is measured."""


class Strict(BaseModel):
    """A part of a record: no field but its own."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class Difference(Strict):
    """A figure minus the same figure of another row, over the same units."""

    to: str
    mean: float | None
    low: float | None
    high: float | None
    real: bool | None


class Metric(Strict):
    """A mean over units, with its 95 % confidence interval and its difference to another row."""

    mean: float | None
    low: float | None
    high: float | None
    better: Better
    difference: Difference | None = None


class Figure(NamedTuple):
    """A figure that is a mean over units."""

    name: str  # in `EvalRecord.metrics`
    field: str  # of the unit
    better: Better
    weight: str | None = None  # the field that says what a unit counts; None: all count the same
    gated: bool = True  # whether `--baseline` reads it


class Unit(Strict):
    """What is measured, and resampled for intervals; `kind` is what one is called."""

    kind: ClassVar[str] = "prompt"
    figures: ClassVar[tuple[Figure, ...]]


class PromptUnit(Unit):
    """A prompt that was answered."""

    prompt: int
    prompt_tokens: int
    expected: str
    answer: str


@dataclass(frozen=True)
class Series:
    """One figure of every unit, in order."""

    values: list[float]
    weights: list[float]
    better: Better
    gated: bool


def series_of(units: Sequence[Unit]) -> dict[str, Series]:
    """The figures of units, by name."""
    found: dict[str, Series] = {}
    for unit in units:
        for figure in unit.figures:
            series = found.setdefault(figure.name, Series([], [], figure.better, figure.gated))
            series.values.append(float(getattr(unit, figure.field)))
            series.weights.append(1.0 if figure.weight is None else float(getattr(unit, figure.weight)))
    return found


class EvalRecord(Strict):
    """What every suite records of a row: a method with its settings, measured on some units."""

    schema_version: Literal[1] = 1
    suite: str
    label: str
    model: str
    fingerprint: str
    method: str
    artifact: str | None
    artifact_sha256: str | None = None
    protocol: str
    options: dict[str, Any]
    metrics: dict[str, Metric]
    memory: dict[str, Any] | None
    dtype: str
    device: str
    threads: int
    machine: dict[str, Any]
    unit: str
    units: Sequence[Any]

    def to_plain(self) -> dict[str, Any]:
        """The plain JSON values that are written, checked by reading them again; ValidationError as `from_plain`."""
        plain: dict[str, Any] = json.loads(to_json(self.model_dump(mode="json")))
        from_plain(plain)
        plain["units"] = plain.pop("units")  # what is long comes last
        return plain


@cache
def record_type(base: type[EvalRecord], unit: type[Unit]) -> type[EvalRecord]:
    """Records of one kind of units; made where they are needed, as `kvcli --help` does not need them."""
    return create_model(base.__name__, __base__=base, units=(list[unit], ...))  # type: ignore[valid-type]


def from_plain(values: Mapping[str, Any]) -> EvalRecord:
    """The record of plain JSON values; ValidationError for a field that is missing, unknown or of another type."""
    suite = Literal[tuple(EVAL_SUITES)]  # type: ignore[valid-type]
    name = create_model("Named", suite=(suite, ...)).model_validate(values).suite  # type: ignore[arg-type,attr-defined]
    found = get_suite(EVAL_SUITES[name])
    return record_type(found.record, found.unit).model_validate(values)


def read_plain(path: Path, warn: Callable[[str], None] = lambda line: None) -> list[dict[str, Any]]:
    """The rows of a file as plain JSON values: lines that `--out` wrote, or the object that `--json` printed.

    Lines that are no JSON objects, as a kill leaves one, are left out; `warn` is told how many.

    UsageError: no such file, or one without rows.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'it is not text'}") from error
    of_all = {}
    try:
        content = json.loads(text)
        rows = content.get("rows", [content]) if isinstance(content, dict) else []
        if isinstance(content, dict) and "rows" in content and "machine" in content:
            of_all = {"machine": content["machine"]}
    except (ValueError, RecursionError):
        rows = read_records(path)
        if rows and (lost := sum(not line.isspace() for line in text.splitlines() if line) - len(rows)):
            warn(f"{path}: lines that are cut off or damaged were left out: {lost}")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise UsageError(f"{path} holds no records of kvcli eval or kvcli bench")
    return [of_all | row for row in rows]


def read_rows(path: Path) -> list[EvalRecord]:
    """The records of a file, as `read_plain` finds them.

    UsageError: no such file, or none of its records has this schema; the message names the first fault.
    """
    return [checked(path, place, values) for place, values in enumerate(read_plain(path))]


def checked(path: Path, place: int, values: Mapping[str, Any]) -> EvalRecord:
    """A row of a file, its place in the messages counted from 0; UsageError: it has not this schema."""
    try:
        return from_plain(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UsageError(f"{path}: row {place} is no record of kvcli eval ({where}: {first['msg']})") from error


def check_labels(suite: str, labels: Sequence[str], former: Sequence[EvalRecord]) -> None:
    """Raises UsageError for a row that has no former record; it can be called before anything is measured."""
    known = list(dict.fromkeys(other.label for other in former if other.suite == suite))
    for label in labels:
        if label not in known:
            have = ", ".join(known) or "none"
            raise UsageError(f"the baseline has no row '{label}' of suite {suite}; its rows are: {have}")


def agreed(first: Sequence[Any], second: Sequence[Any]) -> int:
    """How many elements two sequences begin with alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def values_of(records: Records, name: str) -> list[Any]:
    """The values of a field of units, each once."""
    return list(dict.fromkeys(unit[name] for unit in records[0]["units"]))


def by_field(records: Records, name: str) -> Iterator[tuple[Any, Any, list[Any]]]:
    """Records with their units by the value of a field, where there are several, and with all, whose value is None."""
    values = values_of(records, name)
    for record, value in product(records, (*values, None) if len(values) > 1 else (None,)):
        yield record, value, [unit for unit in record["units"] if value in (None, unit[name])]


def mean(units: Sequence[dict[str, Any]], name: str) -> float:
    """The mean of a field of units."""
    return float(sum(unit[name] for unit in units) / len(units))


def interval(record: Any, name: str, template: str, factor: float = 1) -> str:
    """The interval of a figure as text."""
    metric = record.get("metrics", {}).get(name)
    if metric is None or metric["low"] is None:
        return "-"
    return f"{number(factor * metric['low'], template)}-{number(factor * metric['high'], template)}"


def compared_with(records: Iterable[Any], name: str) -> str | None:
    """The row that others are compared with by a metric; None: there is no such one."""
    found = (record.get("metrics", {}).get(name, {}).get("difference") for record in records)
    return next((versus["to"] for versus in found if versus is not None), None)


def difference(record: Any, name: str, template: str, factor: float = 1, to: str | None = None) -> str:
    """The difference to the row compared with, with a star if it is real; none if that was not the row `to`."""
    versus = record.get("metrics", {}).get(name, {}).get("difference")
    if versus is None or versus["mean"] is None or to not in (None, versus["to"]):
        return "-"
    return number(factor * versus["mean"], template) + ("*" if versus["real"] else " ")


def verdict(rows: Records) -> str | None:
    """Of rows of one suite: which lose least for their bits, or are worse than the model itself; None: nothing."""
    figure = next(iter(rows[0]["metrics"]), "")
    if figure == "kl_mean":
        return _front(rows)
    found = {_name(row, rows): row["metrics"][figure] for row in rows if figure in row["metrics"]}
    own = found.pop(UNCOMPRESSED, None)
    if own is None or not found:
        return None
    if own["better"] == "higher" and own["mean"] == 0:
        return "The model itself finds nothing here: these rows say nothing of methods."
    apart: dict[bool, list[str]] = {True: [], False: []}
    for label, metric in found.items():
        versus = metric["difference"] or {}
        if versus.get("to") == UNCOMPRESSED and versus["real"] is not None:
            worse = (versus["mean"] < 0) == (metric["better"] == "higher")
            apart[versus["real"] and worse].append(label)
    words = {True: "worse than the model itself, beyond chance", False: "not told apart from it, or better"}
    said = "; ".join(f"{words[kind]}: {', '.join(names)}" for kind, names in apart.items() if names)
    return f"{said[:1].upper()}{said[1:]}." if said else None


def _front(rows: Records) -> str | None:
    best, front = float("inf"), []
    kept = [row for row in rows if row["memory"] and row["method"] != BASELINE and row.get("layer") is None]
    for row in sorted(kept, key=lambda row: (row["memory"]["true_bits"], row["kl_mean"])):
        if row["kl_mean"] < best:
            best = row["kl_mean"]
            front.append(f"{_name(row, rows)} ({row['memory']['true_bits']:.2f} bits, KL {best:.2g})")
    return f"No other row has fewer bits and loses less than {', '.join(front)}." if len(kept) > 1 else None


def _name(row: Any, rows: Records) -> str:
    """The method, or the label where several rows have it."""
    alone = [x["method"] for x in rows].count(row["method"]) == 1 and row["label"] != UNCOMPRESSED
    return str(row["method"] if alone else row["label"])
