"""Settings of a recording, and the share of it that a process records."""

import re
from dataclasses import dataclass
from typing import Self

from kvcli.errors import UsageError
from kvcli.spec import ModelSpec

FISHER_SEQ_LEN = 1024
"""Longest sequence that gradients pass through; attention holds the scores of one layer in memory."""

GRADIENT_COST = 4
"""How many tokens without gradients take as long as one with, at least: where weights are few, attention adds to it."""

_PART_BYTES = 512 * 2**20


@dataclass(frozen=True)
class Shard:
    """Share `index`, counted from 1, of `count` of a recording."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads `2/8`; UsageError for anything else than an index and the number of shares."""
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text.strip())
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise UsageError(f"--shard takes an index and the number of shards, such as 1/4 to 4/4, not '{text}'")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


@dataclass(frozen=True)
class CollectConfig:
    """Settings of a recording."""

    num_sequences: int
    seq_len: int
    query_sequences: int  # sequences whose queries are recorded too; keys and values are recorded for all
    batch_size: int
    layer_window: int = 0  # layers per pass; 0: as many as keep a part below half a GiB
    fisher_sequences: int = 0  # whose gradients, of their first 1024 tokens, give the Fisher information

    @classmethod
    def for_tokens(
        cls, count: int, seq_len: int, *, query_tokens: int, fisher_tokens: int, batch_size: int, layer_window: int = 0
    ) -> Self:
        """For `count` sequences and numbers of tokens, which are rounded up to whole sequences."""
        queries = min(count, -(-query_tokens // seq_len))
        fisher = min(count, -(-fisher_tokens // min(seq_len, FISHER_SEQ_LEN)))
        return cls(count, seq_len, queries, batch_size, layer_window, fisher)

    @property
    def fisher_tokens(self) -> int:
        """Tokens whose gradients are computed."""
        return self.fisher_sequences * min(self.seq_len, FISHER_SEQ_LEN)

    @property
    def fisher_rows(self) -> list[int]:
        """Sequences whose gradients are computed, over the whole recording: neighbours can be of one document."""
        import torch

        return torch.linspace(0, self.num_sequences - 1, self.fisher_sequences).round().long().tolist()

    @property
    def num_parts(self) -> int:
        """Parts of each window: one per forward pass."""
        return -(-self.num_sequences // self.batch_size)

    def parts(self, shard: Shard | None = None) -> range:
        """The parts of each window that a shard records; None: all. UsageError: fewer parts than shards."""
        index, count = (shard.index, shard.count) if shard else (1, 1)
        if self.num_parts < count:
            raise UsageError(
                f"{self.num_parts} forward passes cannot be shared among {count}; lower --batch-size, or use fewer"
            )
        return range((index - 1) * self.num_parts // count, index * self.num_parts // count)

    def sequences(self, shard: Shard | None = None) -> range:
        """The sequences that a shard records; None: all."""
        parts = self.parts(shard)
        return range(parts.start * self.batch_size, min(self.num_sequences, parts.stop * self.batch_size))

    def windows(self, spec: ModelSpec) -> list[tuple[int, int]]:
        """Half-open ranges of layers, one per pass."""
        per_layer = self.batch_size * self.seq_len * 2 * (spec.kv_width + spec.num_heads * spec.head_dim)
        size = self.layer_window or max(1, _PART_BYTES // per_layer)
        return [(a, min(a + size, spec.num_layers)) for a in range(0, spec.num_layers, size)]

    def total_tokens(self, spec: ModelSpec, shard: Shard | None = None) -> int:
        """Tokens of all passes, those with gradients `GRADIENT_COST` times: what `collect` advances by in all."""
        sequences = self.sequences(shard)
        fisher = sum(row in sequences for row in self.fisher_rows) * min(self.seq_len, FISHER_SEQ_LEN)
        return len(sequences) * self.seq_len * len(self.windows(spec)) + GRADIENT_COST * fisher

    def disk_bytes(self, spec: ModelSpec, shard: Shard | None = None) -> int:
        """Bytes of samples on disk, 16 bits per value."""
        sequences = self.sequences(shard)
        queries = len(range(sequences.start, min(sequences.stop, self.query_sequences)))
        values = spec.kv_width * len(sequences) + spec.num_heads * spec.head_dim * queries
        return 2 * spec.num_layers * self.seq_len * values
