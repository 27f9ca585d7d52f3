"""The keys or the values of one layer: window tokens in full precision, all others as codes.

`TokenCounts` counts; this module moves tensors as a `FlushPlan` says. Rows of a batch may have different lengths. Codes
and window tokens live in buffers that grow by a part of their size, so that a token costs no concatenation. This module
does not know about attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvcli.cache.counts import Counts, Eviction, FlushPlan, WindowLayout
from kvcli.cache.forward import Forward, ordinary_tensors
from kvcli.cache.ranges import Note
from kvcli.cache.window import WindowTokens
from kvcli.methods.base import Codec, Codes, KeyCodec

_CODE_HEADROOM = 128
"""Fewest tokens by which a code buffer grows after its first allocation."""

EncoderInput = Callable[[int, Tensor], Tensor]
"""What a codec takes, from the window tokens [batch, num_kv_heads, time, head_dim] of a plan's i-th eviction."""


class CodeBuffer:
    """Preallocated codes of a batch, written at each row's own end.

    Args:
        codec: what encodes the tokens.
        like: window buffer [batch, num_kv_heads, capacity, head_dim] of the tokens.

    Attributes:
        codes: zeros where nothing was written.
        capacity: tokens that a row can hold without growing.
    """

    def __init__(self, codec: Codec[Any], like: Tensor) -> None:
        group = codec.encoded_group(like)
        tokens = codec.tokens_per_group
        self._tokens_per_entry = {name: tokens // x.shape[2] for name, x in group.tensors().items()}
        self.codes: Codes = group.map(lambda x: x.new_empty(like.shape[0], x.shape[1], 0, *x.shape[3:]))
        self.capacity = 0

    def reserve(self, num_tokens: int) -> None:
        """Makes room for this many tokens per row; grows by an eighth, at least 128 tokens, after the first."""
        if num_tokens > self.capacity:
            self._grow(num_tokens)

    @ordinary_tensors
    def _grow(self, num_tokens: int) -> None:
        headroom = max(_CODE_HEADROOM, num_tokens // 8) if self.capacity else 0
        unit = max(self._tokens_per_entry.values())
        capacity = -(-(num_tokens + headroom) // unit) * unit
        grown = {}
        for name, x in self.codes.tensors().items():
            grown[name] = x.new_zeros(*x.shape[:2], capacity // self._tokens_per_entry[name], *x.shape[3:])
            grown[name][:, :, : x.shape[2]] = x
        self.codes, self.capacity = type(self.codes)(**grown), capacity

    def view(self, start: int, count: int) -> Codes:
        """Views of the entries of tokens [start, start + count), which share no entry with earlier tokens."""
        views = {}
        for name, x in self.codes.tensors().items():
            tokens = self._tokens_per_entry[name]
            views[name] = x[:, :, start // tokens : start // tokens - (-count // tokens)]
        return type(self.codes)(**views)

    def nbytes(self, lengths: Counts) -> tuple[int, int]:
        """Bytes in use for rows of these lengths, and bytes allocated."""
        used = 0
        for name, x in self.codes.tensors().items():
            entry = x.shape[1] * x.shape[3:].numel() * x.element_size()
            used += sum(-(-length // self._tokens_per_entry[name]) * entry for length in lengths)
        return used, self.codes.nbytes


class LayerStore:
    """Window and codes of the keys, or of the values, of one layer; made with the first tokens.

    Args:
        codec: encodes what leaves the window.
        sink_length: first tokens of a row, which are never encoded.
        like: first tokens, [batch, num_kv_heads, query_len, head_dim].
        plan: their plan.

    Attributes:
        window: [batch, num_kv_heads, capacity, head_dim], keys after RoPE, laid out as `layout` says.
        layout: a row's first `sink_length` tokens, a gap, the tokens after its encoded ones.
        codes: of the tokens between sinks and residual window.
        state: what the codec keeps of each row, if anything.
    """

    def __init__(self, codec: Codec[Any], sink_length: int, like: Tensor, plan: FlushPlan) -> None:
        self.codec, self.sink_length = codec, sink_length
        self.window = like.new_zeros(*like.shape[:2], plan.layout.capacity, like.shape[3])
        self.layout = WindowLayout(plan.layout.capacity)
        self.codes = CodeBuffer(codec, self.window)
        self.state = codec.new_state(like.shape[0], like.device)

    def reserve(self, plan: FlushPlan) -> None:
        """Makes room for the new tokens of a plan, and for the codes of those that it flushes."""
        if plan.layout != self.layout:
            self._arrange(plan.layout, max(plan.window_before))
        if plan.flushes:
            self.codes.reserve(plan.max_coded_after)

    def next_slots(self, plan: FlushPlan, count: int) -> Tensor:
        """The slots of `count` new tokens where all rows append at the same slot: a view of the window."""
        first = self._slot(plan.window_before[0])
        return self.window[:, :, first : first + count]

    def append(self, new: Tensor, plan: FlushPlan, forward: Forward) -> None:
        """Copies new tokens [batch, num_kv_heads, query_len, head_dim], keys rotated, to each row's own slots."""
        for row, (start, count) in enumerate(zip(plan.window_before, forward.counts, strict=True)):
            slot = self._slot(start)
            self.window[row, :, slot : slot + count] = forward.new_tokens(new, row)

    def observe(self, queries: Tensor, keys: Tensor, plan: FlushPlan, forward: Forward) -> None:
        """Passes new tokens of the rows that have no codes yet to the key codec, if it keeps a state.

        Args:
            queries: [batch, num_heads, query_len, head_dim] in the codec's query space.
            keys: [batch, num_kv_heads, query_len, head_dim] after RoPE.
            plan: what the pass does to the keys.
            forward: the pass.
        """
        if self.state is None or not isinstance(self.codec, KeyCodec) or all(plan.coded):
            return
        if forward.real is None and not any(plan.coded):
            counts = torch.full((keys.shape[0],), float(keys.shape[2]), device=keys.device)
            self.codec.observe(self.state, queries, keys, counts)
            return
        open_rows = torch.tensor([not coded for coded in plan.coded], device=keys.device)
        shown = open_rows[:, None, None, None]
        if forward.real is not None:
            shown = shown & forward.real[:, None, :, None]
        counts = torch.tensor(forward.counts, device=keys.device, dtype=torch.float32) * open_rows
        self.codec.observe(self.state, queries * shown, keys * shown, counts)

    def window_tokens(self, plan: FlushPlan) -> WindowTokens:
        """Sinks and residual window of every row, before the flush of the plan."""
        return WindowTokens(self.window, plan.longest, self.sink_length, self.layout.gap)

    def encode(self, plan: FlushPlan, encoder_input: EncoderInput | None = None, note: Note | None = None) -> None:
        """Encodes the oldest window tokens into the code buffer, where `reserve` made room; keeps no new allocation.

        Args:
            plan: names rows and tokens.
            encoder_input: None where the codec takes window tokens as they are.
            note: called with what was encoded.
        """
        for i, eviction in enumerate(plan.evictions):
            if not eviction.count:
                continue
            tokens = self._evicted(eviction)
            if encoder_input is not None:
                tokens = encoder_input(i, tokens)
            codes = self._encode(eviction, tokens)
            if note is not None:
                note(eviction, tokens, codes)

    def evict(self, plan: FlushPlan) -> None:
        """Removes the encoded tokens from the window, and gives back the memory that a long prompt took."""
        counts = {eviction.count for eviction in plan.evictions}
        if len(counts) == 1:
            self.layout = WindowLayout(self.layout.capacity, self.layout.gap + counts.pop())
        else:
            for eviction in plan.evictions:
                length = max(plan.window_after[row] for row in eviction.rows)
                self._move(eviction.rows, self.layout.gap + eviction.count, length)
            self.layout = WindowLayout(self.layout.capacity)
        if plan.layout_after != self.layout:
            self._arrange(plan.layout_after, max(plan.window_after))

    def restart(self, rows: list[int]) -> None:
        """Empties the codec's state of some rows."""
        if self.state is None or not rows:
            return
        empty: Any = self.codec.new_state(len(rows), self.window.device)
        for name, x in self.state.tensors().items():
            x[rows] = empty.tensors()[name]

    @ordinary_tensors
    def select(self, rows: Tensor) -> None:
        """Keeps, repeats or reorders rows, [count] indices."""
        rows = rows.to(self.window.device)
        self.window = self.window.index_select(0, rows)
        self.codes.codes = self.codes.codes.map(lambda x: x.index_select(0, rows))
        if self.state is not None:
            self.state = self.state.map(lambda x: x.index_select(0, rows))

    @ordinary_tensors
    def to(self, device: torch.device | str) -> None:
        """Moves all tensors."""
        self.window = self.window.to(device, non_blocking=True)
        self.codes.codes = self.codes.codes.map(lambda x: x.to(device, non_blocking=True))
        if self.state is not None:
            self.state = self.state.map(lambda x: x.to(device, non_blocking=True))

    def _slot(self, token: int) -> int:
        """The slot of a row's window token."""
        return token if token < self.sink_length else token + self.layout.gap

    def _evicted(self, eviction: Eviction) -> Tensor:
        """The oldest tokens of the residual windows, [rows, num_kv_heads, count, head_dim]."""
        first = self.sink_length + self.layout.gap
        rows = slice(None) if len(eviction.rows) == self.window.shape[0] else eviction.rows
        return self.window[rows, :, first : first + eviction.count]

    def _encode(self, eviction: Eviction, tokens: Tensor) -> Codes:
        rows, state = eviction.rows, self.state
        whole = len(rows) == self.window.shape[0]
        if state is not None:
            if not eviction.start and isinstance(self.codec, KeyCodec):
                self.codec.finalize_state(state, rows)
            state = state if whole else state.select(rows)
        target = self.codes.view(eviction.start, eviction.count)
        if whole:
            self.codec.encode_into(tokens, state, target)
            return target
        codes: Codes = self.codec.encode(tokens, state)
        for name, x in codes.tensors().items():
            getattr(target, name)[rows] = x
        return codes

    @ordinary_tensors
    def _arrange(self, layout: WindowLayout, length: int) -> None:
        """Changes the layout of rows of at most `length` window tokens; a gap can only be closed."""
        if layout.capacity == self.layout.capacity:
            self._move(None, self.layout.gap, length)
        else:
            sinks, window = min(length, self.sink_length), max(0, length - self.sink_length)
            old, first = self.window, self.sink_length + self.layout.gap
            self.window = old.new_zeros(*old.shape[:2], layout.capacity, old.shape[3])
            self.window[:, :, :sinks] = old[:, :, :sinks]
            self.window[:, :, sinks : sinks + window] = old[:, :, first : first + window]
        self.layout = layout

    def _move(self, rows: list[int] | None, gap: int, length: int) -> None:
        """Moves the residual windows of some rows, or of all, from behind a gap to the sinks."""
        first = self.sink_length
        if gap and length > first:
            index = slice(None) if rows is None else rows
            self.window[index, :, first:length] = self.window[index, :, first + gap : length + gap].clone()
