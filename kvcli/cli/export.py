"""`kvcli export`."""

from __future__ import annotations

from pathlib import Path

import typer
from pydantic import Field

from kvcli.cli.command import command
from kvcli.cli.options import Options
from kvcli.cli.output import Output, size
from kvcli.cli.paths import artifact_folder, newest_training


class ExportOptions(Options):
    """Options of `kvcli export`."""

    runs: list[Path] = Field(default=[], description="runs of kvcli fit; default: the newest below runs/")
    out: Path | None = Field(default=None, description="artifact folder; default: runs/MODEL/NAME-OF-RUN")
    overwrite: bool = Field(default=False, description="replace an artifact in the output folder")


def run(options: ExportOptions, output: Output) -> None:
    """Assemble fitted layers into one verified artifact: kvcli.json, codec.safetensors and a model card."""
    from kvcli.artifact import Artifact
    from kvcli.fit import assemble

    runs = options.runs or [newest_training()]
    artifact = assemble(runs)
    folder = options.out or artifact_folder(artifact.metadata["model"], runs[0].name)
    reused = False
    if (folder / "kvcli.json").exists() and not options.overwrite:
        reused = Artifact.load(folder).same_content(artifact)
    if reused:
        output.say(f"{folder} holds this artifact already")
    else:
        artifact.save(folder, overwrite=options.overwrite)
        output.say(f"verified: {len(artifact.tensors)} tensors, {size(artifact.nbytes)}, and kvcli.json, read back")
    output.result({"artifact": str(folder), "bytes": artifact.nbytes, "reused": reused}, str(folder))


def register(app: typer.Typer) -> None:
    """Adds the command."""
    command(app, "export", ExportOptions, "kvcli export", ("runs",))(run)
