"""Rings of the recent tokens of requests, which an engine names by the pages of their tokens alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvcli.errors import CacheError

RESIDUAL_LENGTH = 32
"""Recent tokens of each request that are exact by default: fewer than in a session, as an engine has many requests."""


@dataclass(frozen=True)
class Window:
    """The exact recent tokens of a request: token t is in place t % ring of the ring `slot`.

    Attributes:
        slot: which of the rings.
        first: the first token that was written there; a request that begins with cached pages has none of these.
        length: tokens of the request.
    """

    slot: int
    first: int
    length: int


class Windows:
    """Which ring is whose.

    A request is known by the page of its last token, which no other one writes to. If that page is full, others with
    the same tokens may have it, too: in one pass they get copies of the ring, else the first that comes has it. An
    engine need not say when a request is finished: the ring that was not used for longest is given to a new one.

    Args:
        most: rings at most, no fewer than requests that run at a time; None: as many as are needed, if `release` is
            called for those that are finished.
        residual_length: recent tokens of each that are exact.
        group: tokens whose keys are encoded together; those of the last group are exact until it is whole.

    Attributes:
        ring: tokens of a ring, 0 if none are exact.
        count: rings that were given.
        copies: slots whose rings are to be copied before the next pass, from the first to the second.
    """

    def __init__(self, most: int | None, residual_length: int, group: int) -> None:
        self.ring, self._residual, self._group = residual_length + group - 1, residual_length, group
        self.count, self._most, self._free = 0, most, list[int]()
        self.copies: list[tuple[int, int]] = []
        self._of_page: dict[int, Window] = {}  # in the order of their last use

    def advance(self, requests: Sequence[tuple[int | None, Sequence[int], int, int]]) -> list[Window]:
        """The windows of the requests of a pass, with their earlier tokens.

        Args:
            requests: of each, the page of its last earlier token, if there is one, the pages of its new tokens, at
                least one, and how many earlier and new tokens there are.

        Raises:
            CacheError: a request that ended in an open group is not known.
        """
        writer = {page: i for i, (_, pages, _, _) in enumerate(requests) for page in pages}
        found, taken = dict[int, Window](), dict[int, Window]()
        for i, (page, _, past, _) in enumerate(requests):  # all of them, before any ring is given away
            known = page in self._of_page and self._of_page[page].length == past and writer.get(page, i) == i
            if known and page is not None:
                found[i] = taken[page] = self._of_page.pop(page)
        windows = []
        for i, (page, pages, past, new) in enumerate(requests):
            self.release(pages)  # what another request had there is gone
            mine = found.get(i)
            if mine is None:
                same = taken.get(page) if page is not None else None
                if same is None and past % self._group:
                    raise CacheError("exact keys are lost: a request was moved to the host, or too many run at a time")
                mine = Window(self._new_slot(), past, past)
                if same is not None and same.length == past:  # of the same tokens
                    mine = replace(same, slot=mine.slot)
                    self.copies.append((same.slot, mine.slot))
            windows.append(mine)
            self._of_page[pages[-1]] = Window(mine.slot, mine.first, past + new)
        return windows

    def fork(self, page: int, copy: int) -> None:
        """Gives a request whose last page is a copy of another one's a copy of its ring, if it has one."""
        if (window := self._of_page.get(page)) is not None:
            self._of_page[copy] = replace(window, slot=self._new_slot())
            self.copies.append((window.slot, self._of_page[copy].slot))

    def release(self, pages: Sequence[int]) -> None:
        """Takes back the rings of requests whose last pages are among these."""
        self._free += [self._of_page.pop(page).slot for page in pages if page in self._of_page]

    def _new_slot(self) -> int:
        if not self._free:
            if self.count == self._most:
                return self._of_page.pop(next(iter(self._of_page))).slot
            self._free, self.count = [self.count], self.count + 1
        return self._free.pop()

    def closed(self, window: Window) -> int:
        """How many tokens of a request are read from codes, whole groups; the others up to `length` are in the ring."""
        return max(window.first, window.length - self._residual) // self._group * self._group
