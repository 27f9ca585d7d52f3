"""`kvcli fit` and its names for some methods, whose settings are typed options of theirs; `kvcli export`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pydantic import Field, create_model

from kvcli.cli.command import Command, model_argument
from kvcli.cli.output import Output
from kvcli.commands.options import DEVICES_HELP, ComputeOptions, Devices, Options, parse_layers, parse_settings
from kvcli.commands.paths import artifact_record, model_folder, newest_samples, newest_training
from kvcli.commands.sizes import size
from kvcli.errors import ArtifactError, UsageError, error_text
from kvcli.registry import DEFAULT_METHOD, FIT_NAMES, get_config, get_method, make_config, parse_name
from kvcli.storage.ranks import join_ranks, start_ranks


class FitOptions(ComputeOptions):
    """Options of `kvcli fit` and its other names."""

    method: str = Field(DEFAULT_METHOD, description=f"method to fit, with or without bits ({DEFAULT_METHOD}-1)")
    samples: Path | None = Field(None, description="folder of recorded samples; default: the newest below runs/")
    layers: str | None = Field(None, description="layers A-B only (inclusive), to share the work")
    devices: Devices | None = Field(None, description=DEVICES_HELP)
    block_tokens: int = Field(65536, ge=1024, description="tokens of a layer in memory; more are read again and again")
    setting: list[str] = Field([], description="setting of the method, NAME=VALUE; repeatable")
    out: Path | None = Field(
        None,
        description="run folder, of which 'kvcli export' makes the artifact; default: one below runs/MODEL/training/, "
        "exported to runs/MODEL/ when the last layer is done",
    )
    overwrite: bool = Field(False, description="discard a run in the output folder and start again")


class ExportArtifactOptions(Options):
    """Options of `kvcli export`."""

    runs: list[Path] = Field([], description="runs of kvcli fit; default: the newest below runs/")
    out: Path | None = Field(None, description="artifact folder; default: runs/MODEL/NAME-OF-RUN")
    overwrite: bool = Field(False, description="replace an artifact in the output folder")


def run(options: FitOptions, output: Output) -> None:
    """Fit a method to the recorded samples, layer by layer; resumes where it stopped.

    When the last layer is done, the artifact is exported. With --devices, or started by torchrun, processes share the
    layers.
    """
    name, from_bits = parse_name(options.method)
    config_cls = get_config(name)
    values = {**config_cls.fit_settings, **from_bits, **parse_settings(options.setting)}
    config = make_config(name, values)
    if not (config_cls.needs_artifact or config_cls.fit_settings):  # then most methods are not fitted at all
        from kvcli.artifact.fit import check_fitted

        check_fitted(get_method(name))
    samples = newest_samples(options.samples)

    from kvcli.artifact.fit import fit_recording
    from kvcli.calibrate.recording import Recording

    method = get_method(name)
    recording = Recording(samples)
    try:
        config = config.resolve(recording.spec)
    except ValueError as error:
        raise UsageError(error_text(error)) from error
    values = config.model_dump()
    run_name = (config_cls.run_name or options.method).format(method=name, **values)
    folder = options.out or model_folder(recording.manifest.model, "training", run_name)
    layers = parse_layers(options.layers, recording.layers, "were recorded")
    start_ranks(options.devices, options.device)
    if method.allocate is not None and recording.fisher is None:
        output.say("the samples do not tell what errors cost (--fisher-tokens 0): all layers get the same bits")
    output.settings({"samples": recording.folder, "seed": options.seed, **values})
    reports: list[Mapping[str, Any]] = []
    reused: list[bool] = []
    with join_ranks() as ranks, output.progress("fit", len(layers), "layers") as advance:

        def done(layer_idx: int, metrics: Mapping[str, Any], was_fitted: bool) -> None:
            reports.append({"layer": layer_idx, **metrics})
            reused.append(was_fitted)
            advance(1)

        given = {**options.model_dump(include={"seed", "overwrite", "block_tokens"}), "device": options.torch_device()}
        fit_recording(recording, method, config, folder, layers=layers, ranks=ranks, done=done, **given)
    if any(reused):
        output.say(f"{sum(reused)} of {len(layers)} layers were fitted already and are reused")
    reports.sort(key=lambda report: int(report["layer"]))
    for line in summary(method.fit_metrics, reports):
        (output.warn if line.startswith("warning: ") else output.say)(line)
    artifact = None
    if options.out is None and ranks.rank == 0:
        try:
            artifact = write_artifact([folder], None, options.overwrite, output)["artifact"]
        except ArtifactError as error:
            output.warn(f"no artifact: {error}")
    following = ["kvcli", "export", folder] if options.layers is None else []
    record = {"run": str(folder), "layers": reports, "artifact": artifact}
    output.result(record, artifact or str(folder), generate_with(artifact) if artifact else following)


def summary(metrics: Mapping[str, str], reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line per metric, by its label, with the mean and the extremes and their layers and heads, then the warnings."""
    from kvcli.artifact.metadata import metric_values

    lines = []
    for name, label in metrics.items():
        if values := metric_values(reports, name):
            mean = sum(value for value, _ in values) / len(values)
            (least, first), (greatest, last) = min(values), max(values)
            lines.append(f"{label}: mean {mean:.4g}, from {least:.4g} ({first}) to {greatest:.4g} ({last})")
    return lines + [f"warning: layer {x['layer']}: {text}" for x in reports for text in x.get("warnings", ())]


