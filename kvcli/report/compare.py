"""Two facts, or two files of records row by row: paired differences with intervals where the units are the same."""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from kvcli.bench.suite import median_of
from kvcli.errors import UsageError
from kvcli.eval.records import from_plain
from kvcli.report.tables import MALFORMED, Row, find_suite, machine, read, unique_names
from kvcli.storage.manifest import flattened

_OF_THE_COMMAND = {"method", "artifact", "out", "baseline", "compare_with", "device", "model"}
"""Options that say which rows a command measured, and where they went."""


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Facts that differ: `name`, `A`, `B`, and `B / A` of numbers; of lists by layer and head the means."""
    sides = [{name: x for name, x in flattened(facts) if name != "path"} for facts in (first, second)]
    rows = []
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        if sides[0].get(name) != sides[1].get(name):
            a, b = (_plain(side.get(name)) for side in sides)
            numbers = all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in (a, b))
            rows.append({"name": name, "A": a, "B": b, "B / A": b / a if numbers and a and b else None})
    return rows


def compared(first: Path, second: Path) -> dict[str, Any]:
    """Rows that are in both files, of the same row the last one, and the names of those that are in one only.

    Returns:
        `rows`: `row`, `name` of a figure or of something else that differs, `A` and `B`. Figures of `kvcli eval` have
        `B - A` and, over the same units, its 95 % interval `low` to `high` and `real`, whether it excludes 0; those of
        `kvcli bench`, medians, have `B / A`.
        `only in A`, `only in B`: names of rows.

    UsageError: a record lacks what is compared.
    """
    try:
        a, b = _rows(first), _rows(second)
        rows = [
            {"row": name, **row}
            for name in a
            if name in b
            for row in (*_figures(a[name], b[name]), *differences(_setting(a[name]), _setting(b[name])))
        ]
    except MALFORMED as error:
        raise UsageError(f"a record of {first} or {second} lacks what is compared: {error}") from error
    return {"rows": rows, "only in A": [x for x in a if x not in b], "only in B": [x for x in b if x not in a]}


def _rows(path: Path) -> dict[str, Row]:
    """The rows of a file by their identifying fields."""
    found: dict[str, Row] = {}
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in read(path):
        where = [] if "metrics" in row else [row.get("dtype"), f"{row['context']} tokens", f"batch {row['batch']}"]
        where += [f"pages of {row['page_size']}"] if row.get("page_size") else []
        groups.setdefault((row["suite"], row.get("model", row.get("shape")), *where), []).append(row)
    for group, rows in groups.items():
        found |= {" ".join(str(x) for x in (name, *group) if x): row for name, row in unique_names(rows)}
    return found


def _setting(row: Row) -> dict[str, Any]:
    """What a row was measured of, with and on."""
    options = {f"--{x.replace('_', '-')}": y for x, y in row.get("options", {}).items() if x not in _OF_THE_COMMAND}
    memory, info = row.get("memory") or {}, row.get("machine") or {}
    bits = {x: memory[x] for x in ("key_bits", "value_bits") if x in memory}
    of = {x: row.get(x) for x in ("fingerprint", "protocol", "method", "status")}
    return {**bits, **options, **of, "on": machine(row), "commit": info.get("commit")}


def _figures(a: Row, b: Row) -> list[dict[str, Any]]:
    if "metrics" not in a:
        return [
            {"name": f"{what}, {unit}", "A": x / scale, "B": y / scale, "B / A": y / x}
            for field, what, unit, scale in find_suite(a["suite"]).bars
            if (x := median_of(a, field)) and (y := median_of(b, field))
        ]
    paired = _paired(a, b)
    return [
        {"name": name, "A": x, "B": y, "B - A": y - x, **paired.get(name, {"low": None, "high": None, "real": None})}
        for name, metric in a["metrics"].items()
        if (x := metric["mean"]) is not None and (y := b["metrics"].get(name, {}).get("mean")) is not None
    ]


def _paired(a: Row, b: Row) -> dict[str, dict[str, Any]]:
    """By figure, the interval of the difference over the same units; empty if these are not the same, or left out."""
    from kvcli.eval.intervals import metrics_of

    if a["protocol"] != b["protocol"] or "units" not in a or "units" not in b or len(a["units"]) != len(b["units"]):
        return {}
    former, record = from_plain(a), from_plain(b)
    found = {name: x.difference for name, x in metrics_of(record.units, former).items()}
    return {name: {"low": x.low, "high": x.high, "real": x.real} for name, x in found.items() if x is not None}


def _plain(value: Any) -> Any:
    """A list of numbers by layer, or by layer and head, as its mean; anything else as it is."""
    numbers = [y for x in value for y in (x if isinstance(x, list) else [x])] if isinstance(value, list) else []
    return fmean(numbers) if numbers and all(isinstance(x, (int, float)) for x in numbers) else value
