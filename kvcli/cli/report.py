"""`kvcli report`: records of `kvcli eval` and `kvcli bench` as one page, or as Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from kvcli.cli.command import Command
from kvcli.cli.output import Output
from kvcli.commands.options import Options
from kvcli.commands.sizes import size
from kvcli.errors import UsageError


class ReportOptions(Options):
    """Options of `kvcli report`."""

    records: list[Path] = Field([], description="files of records, of --out or --json of kvcli eval or bench")
    out: Path | None = Field(
        None, description="file, or - for standard output, or folder of svg and png; default: report and the format"
    )
    format: Literal["html", "md", "svg", "png"] = Field(
        "html", description="a page with charts, Markdown with the tables, or each chart as a file"
    )


def run(options: ReportOptions, output: Output) -> None:
    """Write one page of records: loss by size and layer, what was found, speed and memory beside fp16.

    The page needs no network and runs no script.
    """
    from kvcli.report.page import markdown, page, pictures
    from kvcli.report.tables import read, sections
    from kvcli.storage.atomic import replacing

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


COMMAND = Command("report", ReportOptions, run, "kvcli report rows.jsonl --out report.html", ("records",))
