"""One forward pass over one cache: its new tokens, and what all layers need to know about them, computed once."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.cache.counts import Counts, FlushPlan
from kvcli.cache.ranges import Ranges
from kvcli.rope import Rotation, TokenRotations

if TYPE_CHECKING:
    from kvcli.cache.sequences import Sequences


@dataclass
class Forward:
    """Per-forward state shared by all layers; each property is computed by the first layer that needs it.

    Attributes:
        sequences: all tokens of the cache, with the new ones.
        rotation: RoPE of the new slots, in the model's dtype.
        before: tokens each row held before.
        counts: new real tokens of each row.
        real: None when no new slot is padding, else boolean [batch, query_len].
        index: int64 [batch, query_len], token index of each new slot, -1 for padding.
        keys: what the pass does to the keys of all layers.
        values: what it does to their values.
        ranges: the largest numbers that are encoded.
    """

    sequences: Sequences
    rotation: Rotation
    before: Counts
    counts: Counts
    real: Tensor | None
    index: Tensor
    keys: FlushPlan
    values: FlushPlan
    ranges: Ranges = field(default_factory=Ranges)

    @cached_property
    def is_first(self) -> bool:
        """Whether no row held a token before."""
        return not any(self.before)

    @cached_property
    def ragged(self) -> bool:
        """Whether rows append their new tokens at different slots of the window buffers."""
        plans = (self.keys, self.values)
        return self.real is not None or any(min(p.window_before) != max(p.window_before) for p in plans)

    @cached_property
    def uniform(self) -> bool:
        """Whether all rows hold as many tokens, and as many of them as codes."""
        return all(min(n) == max(n) for n in (self.sequences.lengths, self.keys.coded, self.values.coded))

    @cached_property
    def new_tokens_last(self) -> bool:
        """Whether all query slots are new tokens, which are the last window tokens of every row, at equal places."""
        only_window = self.keys.coded == self.values.coded == self.attended_codes
        return not self.ragged and (self.uniform or only_window)

    @cached_property
    def flushes(self) -> bool:
        """Whether keys or values are encoded."""
        return self.keys.flushes or self.values.flushes

    @cached_property
    def attended_codes(self) -> Counts:
        """Tokens of each row, after its sinks, that are attended to as codes: whole groups of keys and values."""
        keys, values = self.sequences.keys, self.sequences.values
        group = max(keys.tokens_per_group, values.tokens_per_group)
        pairs = zip(self.keys.coded, self.values.coded, strict=True)
        return tuple(min(pair) // group * group for pair in pairs)

    @cached_property
    def max_codes(self) -> int:
        """The largest of `attended_codes`."""
        return max(self.attended_codes)

    @cached_property
    def code_lengths(self) -> Tensor | None:
        """`attended_codes` as int32 [batch]; None when all are equal."""
        if min(self.attended_codes) == max(self.attended_codes):
            return None
        return row_values(self.attended_codes, self.index.device, torch.int32)

    @cached_property
    def code_rotations(self) -> TokenRotations:
        """RoPE of the tokens that are attended to as codes."""
        return self.sequences.code_rotations(self.attended_codes, self.code_lengths)

    @cached_property
    def flush_rotations(self) -> list[Rotation]:
        """RoPE of the keys of each eviction, float32, for codecs that work before RoPE."""
        rotations = []
        for eviction in self.keys.evictions:
            start = self.sequences.keys.sink_length + eviction.start
            rotation = self.sequences.rotation(start, start + eviction.count)
            rotations.append(rotation if len(eviction.rows) == len(self.before) else rotation.select(eviction.rows))
        return rotations

    @cached_property
    def decoded_rotation(self) -> Rotation:
        """RoPE of encoded tokens [min(attended_codes), max(coded)), which are decoded into the window."""
        sinks = self.sequences.keys.sink_length
        return self.sequences.rotation(sinks + min(self.attended_codes), sinks + max(self.keys.coded))

    @cached_property
    def visible_window(self) -> Tensor | None:
        """Which window tokens each new slot sees: boolean [batch, query_len, longest]; None when all see all."""
        if self.uniform and self.index.shape[1] == 1:
            return None
        lengths, device = self.sequences.lengths, self.index.device
        longest = max(length - codes for length, codes in zip(lengths, self.attended_codes, strict=True))
        place = torch.arange(longest, device=device)
        codes = row_values(self.attended_codes, device).unsqueeze(1)
        token = torch.where(place < self.sequences.keys.sink_length, place, place + codes)
        beyond = token >= row_values(tuple(lengths), device).unsqueeze(1)
        token = token.masked_fill(beyond, torch.iinfo(torch.int64).max)
        return token.unsqueeze(1) <= self.index.unsqueeze(-1)

    def new_tokens(self, x: Tensor, row: int) -> Tensor:
        """The new real tokens of one row of x [batch, heads, query_len, dim]: [heads, count, dim]."""
        return x[row] if self.real is None else x[row][:, self.real[row]]


ordinary_tensors = torch.inference_mode(False)
"""Decorates what allocates kept tensors: one made in inference mode could not be written to outside of it."""


def row_values(values: Counts, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """One number per row as a tensor [batch]; where all are equal, without a copy from the host."""
    if min(values) == max(values):
        return torch.full((len(values),), values[0], device=device, dtype=dtype)
    return torch.tensor(values, device=device, dtype=dtype)
