"""Runs a model over token sequences and records pre-RoPE queries, keys and values of its layers.

Layers are recorded window by window: each window is one pass over the sequences that stops after the window's last
layer, so the memory and the open files stay bounded however deep the model is. A recording that was cut off resumes:
parts whose size and sha256 are those of when they were written are kept. This module does not know where sequences
come from.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvcli.calibrate.collection import Collection
from kvcli.calibrate.fisher import SEQ_LEN
from kvcli.calibrate.shards import Shard, merge_into
from kvcli.errors import SamplesError
from kvcli.files import locked, open_run, read_sealed
from kvcli.models import LoadedModel
from kvcli.ranks import Ranks
from kvcli.sample_parts import RECORD_AGAIN, STALE
from kvcli.samples import FORMAT_VERSION, MANIFEST, Recording
from kvcli.spec import ModelSpec

_PART_BYTES = 512 * 2**20
_RANK_FOLDERS = "rank-[0-9]*-of-[0-9]*"


@dataclass(frozen=True)
class CollectConfig:
    """What is recorded.

    Attributes:
        num_sequences: sequences recorded.
        seq_len: tokens per sequence.
        query_sequences: sequences whose queries are recorded too; keys and values are recorded for all.
        batch_size: sequences per forward pass.
        layer_window: layers per pass; 0: as many as keep a part below half a GiB.
        fisher_sequences: sequences whose gradients are computed, their first 1024 tokens, to know what errors cost.
    """

    num_sequences: int
    seq_len: int
    query_sequences: int
    batch_size: int
    layer_window: int = 0
    fisher_sequences: int = 0

    @classmethod
    def for_tokens(
        cls,
        sequences: Tensor,
        *,
        query_tokens: int,
        fisher_tokens: int,
        batch_size: int,
        layer_window: int = 0,
    ) -> CollectConfig:
        """For [num_sequences, seq_len] token ids and numbers of tokens, which are rounded up to whole sequences."""
        count, seq_len = sequences.shape
        return cls(
            num_sequences=count,
            seq_len=seq_len,
            query_sequences=min(count, -(-query_tokens // seq_len)),
            batch_size=batch_size,
            fisher_sequences=min(count, -(-fisher_tokens // min(seq_len, SEQ_LEN))),
            layer_window=layer_window,
        )

    @property
    def fisher_tokens(self) -> int:
        """Tokens whose gradients are computed."""
        return self.fisher_sequences * min(self.seq_len, SEQ_LEN)

    @property
    def fisher_rows(self) -> list[int]:
        """Sequences whose gradients are computed, over the whole recording: neighbours can be of one document."""
        return torch.linspace(0, self.num_sequences - 1, self.fisher_sequences).round().long().tolist()

    def total_tokens(self, spec: ModelSpec, shard: Shard | None = None) -> int:
        """Tokens of all passes, those with gradients included: what `collect` advances by in all."""
        sequences = self.sequences(shard)
        fisher = sum(row in sequences for row in self.fisher_rows) * min(self.seq_len, SEQ_LEN)
        return len(sequences) * self.seq_len * len(self.windows(spec)) + fisher

    @property
    def num_parts(self) -> int:
        """Parts of each window: one per forward pass."""
        return -(-self.num_sequences // self.batch_size)

    def parts(self, shard: Shard | None = None) -> range:
        """The parts of each window that a shard records; None: all."""
        return range(self.num_parts) if shard is None else shard.parts(self.num_parts)

    def sequences(self, shard: Shard | None = None) -> range:
        """The sequences that a shard records; None: all."""
        parts = self.parts(shard)
        return range(parts.start * self.batch_size, min(self.num_sequences, parts.stop * self.batch_size))

    def windows(self, spec: ModelSpec) -> list[tuple[int, int]]:
        """Half-open ranges of layers, one per pass."""
        per_layer = self.batch_size * self.seq_len * 2 * (2 * spec.kv_dim + spec.num_heads * spec.head_dim)
        size = self.layer_window or max(1, _PART_BYTES // per_layer)
        return [(a, min(a + size, spec.num_layers)) for a in range(0, spec.num_layers, size)]

    def disk_bytes(self, spec: ModelSpec, shard: Shard | None = None) -> int:
        """Bytes of samples on disk, 16 bits per value."""
        sequences = self.sequences(shard)
        kv_values = 2 * spec.kv_dim * len(sequences)
        q_values = (
            spec.num_heads * spec.head_dim * len(range(sequences.start, min(sequences.stop, self.query_sequences)))
        )
        return 2 * spec.num_layers * self.seq_len * (kv_values + q_values)


def collect(
    loaded: LoadedModel,
    sequences: Tensor,
    config: CollectConfig,
    folder: Path,
    provenance: Mapping[str, Any],
    *,
    overwrite: bool = False,
    advance: Callable[[int], None] = lambda tokens: None,
    say: Callable[[str], None] = lambda line: None,
) -> Recording:
    """Records the model's attention inputs over the sequences.

    Args:
        loaded: the model.
        sequences: [num_sequences, seq_len] int64 token ids.
        config: what to record.
        folder: where the parts and the manifest go.
        provenance: kept in the manifest: corpus, revision, seed and the like.
        overwrite: discard a recording that is in the folder, also the same one.
        advance: called with the number of tokens of each pass, recorded now or before.
        say: called with a line about what is reused.

    Returns:
        The finished recording; when the folder holds it already, nothing is run.

    Raises:
        SamplesError: the folder holds another recording and `overwrite` is off (the message names what differs), is
            used by another process or has too little disk; samples that are not finite.
    """
    with locked(folder, SamplesError):
        Collection(loaded, sequences, config, folder).run(provenance, overwrite, advance, say)
    return Recording(folder)


def collect_shard(
    loaded: LoadedModel,
    sequences: Tensor,
    config: CollectConfig,
    shard: Shard,
    folder: Path,
    provenance: Mapping[str, Any],
    *,
    overwrite: bool = False,
    advance: Callable[[int], None] = lambda tokens: None,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Records one share of what `collect` records; `shards.merge` puts all shares together.

    Args:
        loaded: the model.
        sequences: of the whole recording.
        config: of the whole recording.
        shard: which share.
        folder: of this share alone.
        provenance: as in `collect`.
        overwrite: as in `collect`.
        advance: as in `collect`.
        say: as in `collect`.

    Raises:
        SamplesError: as `collect`.
        UsageError: more shares than forward passes.
    """
    with locked(folder, SamplesError):
        Collection(loaded, sequences, config, folder, shard).run(provenance, overwrite, advance, say)


