"""`kvcli train-codebook`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
from pydantic import Field

from kvcli.cli.options import Options, command
from kvcli.cli.output import Output
from kvcli.cli.paths import newest_samples, training_folder
from kvcli.errors import UsageError
from kvcli.methods.commvq.config import CommVQConfig


class TrainCodebookOptions(CommVQConfig, Options):
    """Options of `kvcli train-codebook`: the method's own settings, and where to read and write."""

    samples: Path | None = Field(
        default=None, description="folder of recorded samples; default: the newest below runs/"
    )
    layers: str | None = Field(default=None, description="layers A-B only (inclusive), to share the work")
    out: Path | None = Field(default=None, description="run folder; default: runs/MODEL/training/commvq-Nbit")
    overwrite: bool = Field(default=False, description="discard another run in the output folder")


def run(options: TrainCodebookOptions, output: Output) -> None:
    """Train CommVQ's key codebooks (EM) and value encoder and codebook, layer by layer; resumes where it stopped."""
    from kvcli.fit import fit_recording
    from kvcli.registry import get_method
    from kvcli.samples import Recording

    recording = Recording(options.samples or newest_samples())
    method = get_method("commvq")
    settings = CommVQConfig(**{name: getattr(options, name) for name in CommVQConfig.model_fields})
    try:
        config = settings.resolve(recording.spec)
    except ValueError as error:
        raise UsageError(" ".join(str(error).split())) from error
    folder = options.out or training_folder(recording.manifest["model"], f"commvq-{options.bits}bit")
    layers = parse_layers(options.layers, recording.layers)
    output.settings({"samples": recording.folder, "seed": options.seed, **config.model_dump()})
    reports: list[Mapping[str, Any]] = []
    resumed = 0
    with output.progress("train-codebook", len(layers), "layers") as advance:

        def done(layer_idx: int, metrics: Mapping[str, Any], found: bool) -> None:
            nonlocal resumed
            reports.append({"layer": layer_idx, **metrics})
            resumed += found
            advance(1)

        fit_recording(
            recording,
            method,
            config,
            folder,
            layers=layers,
            device=options.torch_device(),
            seed=options.seed,
            overwrite=options.overwrite,
            done=done,
        )
    if resumed:
        output.say(f"{resumed} of {len(layers)} layers were trained already and are reused")
    output.say(summary(reports))
    output.result({"run": str(folder), "layers": reports}, str(folder))


def summary(reports: list[Mapping[str, Any]]) -> str:
    """Mean and worst held-out errors, and dead rows."""
    parts = []
    for name, kind in (("key_nmse", "keys"), ("value_nmse", "values")):
        errors = [(error, report["layer"], head) for report in reports for head, error in enumerate(report[name])]
        worst, layer, head = max(errors)
        mean = sum(error for error, _, _ in errors) / len(errors)
        parts.append(f"{kind} {mean:.4f} (worst {worst:.4f}, layer {layer} head {head})")
    dead = sum(report["dead_key_rows"] for report in reports)
    return f"held-out error, share of the squared norm: {', '.join(parts)}; dead key codebook rows: {dead}"


def parse_layers(text: str | None, recorded: list[int]) -> list[int]:
    """Layers of a range such as 4-7 or of a single number; None means all.

    Raises:
        UsageError: neither a number nor a range.
    """
    if text is None:
        return recorded
    first, _, last = text.partition("-")
    try:
        wanted = list(range(int(first), int(last or first) + 1))
    except ValueError:
        wanted = []
    if not wanted:
        raise UsageError(f"--layers takes a number or a range such as 0-7, not '{text}'")
    return wanted


def register(app: typer.Typer) -> None:
    """Adds the command."""
    command(app, "train-codebook", TrainCodebookOptions, "kvcli train-codebook --bits 1", ("samples",))(run)
