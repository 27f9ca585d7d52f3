"""`kvcli fit`, and the commands of `registry.FIT_COMMANDS`: the same with one method's settings as typed options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import typer
from pydantic import Field, create_model

from kvcli.cli.command import command
from kvcli.cli.options import ComputeOptions
from kvcli.cli.output import Output
from kvcli.cli.paths import newest_samples, training_folder
from kvcli.cli.values import parse_settings
from kvcli.errors import UsageError
from kvcli.registry import DEFAULT_METHOD, FIT_COMMANDS, FitCommand, fit_command, get_method, parse_method

if TYPE_CHECKING:
    from kvcli.methods.method import Method


class FitOptions(ComputeOptions):
    """Options of every command that fits."""

    samples: Path | None = Field(
        default=None, description="folder of recorded samples; default: the newest below runs/"
    )
    layers: str | None = Field(default=None, description="layers A-B only (inclusive), to share the work")
    block_tokens: int = Field(
        default=65536, ge=1024, description="tokens of a layer in memory at once; more tokens are read again and again"
    )
    out: Path | None = Field(default=None, description="run folder; default: one below runs/MODEL/training/")
    overwrite: bool = Field(default=False, description="discard a run in the output folder and start again")


class FitMethodOptions(FitOptions):
    """Options of `kvcli fit`."""

    method: str = Field(default=DEFAULT_METHOD, description=f"method to fit, with or without bits ({DEFAULT_METHOD}-1)")
    setting: list[str] = Field(default=[], description="setting of the method, NAME=VALUE; repeatable")


def run(options: FitMethodOptions, output: Output) -> None:
    """Fit a method to the recorded samples, layer by layer; resumes where it stopped.

    Started by torchrun, processes share the layers.
    """
    method, from_bits = parse_method(options.method)
    own = fit_command(method.name)
    defaults = {} if own is None else own.defaults
    settings = {**defaults, **from_bits, **parse_settings(options.setting)}
    fit("fit", method, settings, own.run_name if own else options.method, options, output)


def named_command(name: str) -> tuple[type[FitOptions], Callable[[Any, Output], None]]:
    """Options and function of a command of `FIT_COMMANDS`, made from the settings of its methods."""
    own = FIT_COMMANDS[name]

    def run(options: FitOptions, output: Output) -> None:
        method = get_method(getattr(options, "method", own.methods[0]))
        settings = {setting: getattr(options, setting) for setting in own.config_cls().model_fields}
        fit(name, method, settings, own.run_name, options, output)

    run.__doc__ = own.summary
    return _named_options(name, own), run


def _named_options(name: str, own: FitCommand) -> type[FitOptions]:
    """The options of every fit, the settings of a method, and where there are several, which of the methods."""
    config_cls = own.config_cls()
    bases: Any = (config_cls, FitOptions)
    literal: Any = Literal
    run_name = own.run_name.replace(":g", "").format_map(
        {setting: setting.upper() for setting in ("method", *config_cls.model_fields)}
    )
    out = Field(default=None, description=f"run folder; default: runs/MODEL/training/{run_name}")
    fields: dict[str, Any] = {"out": (Path | None, out)}
    for setting, default in own.defaults.items():
        field = config_cls.model_fields[setting]
        fields[setting] = (field.annotation, Field(default=default, description=field.description))
    if len(own.methods) > 1:
        fields["method"] = (literal[own.methods], Field(default=own.methods[0], description="method to fit"))
    return cast("type[FitOptions]", create_model(name, __base__=bases, **fields))


def fit(
    label: str, method: Method, settings: dict[str, Any], run_name: str, options: FitOptions, output: Output
) -> None:
    """Fits a method and says what was measured.

    Args:
        label: the command, for the progress bar.
        method: the method.
        settings: its settings.
        run_name: template of the run folder's name, from `method` and the settings.
        options: where to read and write, and which layers.
        output: messages and result.

    Raises:
        UsageError: a method that is not fitted, or settings that do not fit the model's shapes.
        ConfigError: settings that do not exist or are out of range.
    """
    from kvcli.attention.attach import make_config
    from kvcli.calibrate.recording import Recording
    from kvcli.fit import check_fitted, fit_recording
    from kvcli.ranks import joined

    check_fitted(method)
    config = make_config(method, settings)
    recording = Recording(options.samples or newest_samples())
    try:
        config = config.resolve(recording.spec)
    except ValueError as error:
        raise UsageError(" ".join(str(error).split())) from error
    values = config.model_dump()
    folder = options.out or training_folder(recording.manifest.model, run_name.format(method=method.name, **values))
    layers = parse_layers(options.layers, recording.layers)
    if method.allocate is not None and recording.fisher is None:
        output.say("the samples do not tell what errors cost (--fisher-tokens 0): all layers get the same bits")
    output.settings({"samples": recording.folder, "seed": options.seed, **values})
    reports: list[Mapping[str, Any]] = []
    num_reused = 0
    with joined() as ranks, output.progress(label, len(layers), "layers") as advance:

        def done(layer_idx: int, metrics: Mapping[str, Any], reused: bool) -> None:
            nonlocal num_reused
            reports.append({"layer": layer_idx, **metrics})
            num_reused += reused
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
    reports.sort(key=lambda report: int(report["layer"]))
    if num_reused:
        output.say(f"{num_reused} of {len(layers)} layers were fitted already and are reused")
    for line in summary(method, reports):
        output.say(line)
    for report in reports:
        for text in report.get("warnings", ()):
            output.warn(f"warning: layer {report['layer']}: {text}")
    output.result({"run": str(folder), "layers": reports}, str(folder))


def summary(method: Method, reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line per metric of a method: the mean, and the least and greatest value with its layer and head."""
    from kvcli.artifact import metric_values

    lines = []
    for name, label in method.fit_metrics.items():
        if values := metric_values(reports, name):
            mean = sum(value for value, _ in values) / len(values)
            (least, first), (greatest, last) = min(values), max(values)
            lines.append(f"{label}: mean {mean:.4g}, from {least:.4g} ({first}) to {greatest:.4g} ({last})")
    return lines


def parse_layers(text: str | None, recorded: list[int]) -> list[int]:
    """Layers of a range such as 4-7 or of a single number; None means all.

    Raises:
        UsageError: neither a number nor a range, or layers that were not recorded.
    """
    if text is None:
        return recorded
    first, _, last = text.partition("-")
    try:
        start, stop = int(first), int(last or first)
    except ValueError:
        start, stop = 0, -1
    if start > stop:
        raise UsageError(f"--layers takes a number or a range such as 0-7, not '{text}'")
    if not {start, stop} <= set(recorded):
        raise UsageError(f"--layers {text}: only layers {recorded[0]}-{recorded[-1]} were recorded")
    return list(range(start, stop + 1))


def register(app: typer.Typer) -> None:
    """Adds `fit` and the commands that fit one method."""
    memory = "fit fewer tokens: a recording of 'kvcli calibrate' with lower --tokens"
    example = f"kvcli fit --method {DEFAULT_METHOD}-1"
    command(app, "fit", FitMethodOptions, example, ("samples",), resumes=True, saves_memory=memory)(run)
    for name, own in FIT_COMMANDS.items():
        options, function = named_command(name)
        example, settings = f"kvcli {name} {own.options}", own.config_cls().model_fields
        command(app, name, options, example, ("samples",), settings, resumes=True, saves_memory=memory)(function)
