"""`kvcli merge`."""

from __future__ import annotations

from pathlib import Path

import typer
from pydantic import Field

from kvcli.cli.command import command
from kvcli.cli.output import Output
from kvcli.options import Options
from kvcli.paths import model_folder, newest_shards


class MergeOptions(Options):
    """Options of `kvcli merge`."""

    shards: list[Path] = Field(
        default=[], description="folders of all shards, in any order; default: the newest below runs/"
    )
    out: Path | None = Field(default=None, description="output folder; default: runs/MODEL/samples")
    overwrite: bool = Field(default=False, description="discard another recording in the output folder")


def run(options: MergeOptions, output: Output) -> None:
    """Put the shards of a recording together: the result is what one process would have recorded."""
    from kvcli.calibrate.shards import merge, read_shards

    folders = options.shards or newest_shards()
    shards = read_shards(folders)
    first = shards[0][1]
    folder = options.out or model_folder(first.model, "samples")
    output.settings({"shards": len(shards), "out": folder})
    total = sum(len(manifest.parts) for _, manifest in shards)
    with output.progress("merge", total, "files") as advance:
        recording = merge(folders, folder, overwrite=options.overwrite, advance=advance)
    record = {
        "samples": str(folder),
        "num_tokens": recording.num_tokens,
        "layers": len(recording.layers),
        "shards": len(shards),
    }
    output.result(record, str(folder), ["kvcli", "fit", folder])


def register(app: typer.Typer) -> None:
    """Adds the command."""
    command(app, "merge", MergeOptions, "kvcli merge", ("shards",), resumes=True)(run)
