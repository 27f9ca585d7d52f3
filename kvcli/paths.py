"""Default output folders of the commands, and the newest output of each, which is the next command's input."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvcli.builtin_models import BUILTIN_MODELS, DEFAULT_MODEL, cache_folder
from kvcli.errors import ArtifactError, SamplesError
from kvcli.registry import METHODS, parse_name

RUNS = Path("runs")

FITS = cache_folder("artifacts")
"""Artifacts that `--fit` made, by model."""

SHIPPED = Path(__file__).resolve().parent / "fitted"
"""Artifacts of built-in models that come with the package, by model."""


def model_folder(model: str, *parts: str) -> Path:
    """A folder of a model below runs/: `samples`, `shards`, `training`, `contexts`, or an artifact."""
    return RUNS.joinpath(Path(model.rstrip("/")).name.removesuffix(".gguf").lower(), *parts)


def newest_shards() -> list[Path]:
    """All shards of the model whose shard was written last, in alphabetical order; SamplesError: there is none."""
    missing = SamplesError(f"no shards below {RUNS}/; run 'kvcli calibrate --shard' first")
    newest = _newest(RUNS.glob("*/shards/*/samples.json"), missing)
    return sorted(path.parent for path in newest.parent.glob("*/samples.json"))


def newest_samples(folder: Path | None = None) -> Path:
    """The recording that was written last, or the one that is named; SamplesError: there is none."""
    if folder is not None and not (folder / "samples.json").exists():
        raise SamplesError(f"no recorded samples in {folder}; run 'kvcli calibrate' first")
    missing = SamplesError(f"no recorded samples below {RUNS}/; run 'kvcli calibrate' first")
    return folder or _newest(RUNS.glob("*/samples/samples.json"), missing)


def newest_training() -> Path:
    """The run of a fit that was written last; ArtifactError: there is none."""
    missing = ArtifactError(f"no fitted run below {RUNS}/; run 'kvcli fit' first")
    return _newest(RUNS.glob("*/training/*/run.json"), missing)


def newest_artifact(model: str, method: str, settings: Mapping[str, Any] | None = None) -> Path:
    """The artifact of a method, with or without bits, for a model: the last one below runs/, in `FITS` or `SHIPPED`.

    It was fitted with `settings`, by default with those that the bits stand for.

    Raises:
        ArtifactError: there is none.
        UsageError: no such method.
    """
    name, from_bits = parse_name(method)
    settings = from_bits if settings is None else settings
    calibrate = "kvcli calibrate" + f" {model}" * (model != DEFAULT_MODEL)
    missing = ArtifactError(
        f"no {method} artifact for {model} below {RUNS}/; run '{calibrate}' and 'kvcli fit --method {method}' first, "
        "or name one with --artifact"
    )
    runs = model_folder(model)
    for place in (runs, FITS / runs.name, *(SHIPPED / x for x in BUILTIN_MODELS if x == model)):
        files = (path for path in place.glob("*/kvcli.json") if is_artifact_of(path, name, settings))
        with suppress(ArtifactError):
            return _newest(files, missing)
    raise missing


def default_artifact(model: str) -> Path | None:
    """The artifact for a model that was exported last, of whichever method; None: there is none."""
    files = model_folder(model).glob("*/kvcli.json")
    with suppress(ArtifactError):
        return _newest((path for path in files if artifact_method(path.parent)), ArtifactError())
    return None


def artifact_method(folder: Path) -> str | None:
    """The method of an artifact; None where its metadata cannot be read. ArtifactError: there is no artifact."""
    if not (folder / "kvcli.json").exists():
        raise ArtifactError(f"no artifact in {folder}: kvcli.json is missing; make one with 'kvcli fit'")
    return next((name for name in METHODS if is_artifact_of(folder / "kvcli.json", name, {})), None)


def is_artifact_of(path: Path, method: str, settings: Mapping[str, Any]) -> bool:
    """Whether a metadata file is of an artifact of a method with some settings."""
    try:
        metadata = json.loads(path.read_text())
        return bool(metadata["method"] == method and settings.items() <= metadata["config"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False  # a file of somebody else, or a damaged one


def _newest(files: Iterable[Path], missing: Exception) -> Path:
    """The folder of the file that was written last; without files, the error is raised."""
    ordered = sorted(filter(Path.is_file, files), key=lambda path: path.stat().st_mtime)
    if not ordered:
        raise missing
    return ordered[-1].parent
