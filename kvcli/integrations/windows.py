"""Rings of the recent tokens of requests, which an engine names by the pages of their tokens alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcli.errors import CacheError


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

    A request is known by the page of its last token, which no other one writes to; if that page is full, a new request
    with the same tokens may get its ring, and it an empty one. An engine does not say when a request is finished: the
    ring that was not used for longest is given to a new one.

    Args:
        rings: at least as many as requests that run at a time.
        residual_length: recent tokens of each that are exact.
        group: tokens whose keys are encoded together; those of the last group are exact until it is whole.

    Attributes:
        ring: tokens of a ring, 0 if none are exact.
    """

    def __init__(self, rings: int, residual_length: int, group: int) -> None:
        self.ring, self._residual, self._group = residual_length + group - 1, residual_length, group
        self._free = list(range(rings))
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
        found = [
            None if page is None or writer.get(page, i) != i else self._take(page, past)
            for i, (page, _, past, _) in enumerate(requests)
        ]
        windows = []
        for window, (_, pages, past, new) in zip(found, requests, strict=True):
            for page in pages:  # what another request had there is gone
                if (gone := self._of_page.pop(page, None)) is not None:
                    self._free.append(gone.slot)
            if window is None:
                if past % self._group:
                    raise CacheError("the exact keys of a request are lost; allow fewer requests at a time")
                if not self._free:
                    self._free.append(self._of_page.pop(next(iter(self._of_page))).slot)
            mine = window or Window(self._free.pop(), past, past)
            windows.append(mine)
            self._of_page[pages[-1]] = Window(mine.slot, mine.first, past + new)
        return windows

    def _take(self, page: int, past: int) -> Window | None:
        window = self._of_page.get(page)
        return None if window is None or window.length != past else self._of_page.pop(page)

    def closed(self, window: Window) -> int:
        """How many tokens of a request are read from codes, whole groups; the others up to `length` are in the ring."""
        return max(window.first, window.length - self._residual) // self._group * self._group
