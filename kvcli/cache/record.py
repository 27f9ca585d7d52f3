"""The record of a context: which blocks it is made of, how they are to be read, and what it is bound to."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import NonNegativeInt, model_validator

from kvcli.cache.blocks import Block
from kvcli.cache.parts import num_coded, whole_groups
from kvcli.cache.snapshot import CODES, SnapshotCounts
from kvcli.errors import CacheError, KvcliError
from kvcli.storage.manifest import Sealed


class ContextRecord(Sealed):
    """What is known of a context without its blocks.

    Attributes:
        kvcli_version: that wrote it.
        identity: what it depends on, as `CacheIdentity.to_dict` gave it.
        notes: of whoever saved it: `source`, what it was made from, and others.
        counts: of tokens and codes.
        part_tokens: tokens of a part of codes; 0 where `first` is all of several rows or of a row with padding.
        bytes_of: bytes of `key_codes`, `value_codes`, the window's `keys` and `values`, `state` and so on, all layers.
        values_per_token: numbers in the keys and values of one token, all layers.
        tokens: block of all token ids, int32 [rows, slots]; None if they were not given.
        first: block of what precedes the codes.
        coded: blocks of the whole parts of codes.
        last: block of the rest.
    """

    VERSION: ClassVar[int] = 4
    ERROR: ClassVar[type[KvcliError]] = CacheError
    REMEDY: ClassVar[str] = "make it again with 'kvcli compress'"

    kvcli_version: str
    identity: dict[str, Any]
    notes: dict[str, Any]
    counts: SnapshotCounts
    part_tokens: NonNegativeInt
    bytes_of: dict[str, NonNegativeInt]
    values_per_token: NonNegativeInt
    tokens: Block | None
    first: Block
    coded: tuple[Block, ...]
    last: Block | None

    @model_validator(mode="after")
    def _has_the_blocks_of_its_counts(self) -> Self:
        size, plain = self.part_tokens, self.last is not None
        if plain != (size > 0) or (plain and (len(self.counts.lengths) > 1 or whole_groups(self.counts, size) != size)):
            raise ValueError("parts that cut rows or groups of tokens apart")
        if len(self.coded) != (num_coded(self.counts, size) if plain else 0):
            raise ValueError("more or fewer blocks than its tokens have")
        return self

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return sum(self.counts.lengths)

    @property
    def blocks(self) -> list[Block]:
        """All blocks; one that it needs twice is there once."""
        blocks = (self.tokens, self.first, *self.coded, self.last)
        return list(dict.fromkeys(block for block in blocks if block is not None))

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.bytes for block in self.blocks)

    @property
    def fp16_bytes(self) -> int:
        """Bytes of its tokens uncompressed in 16 bits."""
        return 2 * self.num_tokens * self.values_per_token

    @property
    def bits(self) -> tuple[float, float]:
        """Stored bits per key and per value that is a code, scales and norms included; 0 without codes."""
        counts, half = self.counts, max(1, self.values_per_token // 2)
        keys, values = (max(1, sum(coded)) * half for coded in (counts.coded_keys, counts.coded_values))
        key_bytes, value_bytes = (self.bytes_of.get(kind, 0) for kind in CODES)
        return 8 * key_bytes / keys, 8 * value_bytes / values
