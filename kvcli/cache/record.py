"""What is known of a stored context without its tensors: how many tokens it has, in what form, in which blocks.

This module does not import torch, so that a store can be listed at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import sub
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator
from pydantic.dataclasses import dataclass as checked_dataclass

from kvcli.errors import CacheError, KvcliError
from kvcli.registry import method_name
from kvcli.spec import bits_per_value
from kvcli.storage.manifest import Sealed

Counts = tuple[int, ...]
"""One number per row of the batch."""

VALID, POSITIONS = "valid", "positions"
"""Names of the tensors that all layers share."""

WINDOWS = ("keys", "values")
"""Names of a layer's window tensors, as of the attributes of `LayerStore`."""

CODES = ("key_codes", "value_codes")
"""Names of a layer's code records, likewise."""

Tokens = Annotated[int, Field(ge=0, le=2**40)]
"""A number of tokens that a cache can hold."""

Group = Annotated[int, Field(ge=1, le=2**40)]
"""The same, of which there is one at least."""

BLOCK_TOKENS = 256
"""Tokens of a part of codes, by default."""

START = "start"
"""The note of a context that says at which of its tokens the document begins, after what all documents begin with."""


@checked_dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class SnapshotCounts:
    """How many tokens a snapshot holds, and in what form; counts that contradict each other are a ValueError.

    Attributes:
        coded_keys, coded_values: encoded keys and values of each row, counted after its sinks.
        observed: tokens of each row that the key codec's state was computed from; 0 for codecs without a state.
        sinks: first tokens of a row, which are never encoded.
        ring: slots of the window buffers after the sinks.
        key_group, value_group: keys, and values, that are encoded together.
        tokens_per_entry: tokens that share an entry, by name of a code tensor.
    """

    lengths: tuple[Tokens, ...]
    coded_keys: tuple[Tokens, ...]
    coded_values: tuple[Tokens, ...]
    observed: tuple[Tokens, ...]
    sinks: Tokens
    ring: Group
    key_group: Group
    value_group: Group
    tokens_per_entry: dict[str, Group]

    def __post_init__(self) -> None:
        rows = (self.lengths, self.coded_keys, self.coded_values, self.observed)
        if not self.lengths or len({*map(len, rows)}) > 1:
            raise ValueError("counts of a snapshot are of different numbers of rows, or of none")
        for coded, group in ((self.coded_keys, self.key_group), (self.coded_values, self.value_group)):
            for length, count in zip(self.lengths, coded, strict=True):
                if count > max(0, length - self.sinks) or count % group:
                    raise ValueError("more codes than tokens, or parts of groups, in the counts of a snapshot")
        if any(observed > length for observed, length in zip(self.observed, self.lengths, strict=True)):
            raise ValueError("a state computed from more tokens than a snapshot has")

    @property
    def group(self) -> int:
        """Tokens that are attended to together as codes; a prefix that ends among codes is a multiple of it long."""
        return max(self.key_group, self.value_group)

    @property
    def attended(self) -> Counts:
        """Tokens of each row, after its sinks, that attention reads as codes."""
        return attended_tokens(self.coded_keys, self.coded_values, self.group)

    @property
    def window(self) -> Counts:
        """Window tokens of each row: its sinks, then those after `attended` others."""
        return tuple(map(sub, self.lengths, self.attended))

    def used(self, name: str) -> Counts | None:
        """How much of axis 2 each row uses of a tensor; None for tensors that are not cut by time."""
        if name in self.tokens_per_entry:
            coded = self.coded_keys if f".{CODES[0]}." in name else self.coded_values
            return tuple(-(-count // self.tokens_per_entry[name]) for count in coded)
        return self.window if name.rpartition(".")[2] in WINDOWS and ".state." not in name else None

    def without(self, removed: int) -> SnapshotCounts:
        """The counts of one row without its last tokens, as `CompressedCache.crop` leaves them.

        Raises:
            CacheError: tokens that were encoded together would be cut apart, or a codec's state was computed from some
                of those removed.
        """
        length = self.lengths[0] - removed
        if length < self.observed[0]:
            raise CacheError(
                f"cannot cut to {length} tokens: the method's per-sequence state was computed from {self.observed[0]}"
            )
        tokens = (max(0, length - self.sinks),)
        keys, values = (
            coded_within(coded, tokens, [removed], group)
            for coded, group in ((self.coded_keys, self.key_group), (self.coded_values, self.value_group))
        )
        return replace(self, lengths=(length,), coded_keys=keys, coded_values=values)


def subtracted(first: Sequence[int], second: Sequence[int]) -> Counts:
    """The differences, number by number."""
    return tuple(map(sub, first, second))


def coded_within(coded: Counts, tokens: Counts, removed: list[int], tokens_per_group: int) -> Counts:
    """How many `coded` tokens each row keeps of `tokens` after its sinks; CacheError if that cuts a group apart."""
    kept = tuple(map(min, coded, tokens))
    for count, from_codes in zip(removed, subtracted(coded, kept), strict=True):
        if from_codes % tokens_per_group:
            raise CacheError(
                f"cannot remove {count} tokens: {from_codes} of them are part of a group of {tokens_per_group} tokens "
                "that were encoded together; speculative decoding needs a method that encodes each token by itself"
            )
    return kept


def attended_tokens(coded_keys: Counts, coded_values: Counts, group: int) -> Counts:
    """Tokens of each row, after its sinks, whose keys and values are both codes, in whole groups."""
    return tuple(count - count % group for count in map(min, coded_keys, coded_values))


@dataclass(frozen=True)
class Block:
    """A block by its content: the BLAKE3 of its bytes, and how many they are."""

    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    bytes: PositiveInt


@dataclass(frozen=True)
class Place:
    """Where a block lies: from which byte on in which file, and how many bytes that has."""

    block: Block
    path: Path
    start: int
    file_bytes: int


def whole_groups(counts: SnapshotCounts, tokens: int) -> int:
    """The next number of tokens that is made of whole groups of keys and of values."""
    group = math.lcm(counts.key_group, counts.value_group)
    return -(-tokens // group) * group


def num_coded(counts: SnapshotCounts, size: int) -> int:
    """Parts of `size` tokens of codes, keys and values, of the only row."""
    return counts.attended[0] // size


def tail_start(counts: SnapshotCounts) -> int:
    """The length from which on the only row can be cut to every length, because no code has to be cut off."""
    coded = max(*counts.coded_keys, *counts.coded_values)
    return counts.sinks + coded if coded else 0


def usable_length(counts: SnapshotCounts, size: int, common: int) -> int:
    """How much of a stored sequence is of use to another one that begins with the same `common` tokens.

    All of these, if no code has to be cut off for that; else whole parts of `size` tokens of codes, at least one; or 0.
    """
    parts = min(max(0, common - counts.sinks) // size, num_coded(counts, size))
    length = common if common >= tail_start(counts) else counts.sinks + parts * size if parts else 0
    try:
        counts.without(counts.lengths[0] - length)
    except CacheError:  # the codec's state was computed from later tokens, too
        return 0
    return length


def start_of(notes: Mapping[str, Any]) -> int:
    """At which token the document of a context with these notes begins."""
    start = notes.get(START)
    return start if type(start) is int else 0  # of whoever wrote them


class ContextRecord(Sealed):
    """What is known of a context without its blocks.

    Attributes:
        identity: what it depends on, as `CacheIdentity.to_dict` gave it.
        notes: of whoever saved it: `source`, what it was made from, and others.
        part_tokens: tokens of a part of codes; 0 where `first` is all of several rows or of a row with padding.
        bytes_of: bytes of `key_codes`, `value_codes`, the window's `keys` and `values`, `state` and so on, all layers.
        values_per_token, keys_per_token: numbers in a token's keys and values, and in its keys (0: half), all layers.
        tokens: block of all token ids, int32 [rows, slots]; None if they were not given.
        first, coded, last: blocks of what precedes the codes, of the whole parts of codes, of the rest.
    """

    VERSION: ClassVar[int] = 5
    ERROR: ClassVar[type[KvcliError]] = CacheError
    REMEDY: ClassVar[str] = "make it again with 'kvcli compress'"

    kvcli_version: str
    identity: dict[str, Any]
    notes: dict[str, Any]
    counts: SnapshotCounts
    part_tokens: NonNegativeInt
    bytes_of: dict[str, NonNegativeInt]
    values_per_token: NonNegativeInt
    keys_per_token: NonNegativeInt = 0
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
    def method(self) -> str | None:
        """The method with its bits; as it was noted where this version of kvcli does not know it."""
        try:
            return method_name(self.identity["method"], self.identity["config"])
        except (KvcliError, TypeError, ValueError, KeyError):
            return self.identity.get("method")

    @property
    def fp16_bytes(self) -> int:
        """Bytes of its tokens uncompressed in 16 bits, and of the states of other layers as they are."""
        return 2 * self.num_tokens * self.values_per_token + self.bytes_of.get("others", 0)

    @property
    def bits(self) -> tuple[float, float]:
        """Stored bits per key and per value that is a code, scales and norms included; 0 without codes."""
        keys, size = self.keys_per_token or self.values_per_token // 2, self.bytes_of.get
        numbers = sum(self.counts.coded_keys) * keys, sum(self.counts.coded_values) * (self.values_per_token - keys)
        return bits_per_value(size(CODES[0], 0), numbers[0]), bits_per_value(size(CODES[1], 0), numbers[1])
