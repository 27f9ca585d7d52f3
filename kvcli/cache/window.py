"""Where the window lies in its buffers: tokens in full precision, each in a slot of its own until it leaves.

The window of a row holds its sinks and its last tokens. Token t of a row, counted from its first, lies in slot t if it
is a sink, else in slot `sinks + (t - sinks) % ring`: new tokens overwrite those that have left, and nothing is moved.
Keys and values lie in two buffers [batch, num_kv_heads, sinks + ring, head_dim] of the same layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

Rows = list[int] | slice
"""Rows of a batch, as an index of a tensor."""

ALL_ROWS = slice(None)

ordinary_tensors = torch.inference_mode(False)
"""Decorates what allocates kept tensors: one made in inference mode could not be written to outside of it."""


@dataclass(frozen=True)
class WindowLayout:
    """Slots of a window buffer: of the sinks, and of the tokens after them."""

    sinks: int
    ring: int

    @property
    def capacity(self) -> int:
        """All slots."""
        return self.sinks + self.ring

    def slots(self, tokens: Tensor) -> Tensor:
        """The slots of tokens, integers of any shape."""
        return torch.where(tokens < self.sinks, tokens, self.sinks + (tokens - self.sinks) % self.ring)

    def runs(self, start: int, stop: int) -> list[slice]:
        """The slots of tokens [start, stop) in order, as few slices as there are."""
        runs = []
        while start < stop:
            first = start if start < self.sinks else self.sinks + (start - self.sinks) % self.ring
            count = min(stop - start, self.sinks + self.ring - first)
            runs.append(slice(first, first + count))
            start += count
        return runs

    def window_tokens(self, attended: Tensor, length: int) -> Tensor:
        """Tokens of windows in order, [batch, length]: the sinks, then those after `attended` others [batch]."""
        place = torch.arange(length, device=attended.device)
        return torch.where(place < self.sinks, place, place + attended.unsqueeze(1))


@dataclass(frozen=True)
class WindowTokens:
    """The tokens of all windows in one forward pass, its new tokens included.

    `attended` and `index` are both numbers, where all rows agree and no new slot is padding, or both tensors.

    Attributes:
        length: window tokens of the row that has most.
        attended: tokens of each row, after its sinks, that attention reads as codes and not here: int32 [batch].
        index: token index of each new slot, -1 at padding: int32 [batch, query_len]; as a number, of the first one.
    """

    layout: WindowLayout
    length: int
    attended: int | Tensor
    index: int | Tensor

    def read(self, buffer: Tensor) -> Tensor:
        """The tokens in order, [batch, num_kv_heads, length, head_dim]; anything at the end of rows that hold fewer."""
        return read_slots(buffer, self._slots)

    def read_new(self, buffer: Tensor, query_len: int) -> Tensor:
        """The new slots' tokens, [batch, num_kv_heads, query_len, head_dim]; anything at padding."""
        if isinstance(self.index, int):
            return read_slots(buffer, self.layout.runs(self.index, self.index + query_len))
        return read_slots(buffer, self.layout.slots(self.index.long().clamp(min=0)))

    def write_new(self, buffer: Tensor, tokens: Tensor) -> None:
        """Writes the new slots' tokens [batch, num_kv_heads, query_len, head_dim], without padding."""
        if isinstance(self.index, int):
            write_slots(buffer, self._new_runs, tokens)
        else:
            rows, columns, slots = self._new_slots
            buffer[rows, :, slots] = tokens[rows, :, columns].to(buffer.dtype)

    def visible(self, query_len: int, device: torch.device) -> Tensor | None:
        """Which tokens of `read` each query sees, boolean [batch or 1, query_len, length]; None: all.

        A query sees the tokens up to its own; of these, `attended` are not in the window.
        """
        if isinstance(self.index, Tensor) and isinstance(self.attended, Tensor):
            seen = self.index - self.attended.unsqueeze(1) + 1
        elif query_len == 1:
            return None
        else:
            seen = torch.arange(query_len, device=device).unsqueeze(0) + (self.index - self.attended + 1)
        return torch.arange(self.length, device=device) < seen.unsqueeze(-1)

    @cached_property
    def _slots(self) -> Tensor | list[slice]:
        """Slots of the tokens in order."""
        if isinstance(self.attended, Tensor):
            return self.layout.slots(self.layout.window_tokens(self.attended, self.length))
        runs, sinks = self.layout.runs, self.layout.sinks
        if not self.attended:
            return runs(0, self.length)
        return runs(0, sinks) + runs(sinks + self.attended, self.length + self.attended)

    @cached_property
    def _new_runs(self) -> list[slice]:
        """Slots of the new tokens, which are the last, where `index` is a number."""
        assert isinstance(self.index, int)
        assert isinstance(self.attended, int)
        return self.layout.runs(self.index, self.length + self.attended)

    @cached_property
    def _new_slots(self) -> tuple[Tensor, Tensor, Tensor]:
        """Row, column and slot of each new token, without padding, where `index` is a tensor."""
        index = torch.as_tensor(self.index)
        rows, columns = (index >= 0).nonzero(as_tuple=True)
        return rows, columns, self.layout.slots(index[rows, columns])


def read_slots(buffer: Tensor, slots: Tensor | list[slice], rows: Rows = ALL_ROWS) -> Tensor:
    """The tokens in some slots, [batch or rows, num_kv_heads, count, head_dim].

    Args:
        buffer: [batch, num_kv_heads, capacity, head_dim].
        slots: integers [batch, count], or runs of slots; one run of all rows gives a view.
    """
    if isinstance(slots, Tensor):
        vectors = buffer.flatten(0, 2).index_select(0, _vectors(buffer, slots))
        return vectors.view(*buffer.shape[:2], slots.shape[1], buffer.shape[3])
    if len(slots) == 1:
        return buffer[rows, :, slots[0]]
    return torch.cat([buffer[rows, :, run] for run in slots], dim=2)


def write_slots(buffer: Tensor, slots: Tensor | list[slice], tokens: Tensor, rows: Rows = ALL_ROWS) -> None:
    """Writes tokens [batch or rows, num_kv_heads, count, head_dim] to slots as `read_slots` takes them."""
    if isinstance(slots, Tensor):
        buffer.flatten(0, 2)[_vectors(buffer, slots)] = tokens.flatten(0, 2).to(buffer.dtype)
        return
    for run in slots:
        count = run.stop - run.start
        buffer[rows, :, run] = tokens[:, :, :count].to(buffer.dtype)
        tokens = tokens[:, :, count:]


def _vectors(buffer: Tensor, slots: Tensor) -> Tensor:
    """Which of all vectors of a buffer lie in slots [batch, count]: int64 [batch * num_kv_heads * count].

    On a CPU, indexing whole vectors is several times faster than `gather`, which indexes single numbers.
    """
    batch, heads, capacity, _ = buffer.shape
    first = torch.arange(0, batch * heads * capacity, capacity, device=buffer.device)
    return (first.view(batch, heads, 1) + slots.unsqueeze(1)).flatten()
