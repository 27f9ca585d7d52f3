"""`kvcli fit`, and its names for some methods, whose settings are typed options of theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from pydantic import Field, create_model

from kvcli.cli.command import command
from kvcli.cli.export import generate_with, write_artifact
from kvcli.cli.output import Output
from kvcli.errors import ArtifactError, UsageError
from kvcli.options import ComputeOptions, parse_layers, parse_settings
from kvcli.paths import model_folder, newest_samples
from kvcli.ranks import joined
from kvcli.registry import DEFAULT_METHOD, FIT_NAMES, check_settings, get_config, get_method, parse_name

if TYPE_CHECKING:
    from kvcli.methods.method import Method


class FitOptions(ComputeOptions):
    """Options of `kvcli fit` and its other names."""

    method: str = Field(default=DEFAULT_METHOD, description=f"method to fit, with or without bits ({DEFAULT_METHOD}-1)")
    samples: Path | None = Field(
        default=None, description="folder of recorded samples; default: the newest below runs/"
    )
    layers: str | None = Field(default=None, description="layers A-B only (inclusive), to share the work")
    block_tokens: int = Field(
        default=65536, ge=1024, description="tokens of a layer in memory at once; more tokens are read again and again"
    )
    setting: list[str] = Field(default=[], description="setting of the method, NAME=VALUE; repeatable")
    out: Path | None = Field(
        default=None,
        description="run folder, of which 'kvcli export' makes the artifact; default: one below runs/MODEL/training/, "
        "exported to runs/MODEL/ when the last layer is done",
    )
    overwrite: bool = Field(default=False, description="discard a run in the output folder and start again")


def run(options: FitOptions, output: Output) -> None:
    """Fit a method to the recorded samples, layer by layer; resumes where it stopped.

    When the last layer is done, the artifact is exported. Started by torchrun, processes share the layers.
    """
    name, from_bits = parse_name(options.method)
    config_cls = get_config(name)
    values = {**config_cls.fit_settings, **from_bits, **parse_settings(options.setting)}
    check_settings(name, values)
    if not (config_cls.needs_artifact or config_cls.fit_settings):  # then most methods are not fitted at all
        from kvcli.fit import check_fitted

        check_fitted(get_method(name))
    samples = newest_samples(options.samples)

    from kvcli.attention.attach import make_config
    from kvcli.calibrate.recording import Recording
    from kvcli.fit import check_fitted, fit_recording

    method = get_method(name)
    check_fitted(method)
    config = make_config(method, values)
    recording = Recording(samples)
    try:
        config = config.resolve(recording.spec)
    except ValueError as error:
        raise UsageError(" ".join(str(error).split())) from error
    values = config.model_dump()
    run_name = (config_cls.run_name or options.method).format(method=name, **values)
    folder = options.out or model_folder(recording.manifest.model, "training", run_name)
    layers = parse_layers(options.layers, recording.layers, "were recorded")
    if method.allocate is not None and recording.fisher is None:
        output.say("the samples do not tell what errors cost (--fisher-tokens 0): all layers get the same bits")
    output.settings({"samples": recording.folder, "seed": options.seed, **values})
    reports: list[Mapping[str, Any]] = []
    reused: list[bool] = []
    with joined() as ranks, output.progress("fit", len(layers), "layers") as advance:

        def done(layer_idx: int, metrics: Mapping[str, Any], was_there: bool) -> None:
            reports.append({"layer": layer_idx, **metrics})
            reused.append(was_there)
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
            block_tokens=options.block_tokens,
            ranks=ranks,
            done=done,
        )
    if any(reused):
        output.say(f"{sum(reused)} of {len(layers)} layers were fitted already and are reused")
    reports.sort(key=lambda report: int(report["layer"]))
    for line in summary(method, reports):
        (output.warn if line.startswith("warning: ") else output.say)(line)
    artifact = None
    if options.out is None and ranks.rank == 0:
        try:
            artifact = write_artifact([folder], None, options.overwrite, output)
        except ArtifactError as error:
            output.warn(f"no artifact: {error}")
    following = ["kvcli", "export", folder] if options.layers is None else []
    output.result(
        {"run": str(folder), "layers": reports, "artifact": artifact and artifact["artifact"]},
        str(folder),
        generate_with(artifact["artifact"]) if artifact else following,
    )


def summary(method: Method, reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line per metric of a method, with the mean and the extremes and their layers and heads, then the warnings."""
    from kvcli.artifact import metric_values

    lines = []
    for name, label in method.fit_metrics.items():
        if values := metric_values(reports, name):
            mean = sum(value for value, _ in values) / len(values)
            (least, first), (greatest, last) = min(values), max(values)
            lines.append(f"{label}: mean {mean:.4g}, from {least:.4g} ({first}) to {greatest:.4g} ({last})")
    return lines + [
        f"warning: layer {report['layer']}: {text}" for report in reports for text in report.get("warnings", ())
    ]


def register(app: typer.Typer) -> None:
    """Adds `fit`, and its other names with the settings of their methods as options."""
    memory = "fit fewer tokens: a recording of 'kvcli calibrate' with lower --tokens"
    example = f"kvcli fit --method {DEFAULT_METHOD}-1"
    command(app, "fit", FitOptions, example, ("samples",), resumes=True, saves_memory=memory)(run)
    for name, method in FIT_NAMES.items():
        about = "method to fit, with or without bits"
        options = create_model(name, __base__=FitOptions, method=(str, Field(default=method, description=about)))
        settings, summary = (
            get_config(method),
            f"The same as 'kvcli fit --method {method}', with its settings as options.",
        )
        register = command(app, name, options, f"kvcli {name}", ("samples",), settings, True, memory, summary=summary)
        register(run)
