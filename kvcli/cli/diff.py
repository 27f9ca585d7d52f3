"""`kvcli diff`: in what two artifacts, recordings, contexts, recipes or files of records differ."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from kvcli.cli.command import Command
from kvcli.cli.inspect import text_of
from kvcli.cli.output import Output
from kvcli.errors import UsageError
from kvcli.options import Options
from kvcli.tables import DataTable

_NAMED = 6
"""Rows of one file alone that are named; --json has all."""


class DiffOptions(Options):
    """Options of `kvcli diff`."""

    paths: list[Path] = Field(default=[], description="two of a kind, as 'kvcli inspect' takes them")


def run(options: DiffOptions, output: Output) -> None:
    """Show in what two artifacts, recordings, contexts, recipes or files of records differ.

    Rows of records that were measured on the same text are compared unit by unit, with 95 % intervals.
    """
    if len(options.paths) != 2:
        raise UsageError("name two paths")
    from kvcli.report.compare import compared, differences
    from kvcli.report.facts import describe

    first, second = map(describe, options.paths)
    if first["kind"] != second["kind"]:
        raise UsageError(f"{first['path']} is of the kind {first['kind']}, {second['path']} of {second['kind']}")
    of_records = first["kind"] == "records"
    record: dict[str, Any] = compared(*options.paths) if of_records else {"rows": differences(first, second)}
    title = f"{first['path']} (A) and {second['path']} (B)"
    star = "; *: the 95 % interval of the difference excludes 0" if of_records else ""
    table = DataTable.of(title + star, [_cells(row) for row in record["rows"]], text_columns=1 + of_records)
    lines = [f"only in {side}: {_named(names)}" for side in "AB" if (names := record.get(f"only in {side}"))]
    shown: list[str | DataTable] = [table] if record["rows"] else [f"{title} do not differ"] * (not lines)
    output.result({"kind": first["kind"], **record}, [*shown, *lines])


def _named(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _cells(row: Mapping[str, Any]) -> dict[str, str]:
    shown = {x: text_of(y) for x, y in row.items() if x not in ("low", "high", "real") and y is not None}
    if row.get("low") is not None:
        shown["95 % interval"] = f"{row['low']:+.3g} to {row['high']:+.3g}{'*' if row['real'] else ' '}"
    return shown


COMMAND = Command("diff", DiffOptions, run, "kvcli diff before.jsonl after.jsonl", ("paths",))
