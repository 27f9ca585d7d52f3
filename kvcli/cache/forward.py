"""One forward pass over one cache: its new tokens, and what all layers need to know about them, computed once."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.cache.counts import Counts, Encoding, FlushPlan
from kvcli.cache.ranges import Ranges
from kvcli.cache.window import WindowTokens
from kvcli.methods.layer_codec import LayerCodec
from kvcli.rope import Rotation, TokenRotations

if TYPE_CHECKING:
    from kvcli.cache.sequences import Sequences


@dataclass
class Forward:
    """Per-forward state shared by all layers; each property is computed by the first layer that needs it.

    Attributes:
        sequences: all tokens of the cache, with the new ones.
        rotation: RoPE of the new slots, in the model's dtype.
        counts: new real tokens of each row.
        real: None when no new slot is padding, else boolean [batch, query_len].
        plan: what the pass does in all layers.
        device: of all tensors.
        ranges: the largest numbers that are encoded.
    """

    sequences: Sequences
    rotation: Rotation
    counts: Counts
    real: Tensor | None
    plan: FlushPlan
    device: torch.device
    ranges: Ranges = field(default_factory=Ranges)

    @cached_property
    def is_first(self) -> bool:
        """Whether no row held a token before."""
        return not any(self.plan.before)

    @cached_property
    def window(self) -> WindowTokens:
        """The tokens of the windows, from the append to the flush."""
        plan = self.plan
        if self.real is None and len(set(plan.before)) == len(set(plan.attended)) == 1:
            return WindowTokens(plan.layout, plan.longest, plan.attended[0], plan.before[0])
        start = row_values(plan.before, self.device).unsqueeze(1)
        if self.real is None:
            index = start + torch.arange(self.counts[0], device=self.device)
        else:
            index = (start + self.real.cumsum(1) - 1).masked_fill(~self.real, -1)
        attended = row_values(plan.attended, self.device, torch.int32)
        return WindowTokens(plan.layout, plan.longest, attended, index.int())

    @cached_property
    def held_before(self) -> Tensor:
        """Tokens of the windows before the append, int64 [batch, length of the longest]."""
        return self._held(self.plan.before, self.plan.attended)

    @cached_property
    def held_after(self) -> Tensor:
        """Tokens of the windows after the flush, int64 [batch, length of the longest]."""
        return self._held(self.plan.lengths, self.plan.attended_after)

    def _held(self, lengths: Counts, attended: Counts) -> Tensor:
        longest = max(length - codes for length, codes in zip(lengths, attended, strict=True))
        return self.plan.layout.held(row_values(attended, self.device), longest)

    @cached_property
    def max_codes(self) -> int:
        """Tokens that are attended to as codes, of the row that has most."""
        return max(self.plan.attended)

    @cached_property
    def code_lengths(self) -> Tensor | None:
        """Tokens of each row that are attended to as codes, int32 [batch]; None when all have as many."""
        attended = self.plan.attended
        if min(attended) == max(attended):
            return None
        return row_values(attended, self.device, torch.int32)

    def rotation_of(self, codec: LayerCodec) -> Rotation:
        """RoPE of the new slots in a layer, in the model's dtype."""
        return self.rotation if codec.rotated else self._no_rotation

    def code_rotations(self, codec: LayerCodec) -> TokenRotations:
        """RoPE of the tokens that a layer attends to as codes."""
        return self.sequences.code_rotations(self.plan.attended, self.code_lengths, codec.rotated)

    def key_rotations(self, codec: LayerCodec) -> list[Rotation]:
        """RoPE of the keys that are encoded, float32, for codecs that work before RoPE."""
        return self._key_rotations if codec.rotated else [Rotation.none(x) for x in self._key_rotations]

    @cached_property
    def _no_rotation(self) -> Rotation:
        return Rotation.none(self.rotation)

    @cached_property
    def _key_rotations(self) -> list[Rotation]:
        return [self._rotation(encoding) for encoding in self.plan.keys]

    def _rotation(self, encoding: Encoding) -> Rotation:
        sinks = self.plan.layout.sinks
        rotation = self.sequences.rotation(sinks + int(encoding.start), sinks + int(encoding.stop))
        return rotation if encoding.whole else rotation.select(encoding.rows)


ordinary_tensors = torch.inference_mode(False)
"""Decorates what allocates kept tensors: one made in inference mode could not be written to outside of it."""


def row_values(values: Counts, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """One number per row as a tensor [batch]; where all are equal, without a copy from the host."""
    if min(values) == max(values):
        return torch.full((len(values),), values[0], device=device, dtype=dtype)
    return torch.tensor(values, device=device, dtype=dtype)
