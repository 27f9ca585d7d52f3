"""The keys or the values of one layer: first and last tokens in full precision, the rest as codes.

Rows of a batch may have different lengths. Codes and exact tokens live in buffers that grow by a part of their size,
so that a token costs no concatenation. This module does not know about attention or rotation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from kvcli.cache.timeline import Step
from kvcli.errors import CacheError
from kvcli.methods.base import Codec, Codes, KeyCodec, Schedule, State

_CODE_HEADROOM = 256

ToCodecSpace = Callable[[Tensor, list[int], int], Tensor]
"""Takes exact tokens [rows, heads, count, head_dim] to the codec's space, given rows and index of the first token."""


class CodeBuffer:
    """Preallocated codes of a batch, written at each row's own end."""

    def __init__(self) -> None:
        self.codes: Codes | None = None
        self._shared: dict[str, int] = {}

    @property
    def capacity(self) -> int:
        """Tokens a row can hold without growing."""
        return 0 if self.codes is None else self.codes.num_tokens

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        assert self.codes is not None
        return next(iter(self.codes.tensors().values())).device

    def write(self, batch: int, rows: list[int], start: int, codes: Codes, fill: int) -> None:
        """Writes codes of some rows at token `start`; `fill` is the longest row before."""
        count = codes.num_tokens
        if self.codes is None:
            self._shared = {name: count // x.shape[2] for name, x in codes.tensors().items()}
        if start + count > self.capacity:
            self._grow(batch, codes, start + count, fill)
        assert self.codes is not None
        everyone = len(rows) == batch
        for name, target in self.codes.tensors().items():
            first = start // self._shared[name]
            source = getattr(codes, name)
            target[slice(None) if everyone else rows, :, first : first + source.shape[2]] = source

    def _grow(self, batch: int, like: Codes, needed: int, fill: int) -> None:
        """Allocates headroom of an eighth, at least 256 tokens once decoding goes on, and keeps what is there."""
        headroom = max(_CODE_HEADROOM, needed // 8) if self.codes is not None else 0
        unit = max(self._shared.values())
        capacity = -(-(needed + headroom) // unit) * unit
        grown = {}
        for name, x in like.tensors().items():
            shape = (batch, x.shape[1], capacity // self._shared[name], *x.shape[3:])
            grown[name] = torch.zeros(shape, dtype=x.dtype, device=x.device)
            if self.codes is not None:
                kept = -(-fill // self._shared[name])
                grown[name][:, :, :kept] = getattr(self.codes, name)[:, :, :kept]
        self.codes = type(like)(**grown)

    def select(self, rows: Tensor) -> None:
        """Keeps, repeats or reorders rows."""
        if self.codes is not None:
            self.codes = self.codes.map(lambda x: x.index_select(0, rows.to(x.device)))

    def nbytes(self, lengths: list[int]) -> tuple[int, int]:
        """Bytes in use for rows of these lengths, and bytes allocated."""
        if self.codes is None:
            return 0, 0
        used = 0
        for name, x in self.codes.tensors().items():
            entry = x[0, :, 0].nbytes
            used += sum(-(-length // self._shared[name]) * entry for length in lengths)
        return used, self.codes.nbytes


class Stream:
    """Exact and encoded tokens of the keys or the values of one layer.

    Attributes:
        exact: [batch, num_kv_heads, capacity, head_dim], keys after RoPE: a row's first `sink_length` tokens, then the
            tokens after its encoded ones.
        exact_lengths: exact tokens of each row.
        encoded: encoded tokens of each row.
        buffer: their codes.
        state: what the codec keeps of each row, if anything.
    """

    def __init__(self, codec: Codec[Any], schedule: Schedule, sink_length: int) -> None:
        self.codec, self.schedule, self.sink_length = codec, schedule, sink_length
        self.exact: Tensor | None = None
        self.exact_lengths: list[int] = []
        self.encoded: list[int] = []
        self.buffer = CodeBuffer()
        self.state: State | None = None
        self._capacity = sink_length + schedule.keep + schedule.block

    def append(self, new: Tensor, step: Step) -> None:
        """Adds the real tokens of new [batch, num_kv_heads, query_len, head_dim]."""
        if self.exact is None:
            self.exact_lengths, self.encoded = [0] * new.shape[0], [0] * new.shape[0]
            self.exact = new.new_zeros(*new.shape[:2], self._capacity, new.shape[3])
        before = self.exact_lengths
        self.exact_lengths = [a + b for a, b in zip(before, step.counts, strict=True)]
        if max(self.exact_lengths) > self.exact.shape[2]:
            self.exact = _resized(self.exact, max(self.exact_lengths))
        if step.real is None and len(set(before)) == 1:
            self.exact[:, :, before[0] : self.exact_lengths[0]] = new
            return
        for row, start in enumerate(before):
            self.exact[row, :, start : self.exact_lengths[row]] = step.row_tokens(new, row)

    def observe(self, queries: Tensor, keys: Tensor, step: Step) -> None:
        """Shows the codec new tokens of the rows that have no codes yet, if it keeps a state.

        Args:
            queries: [batch, num_heads, query_len, head_dim] in the codec's query space.
            keys: [batch, num_kv_heads, query_len, head_dim] after RoPE.
            step: the new tokens.
        """
        if self.state is None:
            self.state = self.codec.new_state(keys.shape[0], keys.device)
        if self.state is None or all(self.encoded):
            return
        assert isinstance(self.codec, KeyCodec)
        if step.real is None and not any(self.encoded):
            counts = torch.full((keys.shape[0],), float(keys.shape[2]), device=keys.device)
            self.codec.observe(self.state, queries, keys, counts)
            return
        open_rows = torch.tensor([not encoded for encoded in self.encoded], device=keys.device)
        shown = open_rows[:, None, None, None]
        if step.real is not None:
            shown = shown & step.real[:, None, :, None]
        counts = torch.tensor(step.counts, device=keys.device, dtype=torch.float32) * open_rows
        self.codec.observe(self.state, queries * shown, keys * shown, counts)

    def flush(self, to_codec_space: ToCodecSpace) -> None:
        """Encodes what the schedule lets go of, and gives back the memory that a long prompt took."""
        assert self.exact is not None
        evict = [self.schedule.evict(length - self.sink_length) for length in self.exact_lengths]
        for rows, (count, start) in _groups(list(zip(evict, self.encoded, strict=True))):
            if count:
                self._evict(rows, count, start, to_codec_space)
        capacity = max(*self.exact_lengths, self._capacity)
        if self.exact.shape[2] > 2 * capacity:
            self.exact = _resized(self.exact, capacity)

    def _evict(self, rows: list[int], count: int, start: int, to_codec_space: ToCodecSpace) -> None:
        """Encodes the `count` tokens after the sinks of rows that hold `start` encoded tokens, and closes the gap."""
        assert self.exact is not None
        first = self.sink_length
        index = slice(None) if len(rows) == self.exact.shape[0] else rows
        old = to_codec_space(self.exact[index, :, first : first + count], rows, first + start)
        state = self.state
        if state is not None:
            if not start:
                assert isinstance(self.codec, KeyCodec)
                self.codec.settle(state, rows)
            state = state.select(rows)
        self.buffer.write(self.exact.shape[0], rows, start, self.codec.encode(old, state), max(self.encoded))
        length = max(self.exact_lengths[row] for row in rows)
        self.exact[index, :, first : length - count] = self.exact[index, :, first + count : length].clone()
        for row in rows:
            self.exact_lengths[row] -= count
            self.encoded[row] += count

    def truncate(self, removed: list[int]) -> None:
        """Forgets the last tokens of each row, which `coded_among_last` found to be possible."""
        for row, (count, coded) in enumerate(zip(removed, self.coded_among_last(removed), strict=True)):
            self.encoded[row] -= coded
            self.exact_lengths[row] -= count - coded

    def coded_among_last(self, removed: list[int]) -> list[int]:
        """How many of the last tokens of each row are codes: the exact window goes first, the sinks last.

        Raises:
            CacheError: tokens of an encoded group would have to be cut apart.
        """
        found = []
        for count, exact, encoded in zip(removed, self.exact_lengths, self.encoded, strict=True):
            coded = min(encoded, max(0, count - (exact - self.sink_length))) if encoded else 0
            if coded % self.codec.tokens_per_group:
                raise CacheError(
                    f"cannot remove {count} tokens: {coded} of them are part of a group that was encoded together; "
                    "speculative decoding needs a method that encodes token by token (fp8, rtn, qjl, commvq)"
                )
            found.append(coded)
        return found

    def select(self, rows: Tensor) -> None:
        """Keeps, repeats or reorders rows."""
        if self.exact is None:
            return
        self.exact = self.exact.index_select(0, rows.to(self.exact.device))
        order = rows.tolist()
        self.exact_lengths = [self.exact_lengths[row] for row in order]
        self.encoded = [self.encoded[row] for row in order]
        self.buffer.select(rows)
        if self.state is not None:
            self.state = self.state.map(lambda x: x.index_select(0, rows.to(x.device)))

    def to(self, device: torch.device | str) -> None:
        """Moves all tensors."""
        if self.exact is not None:
            self.exact = self.exact.to(device, non_blocking=True)
        if self.buffer.codes is not None:
            self.buffer.codes = self.buffer.codes.map(lambda x: x.to(device, non_blocking=True))
        if self.state is not None:
            self.state = self.state.map(lambda x: x.to(device, non_blocking=True))


def _resized(x: Tensor, capacity: int) -> Tensor:
    """A copy of x [batch, heads, time, dim] with another length, zero-filled."""
    resized = x.new_zeros(*x.shape[:2], capacity, x.shape[3])
    kept = min(capacity, x.shape[2])
    resized[:, :, :kept] = x[:, :, :kept]
    return resized


def _groups(keys: list[tuple[int, int]]) -> Iterator[tuple[list[int], tuple[int, int]]]:
    """Rows with equal keys, in order of first appearance."""
    for key in dict.fromkeys(keys):
        yield [row for row, other in enumerate(keys) if other == key], key
