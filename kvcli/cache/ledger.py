"""How many tokens of each row are exact and how many are codes, and where the exact ones lie.

All layers encode the same tokens at the same time, so this is counted once a forward pass, for the keys of all layers
and for their values. This module does not know about tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvcli.errors import CacheError
from kvcli.methods.schedule import Schedule

Counts = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Slots of a buffer of exact tokens: the sinks, `gap` unused ones, the window.

    Attributes:
        capacity: slots.
        gap: unused slots between sinks and window, left by tokens that were encoded.
    """

    capacity: int
    gap: int = 0


@dataclass(frozen=True)
class Eviction:
    """Rows whose oldest `count` tokens after the sinks are encoded; `start` of their tokens were before."""

    rows: list[int]
    count: int
    start: int


@dataclass(frozen=True)
class Turn:
    """What a forward pass does to the keys of all layers, or to the values.

    Attributes:
        before: exact tokens of each row, sinks included, before the new ones came.
        exact: with the new ones.
        encoded: encoded tokens of each row, until the flush.
        layout: of the buffer from the arrival of the new tokens to the flush.
        evictions: the flush; every row is in one of them, if only with a count of 0.
        settled: exact tokens of each row after the flush.
        after: layout after the flush.
    """

    before: Counts
    exact: Counts
    encoded: Counts
    layout: Layout
    evictions: tuple[Eviction, ...]
    settled: Counts
    after: Layout


class Ledger:
    """The counts of one kind, keys or values.

    Args:
        schedule: when tokens are encoded.
        sink_length: tokens at the beginning of a row that never are.
        tokens_per_group: tokens that are encoded together.

    Attributes:
        exact: exact tokens of each row, sinks included; empty before the first token.
        encoded: encoded tokens of each row.
        layout: of the exact tokens.
    """

    def __init__(self, schedule: Schedule, sink_length: int, tokens_per_group: int = 1) -> None:
        self.schedule, self.sink_length, self.tokens_per_group = schedule, sink_length, tokens_per_group
        self.exact: Counts = ()
        self.encoded: Counts = ()
        # a window that moves token by token is moved back in its buffer once in a quarter of its length only
        self._least = sink_length + schedule.keep + max(schedule.block, schedule.keep // 4)
        self.layout = Layout(self._least)

    def take(self, counts: Counts) -> Turn:
        """Enters `counts` new tokens of each row and their flush."""
        before = self.exact or (0,) * len(counts)
        encoded = self.encoded or (0,) * len(counts)
        exact = _plus(before, counts)
        layout = self._with_room(before, exact)
        evict = [self.schedule.evict(length - self.sink_length) for length in exact]
        self.exact = tuple(length - count for length, count in zip(exact, evict, strict=True))
        self.encoded = _plus(encoded, evict)
        evictions = tuple(
            Eviction(rows, count, start) for rows, (count, start) in _alike(list(zip(evict, encoded, strict=True)))
        )
        self.layout = self._after(layout, set(evict))
        return Turn(before, exact, encoded, layout, evictions, self.exact, self.layout)

    def select(self, rows: list[int]) -> None:
        """Keeps, repeats or reorders rows."""
        self.exact = tuple(self.exact[row] for row in rows)
        self.encoded = tuple(self.encoded[row] for row in rows)

    def truncate(self, removed: list[int]) -> None:
        """Forgets the last tokens of each row, which `coded_among_last` found to be possible."""
        coded = self.coded_among_last(removed)
        self.exact = tuple(n - (count - code) for n, count, code in zip(self.exact, removed, coded, strict=True))
        self.encoded = tuple(n - code for n, code in zip(self.encoded, coded, strict=True))

    def coded_among_last(self, removed: list[int]) -> list[int]:
        """How many of the last tokens of each row are codes: the exact window goes first, the sinks last.

        Raises:
            CacheError: tokens of an encoded group would have to be cut apart.
        """
        found = []
        for count, exact, encoded in zip(removed, self.exact, self.encoded, strict=True):
            coded = min(encoded, max(0, count - (exact - self.sink_length))) if encoded else 0
            if coded % self.tokens_per_group:
                raise CacheError(
                    f"cannot remove {count} tokens: {coded} of them are part of a group that was encoded together; "
                    "speculative decoding needs a method that encodes token by token (fp8, rtn, qjl, commvq)"
                )
            found.append(coded)
        return found

    def _with_room(self, before: Counts, exact: Counts) -> Layout:
        """The layout that the new tokens come into: the same, or without its gap, or larger."""
        longest, held = max(exact), self.layout
        if longest + held.gap <= held.capacity and min(before) >= self.sink_length:
            return held
        return Layout(max(longest, held.capacity))

    def _after(self, layout: Layout, counts: set[int]) -> Layout:
        """The layout after rows gave away some counts: a wider gap where all gave the same, none where they did not.

        A buffer that a long prompt needed is given back.
        """
        least = max(*self.exact, self._least)
        if layout.capacity > 2 * least:
            return Layout(least)
        if len(counts) > 1 or max(self.exact) <= self.sink_length:
            return Layout(layout.capacity)
        return Layout(layout.capacity, layout.gap + counts.pop())


def _plus(first: Counts, second: Counts | list[int]) -> Counts:
    return tuple(a + b for a, b in zip(first, second, strict=True))


def _alike(keys: list[tuple[int, int]]) -> Iterator[tuple[list[int], tuple[int, int]]]:
    """Rows with equal keys, in order of first appearance."""
    rows: dict[tuple[int, int], list[int]] = {}
    for row, key in enumerate(keys):
        rows.setdefault(key, []).append(row)
    for key, found in rows.items():
        yield found, key
