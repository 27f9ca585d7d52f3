"""The content of a cache apart from how it lies in memory, as files hold it: tokens in order, no ring, no headroom."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import sub
from typing import Annotated

import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor

from kvcli.cache.counts import Counts, attended_tokens, coded_within
from kvcli.errors import CacheError

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


@dataclass(frozen=True)
class Snapshot:
    """The tokens of a cache. What a row does not use is 0, so that equal content has equal bytes.

    Attributes:
        tensors: by name, for each layer L:
            layers.L.keys, layers.L.values: window, [batch, num_kv_heads, longest window, head_dim], in order: the
                sinks, then the tokens after `counts.attended` others; keys after RoPE.
            layers.L.key_codes.FIELD, layers.L.value_codes.FIELD: [batch, heads, entries, ...], in the field's dtype.
            layers.L.state.FIELD: what the key codec keeps of each row, if anything, [batch, ...].
          And for all layers: `valid`, boolean [batch, slots], False at padding; `positions`, int32
          [batch, tokens of the longest row], RoPE positions.
    """

    counts: SnapshotCounts
    tensors: dict[str, Tensor]

    def check(self, dtype: torch.dtype) -> None:
        """Checks what checksums cannot tell: that the tensors can be those of a cache of a model in this dtype.

        Raises:
            CacheError: window tokens of more bits than 16 and the model's, or as `check_positions`.
        """
        for name, x in self.tensors.items():
            if name.rpartition(".")[2] in WINDOWS and ".state." not in name and x.itemsize > max(2, dtype.itemsize):
                raise CacheError(f"{name} is {x.dtype}, but the model is {dtype}")
        self.check_positions()

    def check_positions(self) -> None:
        """CacheError: positions that are negative or fall, with which no cache can be written or read."""
        positions = self.tensors.get(POSITIONS)
        if positions is None or positions.shape[0] != len(self.counts.lengths):
            return  # `CompressedCache.restore` refuses tensors that are missing or of other shapes
        for row, length in enumerate(self.counts.lengths):
            steps = positions[row, :length].diff()
            if bool((positions[row, :length] < 0).any()) or bool((steps < 0).any()):
                raise CacheError(f"the positions of row {row} are negative or not in order")

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return sum(self.counts.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.nbytes for x in self.tensors.values())

    def prefix(self, num_tokens: int) -> Snapshot:
        """The first 1 or more tokens of the only row, as `CompressedCache.crop` to this length leaves them; views.

        What is cut off in the middle of the codes stays codes: such a prefix has no window but the sinks. A state of
        the key codec is kept, because it was computed from tokens of the prefix only.

        Raises:
            CacheError: more than one row, no such length, or as `SnapshotCounts.without`.
        """
        if len(self.counts.lengths) != 1:
            raise CacheError(f"a prefix is of one sequence; this snapshot has {len(self.counts.lengths)}")
        removed = self.counts.lengths[0] - num_tokens
        if num_tokens < 1 or removed < 0:
            raise CacheError(f"a snapshot of {self.counts.lengths[0]} tokens has no prefix of {num_tokens}")
        counts = self.counts.without(removed)
        cut = {name: x if (n := counts.used(name)) is None else x[:, :, : n[0]] for name, x in self.tensors.items()}
        seen = self.tensors[VALID].cumsum(1)
        slots = int((seen < num_tokens).sum()) + 1 if removed else seen.shape[1]
        cut[VALID], cut[POSITIONS] = self.tensors[VALID][:, :slots], self.tensors[POSITIONS][:, :num_tokens]
        return Snapshot(counts, cut)
