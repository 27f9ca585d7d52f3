"""`kvcli export`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer
from pydantic import Field

from kvcli.cli.command import command
from kvcli.cli.next_command import PROMPT, model_argument
from kvcli.cli.output import Output
from kvcli.errors import ArtifactError
from kvcli.options import Options
from kvcli.paths import model_folder, newest_training
from kvcli.sizes import size


class ExportOptions(Options):
    """Options of `kvcli export`."""

    runs: list[Path] = Field(default=[], description="runs of kvcli fit; default: the newest below runs/")
    out: Path | None = Field(default=None, description="artifact folder; default: runs/MODEL/NAME-OF-RUN")
    overwrite: bool = Field(default=False, description="replace an artifact in the output folder")


def run(options: ExportOptions, output: Output) -> None:
    """Assemble fitted layers into one verified artifact: kvcli.json, codec.safetensors and a model card."""
    runs = options.runs or [newest_training()]
    if missing := [folder for folder in runs if not (folder / "run.json").exists()]:
        raise ArtifactError(f"no run in {missing[0]}; run 'kvcli fit' first")
    record = write_artifact(runs, options.out, options.overwrite, output)
    output.result(record, record["artifact"], generate_with(record["artifact"]))


def write_artifact(runs: list[Path], out: Path | None, overwrite: bool, output: Output) -> dict[str, Any]:
    """Assembles runs of a fit and writes the artifact, unless the folder holds it already.

    Args:
        runs: run folders, which together have all layers.
        out: folder of the artifact; None: that of the model and the first run.
        overwrite: replace another artifact in the folder.
        output: says what was written.

    Returns:
        `artifact`, the folder; its `bytes`; and whether it was `reused`.

    Raises:
        ArtifactError: layers are missing or damaged, or the folder holds another artifact.
    """
    from kvcli.artifact import Artifact
    from kvcli.fit import assemble

    artifact = assemble(runs)
    folder = out or model_folder(artifact.metadata["model"], runs[0].name)
    reused = (folder / "kvcli.json").exists() and not overwrite and Artifact.load(folder).same_content(artifact)
    if reused:
        output.say(f"{folder} holds this artifact already")
    else:
        artifact.save(folder, overwrite=overwrite)
        output.say(f"verified: {len(artifact.tensors)} tensors, {size(artifact.nbytes)}, and kvcli.json, read back")
    return {"artifact": str(folder), "bytes": artifact.nbytes, "reused": reused}


def generate_with(artifact: str) -> list[str]:
    """The command that generates with an artifact."""
    try:
        model = model_argument(json.loads((Path(artifact) / "kvcli.json").read_text())["model"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
    return ["kvcli", "generate", *model, "--artifact", artifact, "--prompt", PROMPT, "--stats"]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    command(app, "export", ExportOptions, "kvcli export", ("runs",))(run)
