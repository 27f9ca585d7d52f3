"""`kvcli fit-subspace`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import typer
from pydantic import Field

from kvcli.cli.options import Options, command
from kvcli.cli.output import Output
from kvcli.cli.paths import newest_samples, training_folder
from kvcli.methods.squat.config import SQuatConfig


class FitSubspaceOptions(SQuatConfig, Options):
    """Options of `kvcli fit-subspace`: the method's own settings, and where to read and write."""

    subspace_source: Literal["prompt", "calibration"] = "calibration"
    samples: Path | None = Field(default=None, description="recorded samples; default: the newest below runs/")
    method: Literal["squat", "squat-pre"] = Field(default="squat", description="method the subspace is for")
    out: Path | None = Field(default=None, description="run folder; default: runs/MODEL/training/METHOD-subspace")
    overwrite: bool = Field(default=False, description="discard another run in the output folder")


def run(options: FitSubspaceOptions, output: Output) -> None:
    """Fit SQuat's query subspace offline on calibration queries; 'kvcli export' makes an artifact of it."""
    from kvcli.fit import fit_recording
    from kvcli.registry import get_method
    from kvcli.samples import Recording

    recording = Recording(options.samples or newest_samples())
    config = SQuatConfig(**{name: getattr(options, name) for name in SQuatConfig.model_fields})
    folder = options.out or training_folder(recording.manifest["model"], f"{options.method}-subspace")
    output.settings({"samples": recording.folder, "seed": options.seed, **config.model_dump()})
    reports: list[Mapping[str, Any]] = []
    with output.progress("fit-subspace", len(recording.layers), "layers") as advance:

        def done(layer_idx: int, metrics: Mapping[str, Any], found: bool) -> None:
            reports.append({"layer": layer_idx, **metrics})
            advance(1)

        fit_recording(
            recording,
            get_method(options.method),
            config,
            folder,
            device=options.torch_device(),
            seed=options.seed,
            overwrite=options.overwrite,
            done=done,
        )
    shares = [share for report in reports for share in report["subspace_energy"]]
    output.say(f"{config.subspace_dim} directions hold {100 * sum(shares) / len(shares):.1f} % of the queries' energy")
    output.result({"run": str(folder), "layers": reports}, str(folder))


def register(app: typer.Typer) -> None:
    """Adds the command."""
    command(app, "fit-subspace", FitSubspaceOptions, "kvcli fit-subspace --subspace-dim 8", ("samples",))(run)
