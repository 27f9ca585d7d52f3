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
    out: Path | None = Field(None, description="file, or - for standard output; default: report.html or report.md")
    format: Literal["html", "md"] = Field("html", description="a page with charts, or Markdown with the tables")


def run(options: ReportOptions, output: Output) -> None:
    """Write one page of records: loss by size and layer, what was found, speed and memory beside fp16.

    The page needs no network and runs no script.
    """
    from kvcli.report.page import markdown, page
    from kvcli.report.tables import read, sections
    from kvcli.storage.atomic import replacing

    if not options.records:
        raise UsageError("name files of records, such as those of 'kvcli eval --out rows.jsonl'")
    out = options.out or Path(f"report.{options.format}")
    if out.resolve() in [path.resolve() for path in options.records]:
        raise UsageError(f"--out {out} is one of the records")
    lines = [row for path in options.records for row in read(path, lambda line: output.warn(f"warning: {line}"))]
    made = sections(lines)
    text = (page if options.format == "html" else markdown)(made)
    parts = [{"suite": x.suite, "title": x.title, "rows": len(x.rows)} for x in made]
    record = {"file": str(out), "bytes": len(text.encode()), "sections": parts}
    if str(out) == "-":
        output.result({**record, "text": text}, text.rstrip())
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as temporary:
        temporary.write_text(text)
    output.result(record, f"{out}: {len(made)} section{'s' * (len(made) != 1)}, {size(len(text.encode()))}")


COMMAND = Command("report", ReportOptions, run, "kvcli report rows.jsonl --out report.html", ("records",))
