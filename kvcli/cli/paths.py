"""Where each step leaves its output, so that the next one finds it without being told."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kvcli.errors import ArtifactError, SamplesError

RUNS = Path("runs")


def short_name(model: str) -> str:
    """A model's name fit for a folder."""
    return Path(model.rstrip("/")).name.removesuffix(".gguf").lower()


def samples_folder(model: str) -> Path:
    """Default output of `calibrate`."""
    return RUNS / short_name(model) / "samples"


def training_folder(model: str, name: str) -> Path:
    """Default output of a training command."""
    return RUNS / short_name(model) / "training" / name


def artifact_folder(model: str, name: str) -> Path:
    """Default output of `export`."""
    return RUNS / short_name(model) / name


def newest_samples() -> Path:
    """The recording that was written last."""
    found = _newest(RUNS.glob("*/samples/samples.json"))
    if found is None:
        raise SamplesError(f"no recorded samples below {RUNS}/; run 'kvcli calibrate' first")
    return found


def newest_training() -> Path:
    """The training run that was written last."""
    found = _newest(RUNS.glob("*/training/*/run.json"))
    if found is None:
        raise ArtifactError(f"no training run below {RUNS}/; run 'kvcli train-codebook' first")
    return found


def newest_artifact(model: str, method: str) -> Path:
    """The artifact of a method for a model that was exported last; `method` may name bits, as in commvq-1."""
    found = _newest((RUNS / short_name(model)).glob(f"{method}*/kvcli.json"))
    if found is None:
        raise ArtifactError(
            f"no {method} artifact for {model} below {RUNS}/; run 'kvcli calibrate', 'kvcli train-codebook' and "
            "'kvcli export' first, or name one with --artifact"
        )
    return found


def _newest(files: Iterable[Path]) -> Path | None:
    ordered = sorted(files, key=lambda path: path.stat().st_mtime)
    return ordered[-1].parent if ordered else None
