"""The domain matrix: codebooks fitted on one kind of text, measured on every other.

A work folder holds a fit per row and a file per cell, so that a run that was cut off resumes, and a run with more
rows or columns keeps those that are there. Text to fit on and text to measure on share no document. This module does
not know what a method stores.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvcli.artifact.artifact import Artifact
from kvcli.artifact.fit import check_fitted
from kvcli.attention.attach import attach
from kvcli.calibrate.corpus import token_sequences
from kvcli.errors import ArtifactError, ConfigError
from kvcli.eval.quality import measure, reference_states
from kvcli.methods.config import CacheConfig
from kvcli.methods.method import Method
from kvcli.models.load import LoadedModel
from kvcli.registry import make_config, parse_method
from kvcli.storage.locks import locked
from kvcli.storage.manifest import RunManifest, read_sealed, write_sealed
from research.domain_fit import DomainSettings, Report, file_name, fit_on, split_documents, token_digest

FORMAT_VERSION = 1
_REMEDY = "delete it to measure it again"


class _MatrixManifest(RunManifest):
    """What a work folder is bound to."""

    VERSION = FORMAT_VERSION
    ERROR = ArtifactError
    REMEDY = _REMEDY
    FILE = "domains.json"
    KIND = "matrix"
    STALE = ("cells/*.json",)


@dataclass(frozen=True)
class Row:
    """What a row of the matrix measures.

    Attributes:
        label: its name in the table.
        method: the method, with or without bits.
        corpus: the text its codebooks are fitted on; None for a method without an artifact, or one that is given.
        artifact: an artifact that is measured as it is.
    """

    label: str
    method: str
    corpus: str | None = None
    artifact: Path | None = None


def run_matrix(
    loaded: LoadedModel,
    rows: Sequence[Row],
    columns: Sequence[str],
    method: Method,
    config: CacheConfig,
    settings: DomainSettings,
    folder: Path,
    *,
    overwrite: bool = False,
    report: Report | None = None,
) -> list[dict[str, Any]]:
    """Fits the rows that need it and measures every row on every column.

    Args:
        loaded: the model.
        rows: what is measured.
        columns: corpora whose held-out text is measured on.
        method: the method that is fitted.
        config: its settings, resolved.
        settings: sizes and seed.
        folder: the work folder; a matrix with other settings in it is refused.
        overwrite: discard what is in the folder.
        report: callbacks.

    Returns:
        One record per cell: `row`, `text`, `corpus` and the figures of `QualityReport`.

    Raises:
        ArtifactError: the folder holds another matrix, or another process uses it; an artifact that is damaged.
        CorpusError: a corpus that cannot be read, has no text in a split, or is too small.
        KvcliError: recording, fitting or measuring failed.
    """
    report = report or Report()
    check_fitted(method)
    description = {
        "format_version": FORMAT_VERSION,
        **loaded.identity(),
        "method": method.name,
        "config": config.model_dump(),
        **asdict(settings),
    }
    with locked(folder, ArtifactError):
        if overwrite and (folder / _MatrixManifest.FILE).is_file():
            shutil.rmtree(folder / "fits", ignore_errors=True)
        _MatrixManifest.open(folder, description, overwrite=overwrite)
        (folder / "cells").mkdir(exist_ok=True)
        artifacts: dict[Row, Artifact | None] = {}
        for row in rows:
            artifacts[row] = None if row.artifact is None else Artifact.load(row.artifact)
            if row.corpus is not None:
                artifacts[row] = fit_on(loaded, row.corpus, method, config, settings, folder, report)
        cells: list[dict[str, Any]] = []
        for column in columns:
            cells += _measure_column(loaded, artifacts, column, settings, folder, report)
    return cells


def _measure_column(
    loaded: LoadedModel,
    artifacts: dict[Row, Artifact | None],
    column: str,
    settings: DomainSettings,
    folder: Path,
    report: Report,
) -> list[dict[str, Any]]:
    """Every row on one text; the uncompressed model runs only if a cell is missing."""
    sequences = token_sequences(
        split_documents(column, "heldout", settings.seed), loaded.tokenizer, settings.num_sequences, settings.seq_len
    )
    if len(sequences) < settings.num_sequences:
        report.say(f"{column} fills {len(sequences)} of {settings.num_sequences} sequences")
    states: list[Tensor] = []
    cells = []
    for row, artifact in artifacts.items():
        bound = {
            "format_version": FORMAT_VERSION,
            "row": row.label,
            "method": row.method,
            "artifact_sha256": None if artifact is None else _artifact_digest(artifact),
            "text": column,
            "token_ids_sha256": token_digest(sequences),
        }
        path = folder / "cells" / f"{file_name(row.label)}--{file_name(column)}.json"
        cell = _stored_cell(path, bound)
        if cell is None:
            if not states:
                with report.progress(f"uncompressed on {column}", sequences.numel(), "tokens") as advance:
                    for batch in sequences.split(settings.batch_size):
                        states.append(reference_states(loaded.model, batch.to(loaded.model.device)).cpu())
                        advance(batch.numel())
            figures = _measure(loaded, row, artifact, column, sequences, states, settings, report)
            write_sealed(path, {**bound, "corpus": row.corpus, **figures})
            cell = read_sealed(path, FORMAT_VERSION, _REMEDY, ArtifactError)  # plain JSON values, as on a later run
        cells.append(cell)
    return cells


def _measure(
    loaded: LoadedModel,
    row: Row,
    artifact: Artifact | None,
    column: str,
    sequences: Tensor,
    states: list[Tensor],
    settings: DomainSettings,
    report: Report,
) -> dict[str, Any]:
    """The figures of one cell."""
    name = row.method if artifact is None else artifact.method
    window = _window(name, settings)
    with report.progress(f"{row.label} on {column}", sequences.numel(), "tokens") as advance:
        quality = measure(
            loaded.model,
            lambda: attach(loaded, name, artifact=artifact, **window),
            sequences,
            states,
            chunk=settings.chunk,
            batch_size=settings.batch_size,
            advance=advance,
        )
    return {**quality.figures, "memory": quality.memory.to_dict()}


def _window(name: str, settings: DomainSettings) -> dict[str, Any]:
    """Settings of the full-precision tokens, the same for every method that leaves a choice."""
    window = {"sink_length": settings.sink_length, "residual_length": settings.residual_length}
    method, from_bits = parse_method(name)
    try:
        make_config(method.name, {**from_bits, **window, "flush_block": 1})
    except ConfigError:  # a method that encodes whole blocks
        return window
    return {**window, "flush_block": 1}


def _stored_cell(path: Path, bound: dict[str, Any]) -> dict[str, Any] | None:
    """A cell that was measured before with the same artifact on the same tokens."""
    try:
        cell = read_sealed(path, FORMAT_VERSION, _REMEDY, ArtifactError)
    except ArtifactError:
        return None
    return cell if {name: cell.get(name) for name in bound} == bound else None


def _artifact_digest(artifact: Artifact) -> str:
    """sha256 of an artifact's tensors and their names."""
    digest = hashlib.sha256()
    for name in sorted(artifact.tensors):
        digest.update(name.encode())
        digest.update(artifact.tensors[name].contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
