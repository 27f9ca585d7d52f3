"""`kvcli inspect`, `diff` and `report`: what artifacts, recordings, contexts, recipes and records hold, and differ in.

`report` shows records of `kvcli eval` and `kvcli bench` as one page, or as Markdown.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from pydantic import Field

from kvcli.cli.command import Command
from kvcli.cli.output import Output
from kvcli.commands.options import Options
from kvcli.commands.sizes import size
from kvcli.commands.tables import DataTable
from kvcli.errors import UsageError
from kvcli.registry import DEFAULT_METHOD
from kvcli.report.facts import describe, sparkline
from kvcli.storage.atomic import replacing
from kvcli.storage.manifest import flattened

_SHOWN = 48
"""Characters of a value that are shown, but for texts of several words; --json has all."""

_NAMED = 6
"""Rows of one file alone that `diff` names; --json has all."""


class InspectOptions(Options):
    """Options of `kvcli inspect`."""

    path: Path | None = Field(None, description="artifact, recording, recipe, context (file or STORE/NAME) or records")


class DiffOptions(Options):
    """Options of `kvcli diff`."""

    paths: list[Path] = Field([], description="two of a kind, as 'kvcli inspect' takes them")


def inspect(options: InspectOptions, output: Output) -> None:
    """Show what is in an artifact, a recording, a context, a recipe or a file of records: bits, errors, origin.

    Bits count every scale and norm. An artifact is verified, of a context the record alone is read.
    """
    if options.path is None:
        raise UsageError("name an artifact, a recording, a context, a recipe or a file of records")
    facts = describe(options.path)
    output.result(facts, shown(facts))


def shown(facts: Mapping[str, Any]) -> list[str | DataTable]:
    """Facts as lines and tables."""
    parts: list[str | DataTable] = [f"{facts['path']}: {facts['kind']}"]
    rows: list[list[str]] = []
    settings = facts.get("settings") or {}
    bits = {x: settings[x] for x in ("k_bits", "v_bits") if isinstance(settings.get(x), list)}
    for name, value in facts.items():
        if isinstance(value, Mapping) and name != "layers":
            found = [(x, text_of(y, name)) for x, y in flattened(value) if name != "settings" or x not in bits]
            rows += [[name if i == 0 else "", *pair] for i, pair in enumerate(found)]
        elif name not in ("path", "kind", "layers", "sections", "warnings"):
            rows.append([name, "", text_of(value)])
    if rows:
        parts.append(DataTable("", ("", " ", "value"), rows, text_columns=3, prose=(" ", "value")))
    if layers := {**bits, **facts.get("layers", {})}:
        parts.append(_layers(layers))
    for section in facts.get("sections", ()):
        parts += ["", section["title"], *(f"  {x}" for x in section["notes"])]
        parts += [DataTable.of("", section["rows"]), *(f"  $ {x}" for x in section["commands"])]
    return [*parts, *(f"warning: {x}" for x in facts.get("warnings", ()))]


def text_of(value: Any, group: str = "") -> str:
    """A value as text; bytes with a unit."""
    if value is None or value in ((), []):
        return "-"
    if group == "bytes":
        return size(value)
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    whole = len(text) <= _SHOWN or (isinstance(value, str) and " " in value)
    return text if whole else f"{text[:_SHOWN]}..."


def _layers(layers: Mapping[str, Sequence[Any]]) -> DataTable:
    """What is known by layer, with a bar for each, and by head where there are several."""
    rows: list[dict[str, str]] = []

    def add(name: str, values: list[float]) -> None:
        figures = {"mean": fmean(values), "least": min(values), "most": max(values)}
        rows.append({"": name, "by layer": sparkline(values), **{x: f"{y:.4g}" for x, y in figures.items()}})

    for label, found in layers.items():
        if any(x is None for x in found):
            rows.append({"": label, "by layer": "not recorded"})
            continue
        heads = [x if isinstance(x, list) else [x] for x in found]
        add(label, [fmean(x) for x in heads])
        if len(heads[0]) > 1:
            for head, values in enumerate(zip(*heads, strict=True)):
                add(f"  head {head}", list(values))
    return DataTable.of("layers", rows, ("least", "most"), text_columns=2, prose=("",))


def diff(options: DiffOptions, output: Output) -> None:
    """Show in what two artifacts, recordings, contexts, recipes or files of records differ.

    Rows of records that were measured on the same text are compared unit by unit, with 95 % intervals.
    """
    if len(options.paths) != 2:
        raise UsageError("name two paths")
    from kvcli.report.compare import compared, differences

    first, second = map(describe, options.paths)
    if first["kind"] != second["kind"]:
        raise UsageError(f"{first['path']} is of the kind {first['kind']}, {second['path']} of {second['kind']}")
    of_records = first["kind"] == "records"
    record: dict[str, Any] = compared(*options.paths) if of_records else {"rows": differences(first, second)}
    title = f"{first['path']} (A) and {second['path']} (B)"
    star = "; *: the 95 % interval of the difference excludes 0" if of_records else ""
    cells = [*map(_cells, record["rows"])]
    table = DataTable.of(title + star, cells, text_columns=1 + of_records, prose=("name", "A", "B"))
    lines = [f"only in {side}: {_named(names)}" for side in "AB" if (names := record.get(f"only in {side}"))]
    shown: list[str | DataTable] = [table] if record["rows"] else [f"{title} do not differ"] * (not lines)
    output.result({"kind": first["kind"], **record}, [*shown, *lines])


def _named(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + f" and {len(names) - _NAMED} more" * (len(names) > _NAMED)


def _cells(row: Mapping[str, Any]) -> dict[str, str]:
    shown = {x: text_of(y) for x, y in row.items() if x not in ("low", "high", "real") and y is not None}
    if row.get("low") is not None:
        shown["95 % interval"] = f"{row['low']:+.3g} to {row['high']:+.3g}{'*' if row['real'] else ' '}"
    return shown


class ReportOptions(Options):
    """Options of `kvcli report`."""

    records: list[Path] = Field([], description="files of records, of --out or --json of kvcli eval or bench")
    out: Path | None = Field(
        None, description="file, or - for standard output, or folder of svg and png; default: report and the format"
    )
    format: Literal["html", "md", "svg", "png"] = Field(
        "html", description="a page with charts, Markdown with the tables, or each chart as a file"
    )


def report(options: ReportOptions, output: Output) -> None:
    """Write one page of records: loss by size and layer, what was found, speed and memory beside fp16.

    The page needs no network and runs no script.
    """
    from kvcli.report.page import markdown, page, pictures
    from kvcli.report.tables import read, sections

    if not options.records:
        raise UsageError("name files of records, such as those of 'kvcli eval --out rows.jsonl'")
    kind, drawn = options.format, options.format in ("svg", "png")
    out = options.out or Path(f"report-{kind}" if drawn else f"report.{kind}")
    if out.resolve() in [path.resolve() for path in options.records]:
        raise UsageError(f"--out {out} is one of the records")
    if drawn and (out.is_file() or str(out) == "-"):
        raise UsageError(f"--out {out} must be a folder: each chart is a file")
    lines = [row for path in options.records for row in read(path, lambda line: output.warn(f"warning: {line}"))]
    made = sections(lines)
    text = "" if drawn else (page if kind == "html" else markdown)(made)
    files = {out / name: x for name, x in pictures(made, kind).items()} if drawn else {out: text.encode()}
    parts = [{"suite": x.suite, "title": x.title, "rows": len(x.rows)} for x in made]
    nbytes = sum(map(len, files.values()))
    record = {"file": str(out), "files": [*map(str, files)], "bytes": nbytes, "sections": parts}
    if str(out) == "-":
        output.result({**record, "text": text}, text.rstrip())
        return
    for path, data in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_bytes(data)
    what = f"{len(files)} chart{'s' * (len(files) != 1)}" if drawn else f"{len(made)} section{'s' * (len(made) != 1)}"
    output.result(record, f"{out}: {what}, {size(nbytes)}")


EXAMPLE = f"kvcli inspect runs/smollm2-135m/{DEFAULT_METHOD}-2bit"
INSPECT = Command("inspect", InspectOptions, inspect, EXAMPLE, ("path",))
DIFF = Command("diff", DiffOptions, diff, "kvcli diff before.jsonl after.jsonl", ("paths",))
REPORT = Command("report", ReportOptions, report, "kvcli report rows.jsonl --out report.html", ("records",))
