"""Counts of a pass in device tensors, for passes of as many tokens in every row: a CUDA graph of one serves for all.

The host counts, as in every pass, and writes the counts of the next pass into the tensors; kernels read them there.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from kvcli.cache.counts import DeviceEncoding, HostCounts
from kvcli.cache.ranges import StepRanges
from kvcli.cache.sequences import Sequences
from kvcli.cache.window import WindowTokens, ordinary_tensors
from kvcli.rope import TokenRotations

_HOST_BUFFERS = 16
"""Passes whose counts may be on their way to the device."""


@dataclass(frozen=True)
class FlushPattern:
    """How many keys and values every row encodes after a pass, wherever it is, and whether they stay in the window."""

    keys: int
    values: int
    keys_kept: bool
    values_kept: bool

    @classmethod
    def of(cls, counts: HostCounts) -> FlushPattern | None:
        """The pattern of a pass; None where rows encode different numbers of tokens."""
        for encodings in (counts.keys, counts.values):
            rows = sum(len(encoding.rows) for encoding in encodings)
            if len({encoding.count for encoding in encodings}) > 1 or rows not in (0, len(counts.lengths)):
                return None
        keys, values = (next((x.count for x in part), 0) for part in (counts.keys, counts.values))
        return cls(keys, values, any(x.kept for x in counts.keys), any(x.kept for x in counts.values))


class DeviceCounts:
    """What a pass of `width` tokens per row does, as `HostCounts` of caches in which every row holds codes.

    Tokens that are encoded but leave the window are rounded in place with those that stay: nothing reads them again.

    Args:
        sequences: of the cache; they know the positions of as many tokens as will be made.

    Attributes:
        max_codes: most tokens of a row that are attended to as codes, `capacity`; launches depend on it.
        layout: of the window buffers, which no step changes.
        keys, values: those that are encoded; none, but in what `encoding` returns.
        rotations: RoPE of runs of tokens attended to as codes, of layers that rotate and of those that do not.
        ranges: the largest numbers that were encoded since they were checked.
    """

    is_first = flushes = False
    all_coded = True
    room = (0, 0)

    @ordinary_tensors
    def __init__(self, sequences: Sequences, capacity: int, num_layers: int, width: int = 1) -> None:
        self.max_codes, self.width = capacity, width
        self.layout = self.layout_after = sequences.counts.layout
        self.keys: tuple[DeviceEncoding, ...] = ()
        self.values: tuple[DeviceEncoding, ...] = ()
        batch, device = len(sequences.lengths), sequences.valid.device
        # kernels are compiled for rows that begin at multiples of 16 bytes, as tensors of their own do
        self._numbers = torch.zeros(4, -(-batch // 4) * 4, dtype=torch.int32, device=device)[:, :batch]
        self._index, self._attended = self._numbers[0].unsqueeze(1), self._numbers[1]
        on_gpu = device.type == "cuda"
        hosts = (
            torch.zeros(4, batch, dtype=torch.int32, pin_memory=on_gpu) for _ in range(_HOST_BUFFERS * on_gpu or 1)
        )
        self._hosts: deque[tuple[Tensor, torch.cuda.Event | None]] = deque((host, None) for host in hosts)
        self._positions = sequences.positions
        codes, runs = self._positions[:, self.layout.sinks : self.layout.sinks + capacity], sequences.runs(capacity)
        self.rotations = {
            rotated: [TokenRotations(sequences.rope_of(rotated), codes[:, start:stop]) for start, stop in runs]
            for rotated in (True, False)
        }
        self.ranges = StepRanges(2 * num_layers, device)

    def load(self, counts: HostCounts) -> None:
        """Writes the counts of a pass to the device, in the order of the stream."""
        host, copied = self._hosts[0]
        if copied is not None:
            copied.synchronize()
        rows: Sequence[Sequence[int]] = (counts.before, counts.attended, counts.coded_keys, counts.coded_values)
        host.copy_(torch.tensor(rows, dtype=torch.int32))
        self._numbers.copy_(host, non_blocking=True)
        if self._numbers.is_cuda:
            copied = torch.cuda.Event()
            copied.record()
        self._hosts[0] = host, copied
        self._hosts.rotate(-1)

    def encoding(self, pattern: FlushPattern) -> Self:
        """The same counts of a pass that encodes."""
        encoding, (keys, values) = copy.copy(self), self._numbers[2:].unsqueeze(2)
        if pattern.keys:
            encoding.keys = (DeviceEncoding(keys, pattern.keys, pattern.keys * pattern.keys_kept),)
        if pattern.values:
            encoding.values = (DeviceEncoding(values, pattern.values, pattern.values * pattern.values_kept),)
        return encoding

    def positions(self) -> Tensor:
        """RoPE positions of the new tokens, int64 [batch, width]."""
        return self._positions.gather(1, self._new.long()).long()

    @property
    def _new(self) -> Tensor:
        """Index of the new tokens, int32 [batch, width]."""
        if self.width == 1:
            return self._index
        return self._index + torch.arange(self.width, dtype=torch.int32, device=self._index.device)

    def code_lengths(self, device: torch.device) -> Tensor:
        """Tokens of each row that are attended to as codes, int32 [batch]."""
        return self._attended

    def window(self, real: Tensor | None, device: torch.device) -> WindowTokens:
        """The tokens of the windows."""
        return WindowTokens(self.layout, self.layout.capacity, self._attended, self._new)
