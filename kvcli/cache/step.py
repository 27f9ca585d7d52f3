"""Passes of one token per row whose counts live in device tensors, so that a CUDA graph of one is a graph of all.

The host counts, as in every pass, and writes the counts of the next pass into the tensors; kernels read them there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.cache.counts import Encoding, FlushPlan
from kvcli.cache.forward import Forward, ordinary_tensors
from kvcli.cache.window import WindowTokens
from kvcli.methods.layer_codec import LayerCodec
from kvcli.rope import Rotation, TokenRotations

if TYPE_CHECKING:
    from kvcli.cache.sequences import Sequences

_HOST_BUFFERS = 16
"""Passes whose counts may be on their way to the device."""


@dataclass(frozen=True)
class FlushPattern:
    """What all rows encode after a pass, wherever each row is.

    Attributes:
        keys: how many keys each row encodes.
        values: how many values.
        keys_kept: whether keys stay in the window, as what their codes decode to.
        values_kept: whether values do.
    """

    keys: int
    values: int
    keys_kept: bool
    values_kept: bool

    @classmethod
    def of(cls, plan: FlushPlan) -> FlushPattern | None:
        """The pattern of a plan; None where rows encode different numbers of tokens."""
        keys, values = (_common_count(encodings, len(plan.lengths)) for encodings in (plan.keys, plan.values))
        if keys is None or values is None:
            return None
        kept_keys, kept_values = (any(x.kept for x in encodings) for encodings in (plan.keys, plan.values))
        return cls(keys, values, kept_keys, kept_values)


def _common_count(encodings: tuple[Encoding, ...], batch: int) -> int | None:
    """How many tokens every row encodes; None where rows differ."""
    counts = {encoding.count for encoding in encodings} or {0}
    rows = sum(len(encoding.rows) for encoding in encodings)
    return counts.pop() if len(counts) == 1 and rows in (0, batch) else None


class Step:
    """The counts of a pass in tensors, for caches in which every row holds codes.

    Tokens that are encoded but leave the window are rounded in place with those that stay: nothing reads them again.

    Args:
        sequences: of the cache.
        capacity: most tokens of a row that are attended to as codes.
        first_position: what `Sequences.extend` returned, for as many tokens as will be made.

    Attributes:
        capacity: as given; what is launched depends on it instead of the counts.
        index: token index of the new token, int32 [batch, 1].
        attended: tokens attended to as codes, int32 [batch].
        coded_keys: encoded keys of each row, int32 [batch].
        coded_values: encoded values.
    """

    @ordinary_tensors
    def __init__(self, sequences: Sequences, capacity: int, first_position: Tensor) -> None:
        self.sequences, self.capacity = sequences, capacity
        batch, device = len(sequences.lengths), sequences.valid.device
        self.device, self._layout = device, sequences.counts.layout
        self._numbers = torch.zeros(4, batch, dtype=torch.int32, device=device)
        self.index, self.attended = self._numbers[0].unsqueeze(1), self._numbers[1]
        self.coded_keys, self.coded_values = self._numbers[2], self._numbers[3]
        on_gpu = device.type == "cuda"
        count = _HOST_BUFFERS if on_gpu else 1
        self._host = [torch.zeros(4, batch, dtype=torch.int32, pin_memory=on_gpu) for _ in range(count)]
        self._copied: list[torch.cuda.Event | None] = [None] * count
        self._next = 0
        self.first_position = first_position
        self.rotations = {rotated: sequences.rotations_of_codes(capacity, rotated) for rotated in (True, False)}

    def load(self, plan: FlushPlan) -> None:
        """Writes the counts of a pass to the device, in the order of the stream."""
        slot, self._next = self._next, (self._next + 1) % len(self._host)
        copied = self._copied[slot]
        if copied is not None:
            copied.synchronize()
        host = self._host[slot]
        rows: Sequence[Sequence[int]] = (plan.before, plan.attended, plan.coded_keys, plan.coded_values)
        host.copy_(torch.tensor(rows, dtype=torch.int32))
        self._numbers.copy_(host, non_blocking=True)
        if self.device.type == "cuda":
            self._copied[slot] = torch.cuda.Event()
            self._copied[slot].record()  # type: ignore[union-attr]

    def positions(self) -> Tensor:
        """RoPE positions of the new tokens, int64 [batch, 1]."""
        return self.index + self.first_position

    def forward(self, rotation: Rotation, pattern: FlushPattern | None = None) -> Forward:
        """The pass as layers see it.

        Args:
            rotation: RoPE of the new tokens.
            pattern: what is encoded after attention; None: nothing, that is another call.
        """
        batch = self.attended.shape[0]
        ones, rows = (1,) * batch, list(range(batch))
        keys: tuple[Encoding, ...] = ()
        values: tuple[Encoding, ...] = ()
        if pattern is not None and pattern.keys:
            keys = (Encoding(rows, True, self.coded_keys.unsqueeze(1), pattern.keys, pattern.keys * pattern.keys_kept),)
        if pattern is not None and pattern.values:
            kept = pattern.values * pattern.values_kept
            values = (Encoding(rows, True, self.coded_values.unsqueeze(1), pattern.values, kept),)
        plan = FlushPlan(*(ones,) * 5, self._layout, keys, values, ones, self._layout)
        return StepForward(self.sequences, rotation, ones, None, plan, self.device, step=self)


@dataclass
class StepForward(Forward):
    """A pass of a `Step`: what layers ask for are its tensors; the numbers of the plan mean nothing."""

    step: Step = None  # type: ignore[assignment]

    @cached_property
    def is_first(self) -> bool:
        return False

    @cached_property
    def window(self) -> WindowTokens:
        layout = self.plan.layout
        return WindowTokens(layout, layout.capacity, self.step.attended, self.step.index)

    @cached_property
    def max_codes(self) -> int:
        return self.step.capacity

    @cached_property
    def code_lengths(self) -> Tensor | None:
        return self.step.attended

    def code_rotations(self, codec: LayerCodec) -> TokenRotations:
        return self.step.rotations[codec.rotated]

    def _rotation(self, encoding: Encoding) -> Rotation:
        tokens = self.plan.layout.sinks + encoding.start + torch.arange(encoding.count, device=self.device)
        return self.sequences.rope.rotation(tokens + self.step.first_position, torch.float32)
