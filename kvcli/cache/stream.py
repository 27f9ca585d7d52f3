"""The keys or the values of one layer: first and last tokens in full precision, the rest as codes.

A ledger counts; this module moves tensors as it says. Rows of a batch may have different lengths. Codes and exact
tokens live in buffers that grow by a part of their size, so that a token costs no concatenation. This module does not
know about attention or rotation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvcli.cache.ledger import Counts, Eviction, Layout, Turn
from kvcli.cache.timeline import Step
from kvcli.methods.base import Codec, Codes, KeyCodec, State

_CODE_HEADROOM = 128

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

    def place(self, batch: int, eviction: Eviction) -> Codes | None:
        """Views of where the codes of an eviction belong; None if they do not fit, or not side by side."""
        fits = self.codes is not None and eviction.start + eviction.count <= self.capacity
        return self._entries(eviction.start, eviction.count) if fits and len(eviction.rows) == batch else None

    def write(self, batch: int, eviction: Eviction, codes: Codes) -> None:
        """Copies the codes of an eviction to where they belong."""
        rows, count, start = eviction.rows, eviction.count, eviction.start
        if self.codes is None:
            self._shared = {name: count // x.shape[2] for name, x in codes.tensors().items()}
        if start + count > self.capacity:
            self._grow(batch, codes, start + count)
        for name, target in self._entries(start, count).tensors().items():
            target[slice(None) if len(rows) == batch else rows] = getattr(codes, name)

    def _entries(self, start: int, count: int) -> Codes:
        """Views of the entries of `count` tokens from `start` on, which no earlier token shares."""
        assert self.codes is not None
        views = {}
        for name, x in self.codes.tensors().items():
            first = start // self._shared[name]
            views[name] = x[:, :, first : first + -(-count // self._shared[name])]
        return type(self.codes)(**views)

    def _grow(self, batch: int, like: Codes, needed: int) -> None:
        """Allocates headroom of an eighth, at least 128 tokens once decoding goes on, and keeps what is there."""
        headroom = max(_CODE_HEADROOM, needed // 8) if self.codes is not None else 0
        unit = max(self._shared.values())
        capacity = -(-(needed + headroom) // unit) * unit
        grown = {}
        for name, x in like.tensors().items():
            shape = (batch, x.shape[1], capacity // self._shared[name], *x.shape[3:])
            grown[name] = torch.zeros(shape, dtype=x.dtype, device=x.device)
            if self.codes is not None:
                held = getattr(self.codes, name)
                grown[name][:, :, : held.shape[2]] = held
        self.codes = type(like)(**grown)

    def select(self, rows: Tensor) -> None:
        """Keeps, repeats or reorders rows."""
        if self.codes is not None:
            self.codes = self.codes.map(lambda x: x.index_select(0, rows.to(x.device)))

    def nbytes(self, lengths: Counts) -> tuple[int, int]:
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
        exact: [batch, num_kv_heads, capacity, head_dim], keys after RoPE, laid out as `layout` says: a row's first
            `sink_length` tokens, a gap, the tokens after its encoded ones.
        layout: of `exact`.
        buffer: codes of the tokens between.
        state: what the codec keeps of each row, if anything.
    """

    def __init__(self, codec: Codec[Any], sink_length: int) -> None:
        self.codec, self.sink_length = codec, sink_length
        self.exact: Tensor | None = None
        self.layout = Layout(0)
        self.buffer = CodeBuffer()
        self.state: State | None = None

    def room(self, like: Tensor, step: Step, turn: Turn) -> Tensor:
        """Where new tokens are to be written: shaped like `like` [batch, num_kv_heads, query_len, head_dim].

        A view of the buffer where all rows go to the same slots, else a tensor of its own; `took` must follow.
        """
        if self.exact is None:
            self.exact = like.new_zeros(*like.shape[:2], turn.layout.capacity, like.shape[3])
            self.layout = Layout(turn.layout.capacity)
        self._arrange(turn.layout, max(turn.before))
        if not _same_slots(step, turn):
            return like.new_empty(like.shape)
        first = self._slot(turn.before[0])
        return self.exact[:, :, first : first + like.shape[2]]

    def took(self, new: Tensor, step: Step, turn: Turn) -> None:
        """Ends what `room` began: distributes tokens over rows that differ."""
        if _same_slots(step, turn):
            return
        assert self.exact is not None
        for row, (start, count) in enumerate(zip(turn.before, step.counts, strict=True)):
            slot = self._slot(start)
            self.exact[row, :, slot : slot + count] = step.row_tokens(new, row)

    def observe(self, queries: Tensor, keys: Tensor, step: Step, turn: Turn) -> None:
        """Shows the codec new tokens of the rows that have no codes yet, if it keeps a state.

        Args:
            queries: [batch, num_heads, query_len, head_dim] in the codec's query space.
            keys: [batch, num_kv_heads, query_len, head_dim] after RoPE.
            step: the new tokens.
            turn: what the pass does to the keys.
        """
        if self.state is None:
            self.state = self.codec.new_state(keys.shape[0], keys.device)
        if self.state is None or all(turn.encoded):
            return
        assert isinstance(self.codec, KeyCodec)
        if step.real is None and not any(turn.encoded):
            counts = torch.full((keys.shape[0],), float(keys.shape[2]), device=keys.device)
            self.codec.observe(self.state, queries, keys, counts)
            return
        open_rows = torch.tensor([not encoded for encoded in turn.encoded], device=keys.device)
        shown = open_rows[:, None, None, None]
        if step.real is not None:
            shown = shown & step.real[:, None, :, None]
        counts = torch.tensor(step.counts, device=keys.device, dtype=torch.float32) * open_rows
        self.codec.observe(self.state, queries * shown, keys * shown, counts)

    def encode(self, turn: Turn, to_codec_space: ToCodecSpace) -> list[Codes | None]:
        """Encodes the tokens that the turn names; `store` must follow.

        Returns:
            The codes of each eviction; None where there are none, or where they are in their place already.
        """
        return [self._encode(eviction, to_codec_space) if eviction.count else None for eviction in turn.evictions]

    def store(self, turn: Turn, encoded: list[Codes | None]) -> None:
        """Stores what `encode` found, forgets the tokens, and gives back the memory that a long prompt took."""
        assert self.exact is not None
        for eviction, codes in zip(turn.evictions, encoded, strict=True):
            if codes is not None:
                self.buffer.write(self.exact.shape[0], eviction, codes)
        if len({eviction.count for eviction in turn.evictions}) == 1:
            self.layout = Layout(self.layout.capacity, self.layout.gap + turn.evictions[0].count)
        else:
            for eviction in turn.evictions:
                length = max(turn.settled[row] for row in eviction.rows)
                self._move(eviction.rows, self.layout.gap + eviction.count, length)
            self.layout = Layout(self.layout.capacity)
        self._arrange(turn.after, max(turn.settled))

    def select(self, rows: Tensor) -> None:
        """Keeps, repeats or reorders rows."""
        if self.exact is None:
            return
        self.exact = self.exact.index_select(0, rows.to(self.exact.device))
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

    def _slot(self, token: int) -> int:
        """Where the exact token of a row with this number is, or comes."""
        return token if token < self.sink_length else token + self.layout.gap

    def _encode(self, eviction: Eviction, to_codec_space: ToCodecSpace) -> Codes | None:
        """Encodes the oldest tokens of the window of some rows, into their place if there is one."""
        assert self.exact is not None
        batch, rows = self.exact.shape[0], eviction.rows
        first = self.sink_length + self.layout.gap
        old = self.exact[slice(None) if len(rows) == batch else rows, :, first : first + eviction.count]
        state = self.state
        if state is not None:
            if not eviction.start:
                assert isinstance(self.codec, KeyCodec)
                self.codec.finalize_state(state, rows)
            state = state if len(rows) == batch else state.select(rows)
        old = to_codec_space(old, rows, self.sink_length + eviction.start)
        place = self.buffer.place(batch, eviction)
        if place is None:
            codes: Codes = self.codec.encode(old, state)
            return codes
        self.codec.encode_into(old, state, place)
        return None

    def _arrange(self, layout: Layout, length: int) -> None:
        """Changes the layout of rows of at most `length` exact tokens; a gap can only be closed."""
        assert self.exact is not None
        if layout == self.layout:
            return
        if layout.capacity == self.layout.capacity:
            self._move(None, self.layout.gap, length)
        else:
            sinks, window = min(length, self.sink_length), max(0, length - self.sink_length)
            old, first = self.exact, self.sink_length + self.layout.gap
            self.exact = old.new_zeros(*old.shape[:2], layout.capacity, old.shape[3])
            self.exact[:, :, :sinks] = old[:, :, :sinks]
            self.exact[:, :, sinks : sinks + window] = old[:, :, first : first + window]
        self.layout = layout

    def _move(self, rows: list[int] | None, gap: int, length: int) -> None:
        """Moves the windows of some rows, or of all, from behind a gap to the sinks."""
        assert self.exact is not None
        first = self.sink_length
        if gap and length > first:
            index = slice(None) if rows is None else rows
            self.exact[index, :, first:length] = self.exact[index, :, first + gap : length + gap].clone()


def _same_slots(step: Step, turn: Turn) -> bool:
    """Whether the new tokens of all rows go to the same slots."""
    return step.real is None and min(turn.before) == max(turn.before)
