"""Which pages of a `PagedModel` are whose: beginnings of prompts are shared, and kept while there is room."""

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

LONG_PASS = 4
"""Pages of tokens that a pass reads of a prompt, but for its end, of which a pass reads one page."""


def pass_ends(length: int, page_size: int) -> list[int]:
    """Where passes over so many tokens end: long ones, then those of a page, up to the last whole page.

    They depend on the length alone, so that what is read of a prompt does not depend on what was kept.
    """
    long = LONG_PASS * page_size
    ends = [*range(long, length + 1, long)]
    return [*ends, *range((ends[-1] if ends else 0) + page_size, length + 1, page_size)]


def segments(prompt: Sequence[int], page_size: int, unread: int, owner: str) -> list[tuple[int, bytes]]:
    """Where the passes over a prompt end but for the last one, and a digest of all tokens up to there.

    Args:
        unread: tokens that the last pass reads at least.
        owner: whose the prompt is, in every digest.
    """
    found, digest = list[tuple[int, bytes]](), hashlib.sha256(owner.encode())
    ends = pass_ends(len(prompt) - unread, page_size)
    for start, end in zip([0, *ends], ends, strict=False):
        digest.update(array("q", prompt[start:end]).tobytes())
        found.append((end, digest.digest()))
    return found


class PagePool:
    """The pages of all requests, from 0 on; a segment of a prompt is known by its digest, as `segments` gives them."""

    def __init__(self, num_pages: int) -> None:
        self._num_pages, self._free = num_pages, [*range(num_pages)]
        self._pages, self._users = dict[bytes, list[int]](), Counter[bytes]()
        self.on_disk = dict[bytes, str]()  # of segments that are on disk, too, the name of a context that has them
        self._idle = OrderedDict[bytes, None]()  # those that are evicted first come first

    @property
    def num_available(self) -> int:
        """Pages that `take` can give."""
        return len(self._free) + sum(len(self._pages[x]) for x in self._idle)

    @property
    def num_used(self) -> int:
        """Pages of requests, and of segments that are kept."""
        return self._num_pages - len(self._free)

    def take(self, count: int) -> list[int]:
        """Pages of nobody, after the least recently used segments were forgotten if they are needed."""
        while len(self._free) < count:
            digest, _ = self._idle.popitem(last=False)
            self._free += self._pages.pop(digest)
            self.on_disk.pop(digest, None)
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def share(self, digest: bytes) -> list[int] | None:
        """The pages of a segment, for one more request; None: it is not known."""
        if (pages := self._pages.get(digest)) is not None:
            self._idle.pop(digest, None)
            self._users[digest] += 1
        return pages

    def keep(self, digest: bytes, pages: list[int]) -> None:
        """Makes pages that a request has read a segment, which it uses."""
        self._pages[digest] = pages
        self._users[digest] += 1

    def forget_disk(self, name: str) -> None:
        """Notes that a context is not on disk any more; other threads may, too."""
        for digest in [digest for digest, of in [*self.on_disk.items()] if of == name]:
            self.on_disk.pop(digest, None)

    def release(self, digests: Sequence[bytes], pages: Iterable[int]) -> None:
        """Takes back the segments of a request, first ones first, and the pages that are its alone."""
        self._free += pages
        for digest in reversed(digests):  # the last ones are of no use without those before them
            self._users[digest] -= 1
            if not self._users[digest]:
                del self._users[digest]
                self._idle[digest] = None
