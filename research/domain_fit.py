"""One row of the domain matrix: a method fitted on one kind of text, kept in a work folder.

A fit that was cut off resumes. This module does not know what is measured.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvcli.artifact.artifact import Artifact
from kvcli.artifact.fit import assemble, fit_recording
from kvcli.calibrate.builtin_text import is_builtin
from kvcli.calibrate.collect import collect
from kvcli.calibrate.config import CollectConfig
from kvcli.calibrate.corpus import FINEWEB_EDU, CorpusConfig, documents, token_sequences
from kvcli.calibrate.recording import Recording
from kvcli.errors import ArtifactError, CorpusError
from kvcli.methods.config import CacheConfig
from kvcli.methods.method import Method
from kvcli.models.load import LoadedModel


def split_documents(source: str, split: str, seed: int) -> Iterator[str]:
    """Documents of a corpus in one of two splits that share none.

    Built-in text has its own split. Of any other source a quarter of the documents is held out, chosen by their
    content, so that the split depends neither on the order nor on the other documents.

    Args:
        source: as in `CorpusConfig`.
        split: `calibration` or `heldout`.
        seed: of the order.

    Raises:
        CorpusError: a corpus that cannot be read or has no documents in the split.
    """
    if is_builtin(source):
        yield from documents(CorpusConfig(source, split, seed=seed))
        return
    if source == "-":
        raise CorpusError("standard input is read once, and a domain is read twice; pass a file")
    config = CorpusConfig.fineweb_edu(seed) if source == FINEWEB_EDU else CorpusConfig(source, "train", seed=seed)
    empty = True
    for text in documents(config):
        if (hashlib.sha256(text.encode()).digest()[0] < 64) == (split == "heldout"):
            empty = False
            yield text
    if empty:
        raise CorpusError(f"'{source}' has no documents in the {split} split; give more documents")


@dataclass(frozen=True)
class DomainSettings:
    """What all cells of a matrix have in common.

    Attributes:
        tokens: calibration tokens of a fit.
        fit_seq_len: tokens per calibration sequence.
        query_tokens: calibration tokens whose queries are recorded too.
        fisher_tokens: calibration tokens whose gradients tell what errors cost.
        num_sequences: sequences that a cell is measured on.
        seq_len: tokens per measured sequence.
        batch_size: sequences per forward pass.
        chunk: tokens fed at once when measuring.
        sink_length: first tokens in full precision.
        residual_length: last tokens in full precision.
        seed: of documents and of fitting.
    """

    tokens: int
    fit_seq_len: int
    query_tokens: int
    fisher_tokens: int
    num_sequences: int
    seq_len: int
    batch_size: int
    chunk: int
    sink_length: int
    residual_length: int
    seed: int


def _silent(label: str, total: int, unit: str) -> AbstractContextManager[Callable[[int], None]]:
    return nullcontext(lambda count: None)


@dataclass(frozen=True)
class Report:
    """Callbacks of a long run.

    Attributes:
        say: called with a line about what is reused or smaller than asked for.
        progress: makes a context from a label, a total and its unit; what it yields is called with counts done.
    """

    say: Callable[[str], None] = lambda line: None
    progress: Callable[[str, int, str], AbstractContextManager[Callable[[int], None]]] = _silent


def fit_on(
    loaded: LoadedModel,
    corpus: str,
    method: Method,
    config: CacheConfig,
    settings: DomainSettings,
    folder: Path,
    report: Report,
) -> Artifact:
    """The artifact of a method fitted on a corpus; the one in the work folder, if it was fitted on the same tokens.

    Args:
        loaded: the model.
        corpus: a corpus name; its calibration documents are used.
        method: a method that is fitted.
        config: its settings, resolved.
        settings: sizes and seed.
        folder: the work folder; the recorded samples are in it until the fit is complete.
        report: callbacks.

    Raises:
        KvcliError: the corpus, recording or fitting failed.
    """
    seq_len = min(settings.fit_seq_len, settings.tokens, loaded.spec.max_position_embeddings)
    sequences = token_sequences(
        split_documents(corpus, "calibration", settings.seed),
        loaded.tokenizer,
        max(1, settings.tokens // seq_len),
        seq_len,
    )
    if sequences.numel() < settings.tokens // seq_len * seq_len:
        report.say(f"{corpus} has {sequences.numel()} calibration tokens, fewer than {settings.tokens}")
    used = CorpusConfig(corpus, "calibration", seed=settings.seed)
    provenance = {"corpus": used.provenance(), "token_ids_sha256": token_digest(sequences)}
    place = folder / "fits" / file_name(corpus)
    try:
        artifact = Artifact.load(place / "artifact")
        if artifact.metadata["provenance"].get("token_ids_sha256") == provenance["token_ids_sha256"]:
            report.say(f"the fit on {corpus} is reused")
            return artifact
    except ArtifactError:
        pass
    size = CollectConfig.for_tokens(
        *sequences.shape,
        query_tokens=settings.query_tokens,
        fisher_tokens=settings.fisher_tokens,
        batch_size=settings.batch_size,
    )
    with report.progress(f"record {corpus}", size.total_tokens(loaded.spec), "tokens") as advance:
        collect(loaded, sequences, size, place / "samples", provenance, advance=advance)
        recording = Recording(place / "samples")
    with report.progress(f"fit {corpus}", loaded.spec.num_layers, "layers") as advance:
        fit_recording(
            recording,
            method,
            config,
            place / "training",
            device=loaded.model.device,
            seed=settings.seed,
            done=lambda layer_idx, metrics, reused: advance(1),
        )
    artifact = assemble([place / "training"])
    artifact.save(place / "artifact", overwrite=True)
    shutil.rmtree(place / "samples")  # some GB, and the artifact holds what was learnt from them
    shutil.rmtree(place / "training")
    return artifact


def token_digest(sequences: Tensor) -> str:
    """sha256 of token ids."""
    return hashlib.sha256(sequences.to("cpu", torch.int64).contiguous().numpy().tobytes()).hexdigest()


def file_name(source: str) -> str:
    """A file name for a corpus or label, different for different ones."""
    plain = re.sub(r"[^a-z0-9.]+", "-", source.lower().removeprefix("builtin:")).strip("-.")[-40:]
    return f"{plain}-{hashlib.sha256(source.encode()).hexdigest()[:8]}"