def collect_together(
    loaded: LoadedModel,
    sequences: Tensor,
    config: CollectConfig,
    folder: Path,
    provenance: Mapping[str, Any],
    ranks: Ranks,
    *,
    overwrite: bool = False,
    advance: Callable[[int], None] = lambda tokens: None,
    say: Callable[[str], None] = lambda line: None,
) -> Recording:
    """Records what `collect` records, each rank its share of the sequences; all ranks call it with the same arguments.

    The shares are in folders below the recording's until rank 0 has put them together.

    Args:
        loaded: the model.
        sequences: as in `collect`.
        config: as in `collect`.
        folder: as in `collect`; all ranks see the same files there.
        provenance: as in `collect`.
        ranks: the processes.
        overwrite: as in `collect`.
        advance: as in `collect`, of this rank's share.
        say: as in `collect`.

    Raises:
        SamplesError: as `collect`.
        UsageError: more ranks than forward passes.
        RankError: another rank has ended.
    """
    places = [folder / f"rank-{rank}-of-{ranks.count}" for rank in range(ranks.count)]
    whole, first = Collection(loaded, sequences, config, folder), ranks.rank == 0
    manifest = whole.description(provenance)
    with locked(folder, SamplesError) if first else nullcontext():
        if first:
            open_run(folder, MANIFEST, manifest, kind="recording", stale=STALE, error=SamplesError, overwrite=overwrite)
        ranks.wait()
        if not read_sealed(folder / MANIFEST, FORMAT_VERSION, RECORD_AGAIN, SamplesError).get("complete"):
            shard, place = Shard(ranks.rank + 1, ranks.count), places[ranks.rank]
            collect_shard(
                loaded, sequences, config, shard, place, provenance, overwrite=overwrite, advance=advance, say=say
            )
            ranks.wait()
            if first:
                merge_into(places, folder)
        elif first:
            whole.run(provenance, False, advance, say)
        for place in folder.glob(_RANK_FOLDERS) if first else ():
            shutil.rmtree(place)
        ranks.wait()
    return Recording(folder)
