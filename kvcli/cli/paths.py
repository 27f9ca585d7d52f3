"""Default output folders of the commands, and the newest output of each, which is the next command's input."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvcli.errors import ArtifactError, SamplesError
from kvcli.registry import METHODS, parse_name

RUNS = Path("runs")


def short_name(model: str) -> str:
    """A model's name fit for a folder."""
    return Path(model.rstrip("/")).name.removesuffix(".gguf").lower()


def samples_folder(model: str) -> Path:
    """Default output of `calibrate`."""
    return RUNS / short_name(model) / "samples"


def shard_folder(model: str, index: int, count: int) -> Path:
    """Default output of `calibrate --shard`."""
    return RUNS / short_name(model) / "shards" / f"{index}-of-{count}"


def newest_shards() -> list[Path]:
    """All shards of the model whose shard was written last, in alphabetical order.

    Raises:
        SamplesError: there is none.
    """
    folder = _newest(RUNS.glob("*/shards/*/samples.json"))
    if folder is None:
        raise SamplesError(f"no shards below {RUNS}/; run 'kvcli calibrate --shard' first")
    return sorted(path.parent for path in folder.parent.glob("*/samples.json"))


def training_folder(model: str, name: str) -> Path:
    """Default output of a fit."""
    return RUNS / short_name(model) / "training" / name


def artifact_folder(model: str, name: str) -> Path:
    """Default output of `export`."""
    return RUNS / short_name(model) / name


def contexts_folder(model: str) -> Path:
    """Default store of a model's contexts."""
    return RUNS / short_name(model) / "contexts"


def newest_samples(folder: Path | None = None) -> Path:
    """The recording that was written last, or the one that is named.

    Raises:
        SamplesError: there is none.
    """
    if folder is not None and not (folder / "samples.json").exists():
        raise SamplesError(f"no recorded samples in {folder}; run 'kvcli calibrate' first")
    folder = folder or _newest(RUNS.glob("*/samples/samples.json"))
    if folder is None:
        raise SamplesError(f"no recorded samples below {RUNS}/; run 'kvcli calibrate' first")
    return folder


def newest_training() -> Path:
    """The run of a fit that was written last.

    Raises:
        ArtifactError: there is none.
    """
    folder = _newest(RUNS.glob("*/training/*/run.json"))
    if folder is None:
        raise ArtifactError(f"no fitted run below {RUNS}/; run 'kvcli fit' first")
    return folder


def newest_artifact(model: str, method: str, settings: Mapping[str, Any] | None = None) -> Path:
    """The artifact of a method for a model that was exported last.

    Args:
        model: the model's name.
        method: name of the method, with or without bits.
        settings: that it was fitted with; default: those that the bits stand for.

    Raises:
        ArtifactError: there is none.
        UsageError: no such method.
    """
    name, from_bits = parse_name(method)
    folder = _newest(
        path
        for path in (RUNS / short_name(model)).glob("*/kvcli.json")
        if _is_artifact_of(path, name, from_bits if settings is None else settings)
    )
    if folder is None:
        raise ArtifactError(
            f"no {method} artifact for {model} below {RUNS}/; run 'kvcli calibrate' and 'kvcli fit --method "
            f"{method}' first, or name one with --artifact"
        )
    return folder


def artifact_method(folder: Path) -> str | None:
    """The method of an artifact; None where its metadata cannot be read.

    Raises:
        ArtifactError: there is no artifact.
    """
    if not (folder / "kvcli.json").exists():
        raise ArtifactError(f"no artifact in {folder}: kvcli.json is missing; make one with 'kvcli fit'")
    try:
        name = json.loads((folder / "kvcli.json").read_text())["method"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return name if name in METHODS else None


def context_names(folder: Path) -> list[str]:
    """Names of the contexts of a store."""
    return sorted(path.stem for path in folder.glob("*.json"))


def _is_artifact_of(path: Path, method: str, settings: Mapping[str, Any]) -> bool:
    """Whether a metadata file is of an artifact of a method with some settings."""
    try:
        metadata = json.loads(path.read_text())
        return bool(metadata["method"] == method and settings.items() <= metadata["config"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False  # a file of somebody else, or a damaged one


def _newest(files: Iterable[Path]) -> Path | None:
    ordered = sorted(filter(Path.is_file, files), key=lambda path: path.stat().st_mtime)
    return ordered[-1].parent if ordered else None
