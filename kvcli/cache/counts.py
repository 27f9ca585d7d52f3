"""How many tokens of each row are in the window and how many are codes, and where the window lies in its buffer.

All layers encode the same tokens at the same time, so this is counted once per forward pass: for the keys of all
layers, and for their values. This module does not know about tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kvcli.errors import CacheError
from kvcli.methods.schedule import Schedule

Counts = tuple[int, ...]
"""One number per row of the batch."""


@dataclass(frozen=True)
class WindowLayout:
    """Slots of a window buffer: the sinks, `gap` unused slots, the residual window.

    Attributes:
        capacity: slots.
        gap: unused slots between sinks and residual window, left by tokens that were encoded.
    """

    capacity: int
    gap: int = 0


@dataclass(frozen=True)
class Eviction:
    """Rows that encode their `count` oldest tokens after the sinks, as codes [start, start + count)."""

    rows: list[int]
    count: int
    start: int


@dataclass(frozen=True)
class FlushPlan:
    """What one forward pass does to the keys of all layers, or to the values: append, then encode the oldest tokens.

    Attributes:
        window_before: window tokens of each row, sinks included, before the new tokens.
        window: with the new tokens.
        coded: encoded tokens of each row, before the flush.
        layout: of the window buffer from the append to the flush.
        evictions: the flush; every row is in one of them, if only with a count of 0.
        window_after: window tokens of each row after the flush.
        layout_after: of the window buffer after the flush.
    """

    window_before: Counts
    window: Counts
    coded: Counts
    layout: WindowLayout
    evictions: tuple[Eviction, ...]
    window_after: Counts
    layout_after: WindowLayout

    @cached_property
    def longest(self) -> int:
        """Window tokens of the row that has most, before the flush."""
        return max(self.window)

    @cached_property
    def flushes(self) -> bool:
        """Whether any token is encoded, or the window buffer changes."""
        return self.layout_after != self.layout or any(eviction.count for eviction in self.evictions)

    @cached_property
    def max_coded_after(self) -> int:
        """Codes of the row that has most after the flush."""
        return max(eviction.start + eviction.count for eviction in self.evictions)


class TokenCounts:
    """The counts of keys, or of values.

    Args:
        schedule: when tokens are encoded.
        sink_length: first tokens of a row, which are never encoded.
        tokens_per_group: tokens that are encoded together.

    Attributes:
        window: window tokens of each row, sinks included; empty before the first token.
        coded: encoded tokens of each row.
        layout: of the window buffer.
    """

    def __init__(self, schedule: Schedule, sink_length: int, tokens_per_group: int = 1) -> None:
        self.schedule, self.sink_length, self.tokens_per_group = schedule, sink_length, tokens_per_group
        self.window: Counts = ()
        self.coded: Counts = ()
        # slack of a quarter window: a window that advances by one token is moved once per that many steps
        self._min_capacity = sink_length + schedule.keep + max(schedule.block, schedule.keep // 4)
        self.layout = WindowLayout(self._min_capacity)

    def append(self, counts: Counts) -> FlushPlan:
        """Adds `counts` new tokens to each row and flushes what the schedule says."""
        before = self.window or (0,) * len(counts)
        coded = self.coded or (0,) * len(counts)
        window = _add(before, counts)
        layout = self._layout_for(before, window)
        evict = tuple(self.schedule.evict(length - self.sink_length) for length in window)
        self.window = tuple(length - count for length, count in zip(window, evict, strict=True))
        self.coded = _add(coded, evict)
        self.layout = self._layout_after(layout, set(evict))
        return FlushPlan(before, window, coded, layout, _evictions(evict, coded), self.window, self.layout)

    def select(self, rows: list[int]) -> None:
        """Keeps, repeats or reorders rows."""
        self.window = tuple(self.window[row] for row in rows)
        self.coded = tuple(self.coded[row] for row in rows)

    def truncate(self, removed: list[int]) -> None:
        """Removes the last `removed` tokens of each row, after `coded_among_last` accepted them."""
        coded = self.coded_among_last(removed)
        self.window = tuple(n - (count - code) for n, count, code in zip(self.window, removed, coded, strict=True))
        self.coded = tuple(n - code for n, code in zip(self.coded, coded, strict=True))

    def coded_among_last(self, removed: list[int]) -> list[int]:
        """How many of the last tokens of each row are codes: the residual window goes first, the sinks last.

        Raises:
            CacheError: a group of tokens that were encoded together would be cut apart.
        """
        coded = []
        for count, window, codes in zip(removed, self.window, self.coded, strict=True):
            from_codes = min(codes, max(0, count - (window - self.sink_length))) if codes else 0
            if from_codes % self.tokens_per_group:
                raise CacheError(
                    f"cannot remove {count} tokens: {from_codes} of them are part of a group of "
                    f"{self.tokens_per_group} tokens that were encoded together; speculative decoding needs a method "
                    "that encodes each token by itself"
                )
            coded.append(from_codes)
        return coded

    def _layout_for(self, before: Counts, window: Counts) -> WindowLayout:
        """The layout that the new tokens are appended to: the present one, or without its gap, or larger."""
        longest, held = max(window), self.layout
        if longest + held.gap <= held.capacity and min(before) >= self.sink_length:
            return held
        return WindowLayout(max(longest, held.capacity))

    def _layout_after(self, layout: WindowLayout, counts: set[int]) -> WindowLayout:
        """If all rows flushed equally, the gap grows by that count, else windows are compacted.

        A buffer that a long prompt needed shrinks again.
        """
        capacity = max(*self.window, self._min_capacity)
        if layout.capacity > 2 * capacity:
            return WindowLayout(capacity)
        if len(counts) > 1 or max(self.window) <= self.sink_length:
            return WindowLayout(layout.capacity)
        return WindowLayout(layout.capacity, layout.gap + counts.pop())


def _add(first: Counts, second: Counts) -> Counts:
    return tuple(a + b for a, b in zip(first, second, strict=True))


def _evictions(counts: Counts, starts: Counts) -> tuple[Eviction, ...]:
    """One eviction per set of rows with equal count and start."""
    rows: dict[tuple[int, int], list[int]] = {}
    for row, key in enumerate(zip(counts, starts, strict=True)):
        rows.setdefault(key, []).append(row)
    return tuple(Eviction(members, count, start) for (count, start), members in rows.items())