def export_artifact(options: ExportArtifactOptions, output: Output) -> None:
    """Assemble fitted layers into one verified artifact: kvcli.json, codec.safetensors and a model card."""
    runs = options.runs or [newest_training()]
    if missing := [folder for folder in runs if not (folder / "run.json").exists()]:
        raise ArtifactError(f"no run in {missing[0]}; run 'kvcli fit' first")
    record = write_artifact(runs, options.out, options.overwrite, output)
    output.result(record, record["artifact"], generate_with(record["artifact"]))


def write_artifact(runs: list[Path], out: Path | None, overwrite: bool, output: Output) -> dict[str, Any]:
    """Writes the artifact of runs that together have all layers, unless the folder holds it already (`reused`).

    The default folder is that of the model and the first run. ArtifactError: layers are missing or damaged, or the
    folder holds another artifact.
    """
    from kvcli.artifact.artifact import CARD, Artifact
    from kvcli.artifact.fit import assemble
    from kvcli.artifact.metadata import is_edited
    from kvcli.report.facts import of_artifact

    artifact = assemble(runs)
    folder = out or model_folder(artifact.metadata["model"], runs[0].name)
    reused = (folder / "kvcli.json").exists() and not overwrite and Artifact.load(folder).same_content(artifact)
    if reused:
        output.say(f"{folder} holds this artifact already")
    else:
        artifact.save(folder, overwrite=overwrite, about=of_artifact(artifact))
        is_edited(folder / CARD, output.say)
        output.say(f"verified: {len(artifact.tensors)} tensors, {size(artifact.nbytes)}, and kvcli.json, read back")
    return {"artifact": str(folder), "bytes": artifact.nbytes, "reused": reused}


def generate_with(artifact: str) -> list[str]:
    """The command that generates with an artifact."""
    model = artifact_record(artifact).get("model")
    words = ["--artifact", artifact, "--prompt", "Photosynthesis is", "--residual-length", "16", "--stats"]
    return [] if model is None else ["kvcli", "generate", *model_argument(model), *words]


SAVES_MEMORY = "fit fewer tokens: a recording of 'kvcli calibrate' with lower --tokens"


def _fit_as(name: str) -> Command[FitOptions]:
    """Another name of `fit`, with the settings of its method as options."""
    method, about = FIT_NAMES[name], "method to fit, with or without bits"
    options = create_model(name, __base__=FitOptions, method=(str, Field(method, description=about)))
    text = f"The same as 'kvcli fit --method {method}', with its settings as options."
    return Command(
        name, options, run, f"kvcli {name}", ("samples",), get_config(method), True, SAVES_MEMORY, summary=text
    )


_EXAMPLE = f"kvcli fit --method {DEFAULT_METHOD}-1"
FIT = Command("fit", FitOptions, run, _EXAMPLE, ("samples",), resumes=True, saves_memory=SAVES_MEMORY)
OTHER_NAMES = SimpleNamespace(**{name.replace("-", "_"): _fit_as(name) for name in FIT_NAMES})
EXPORT = Command("export", ExportArtifactOptions, export_artifact, "kvcli export", ("runs",))
