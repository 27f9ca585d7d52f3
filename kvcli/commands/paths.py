"""Default output folders of the commands, and the newest output of each, which is the next command's input."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvcli.errors import ArtifactError, SamplesError
from kvcli.models.builtin_models import BUILTIN_MODELS, DEFAULT_MODEL, cache_folder
from kvcli.registry import METHODS, parse_name

RUNS = Path("runs")

FITS = cache_folder("artifacts")
"""Artifacts that `--fit` made, by model."""

SHIPPED = Path(__file__).resolve().parent.parent / "fitted"
"""Artifacts of built-in models that come with the package, by model."""


def model_folder(model: str, *parts: str) -> Path:
    """A folder of a model below runs/: `samples`, `shards`, `training`, `contexts`, or an artifact."""
    return RUNS.joinpath(Path(model).name.removesuffix(".gguf").lower().strip(".") or "model", *parts)


def newest_shards() -> list[Path]:
    """All shards of the model whose shard was written last, in alphabetical order; SamplesError: there is none."""
    if newest := _newest(RUNS.glob("*/shards/*/samples.json")):
        return sorted(path.parent for path in newest.parent.glob("*/samples.json"))
    raise SamplesError(f"no shards below {RUNS}/; run 'kvcli calibrate --shard' first")


def newest_samples(folder: Path | None = None) -> Path:
    """The recording that was written last, or the one that is named; SamplesError: there is none."""
    place = f"below {RUNS}/" if folder is None else f"in {folder}"
    files = RUNS.glob("*/samples/samples.json") if folder is None else [folder / "samples.json"]
    if newest := _newest(files):
        return newest
    raise SamplesError(f"no recorded samples {place}; run 'kvcli calibrate' first")


def newest_training() -> Path:
    """The run of a fit that was written last; ArtifactError: there is none."""
    if newest := _newest(RUNS.glob("*/training/*/run.json")):
        return newest
    raise ArtifactError(f"no fitted run below {RUNS}/; run 'kvcli fit' first")


def newest_artifact(model: str, method: str, settings: Mapping[str, Any] | None = None) -> Path:
    """The artifact of a method, with or without bits, for a model: the last one below runs/, in `FITS` or `SHIPPED`.

    It was fitted with `settings`, by default with those that the bits stand for.

    ArtifactError: there is none; UsageError: no such method.
    """
    name, from_bits = parse_name(method)
    settings = from_bits if settings is None else settings
    runs = model_folder(model)
    for place in (runs, FITS / runs.name, *(SHIPPED / x for x in BUILTIN_MODELS if x == model)):
        files = place.glob("*/kvcli.json")
        if newest := _newest(path for path in files if is_artifact_of(path.parent, name, settings)):
            return newest
    calibrate, fit = "kvcli calibrate" + f" {model}" * (model != DEFAULT_MODEL), f"'kvcli fit --method {method}'"
    first = f"'{calibrate}' and {fit} first"
    runs_of = (x.parent for x in runs.glob("training/*/run.json"))
    if begun := next((x for x in runs_of if is_artifact_of(x, name, settings, "run.json")), None):
        fitted, spec = len([*begun.glob("layer-[0-9]*.json")]), artifact_record(begun, "run.json").get("spec")
        layers = spec.get("num_layers") if isinstance(spec, dict) else "?"
        first = f"{fit} again: {fitted} of {layers} layers are fitted in {begun}"
    raise ArtifactError(f"no {method} artifact for {model} below {RUNS}/; run {first}, or name one with --artifact")


def default_artifact(model: str) -> Path | None:
    """The artifact for a model that was exported last, of whichever method; None: there is none."""
    return _newest(path for path in model_folder(model).glob("*/kvcli.json") if artifact_method(path.parent))


def artifact_method(folder: Path) -> str | None:
    """The method of an artifact; None where its metadata cannot be read. ArtifactError: there is no artifact."""
    if not (folder / "kvcli.json").exists():
        raise ArtifactError(f"no artifact in {folder}: kvcli.json is missing; make one with 'kvcli fit'")
    return next((name for name in METHODS if is_artifact_of(folder, name, {})), None)


def is_artifact_of(folder: Path, method: str, settings: Mapping[str, Any], file: str = "kvcli.json") -> bool:
    """Whether a folder holds an artifact of a method with some settings, or with its file the run of a fit."""
    metadata = artifact_record(folder, file)
    config = metadata.get("config")
    return metadata.get("method") == method and isinstance(config, dict) and settings.items() <= config.items()


def artifact_record(folder: str | Path, file: str = "kvcli.json") -> dict[str, Any]:
    """The metadata of an artifact, unchecked; {} where they are damaged, somebody else's, or not there."""
    try:
        metadata = json.loads(Path(folder, file).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return metadata if isinstance(metadata, dict) else {}


def _newest(files: Iterable[Path]) -> Path | None:
    """The folder of the file that was written last; None: there is no file."""
    newest = max(filter(Path.is_file, files), key=lambda path: path.stat().st_mtime, default=None)
    return newest and newest.parent
