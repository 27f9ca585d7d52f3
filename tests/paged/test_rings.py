"""Which ring is whose, when requests are known by their pages alone."""

from collections.abc import Sequence

import pytest
import torch

from kvcli.errors import CacheError
from kvcli.paged.rings import ResidualRings

PAGE = 16
Request = tuple[int, Sequence[int], int, int]
"""The page of the last earlier token or -1, pages of new tokens, and how many earlier and new tokens there are."""


def windows_of(rings: int, residual_length: int = 8, group: int = 1) -> ResidualRings:
    return ResidualRings(rings, residual_length, group, torch.device("cpu"))


def advance(windows: ResidualRings, *requests: Request) -> list[tuple[int, int, int]]:
    """Ring, source and closed tokens of each request."""
    begun = [page for _, pages, past, _ in requests for page in pages[past % PAGE > 0 :]]
    earlier, pages, past, new = zip(*requests, strict=True)
    last = [x[-1] if x else -1 for x in pages]
    rings = windows.advance(*map(torch.tensor, (earlier, last, past, new)), torch.tensor(begun, dtype=torch.int64))
    return list(zip(*(x.tolist() for x in (rings.ring, rings.copy_from, rings.num_coded)), strict=True))


def test_a_request_keeps_its_ring_from_page_to_page() -> None:
    windows = windows_of(4)
    ((ring, source, closed),) = advance(windows, (-1, [3, 5], 0, 20))
    assert (source, closed) == (ring, 0)
    assert ring > 0
    same, other = advance(windows, (5, [5], 20, 1), (-1, [7], 0, 4))
    assert same == (ring, ring, 12)
    assert other[0] not in (0, ring)
    assert advance(windows, (5, [5], 21, 11)) == [(ring, ring, 13)]
    assert advance(windows, (5, [9], 32, 1)) == [(ring, ring, 24)]


def test_a_request_that_begins_with_cached_pages_has_no_recent_tokens() -> None:
    windows = windows_of(4, group=4)
    assert windows.length == 11
    advance(windows, (-1, [3, 5], 0, 20))
    for request, closed in (
        ((3, [6], 16, 1), 16),
        ((6, [6], 17, 9), 16),
        ((6, [6], 26, 1), 16),
        ((6, [6], 27, 1), 16),  # whole groups
        ((6, [6], 28, 1), 20),
    ):
        assert advance(windows, request)[0][2] == closed
    windows.check()


def test_a_request_that_goes_back_has_no_recent_tokens() -> None:
    """An engine may compute tokens a second time; what its ring holds is of later ones."""
    windows = windows_of(4)
    advance(windows, (-1, [1], 0, 14))
    assert advance(windows, (1, [1], 12, 1))[0][2] == 12


@pytest.mark.parametrize("group", [1, 16])
def test_a_request_goes_on_from_a_page_that_is_filled_in_the_same_pass(group: int) -> None:
    """With the ring of the one that fills it, wherever that came from, and as in the next pass."""
    ends = []
    for together in (True, False):
        windows = windows_of(4, residual_length=20, group=group)
        ((ring, _, _),) = advance(windows, (-1, [1, 3], 0, PAGE + 15))
        writer, reader = (3, [3], PAGE + 15, 1), (3, [6], 2 * PAGE, 1)
        if together:
            (_, source, closed) = advance(windows, reader, writer)[0]
        else:
            advance(windows, writer)
            ((_, source, closed),) = advance(windows, reader)
        assert source == ring
        ends.append((closed, advance(windows, (6, [6], 2 * PAGE + 1, 1))[0][2]))
    assert ends[0] == ends[1] == (12 // group * group, 13 // group * group)
    windows = windows_of(4)
    advance(windows, (-1, [3], 0, 15))
    assert advance(windows, (3, [3], 15, 1), (3, [], 16, 1))[1][1] == 0, "what is not stored has no ring"


def test_what_a_page_held_before_is_not_taken_for_what_it_holds() -> None:
    """Page 3 is full, freed, and written by another request in the same pass as a third one reads it, or before."""
    for together in (True, False):
        windows = windows_of(4)
        advance(windows, (-1, [3], 0, 16))
        writer, reader = (-1, [3, 4], 0, 20), (3, [6], 16, 1)
        if together:
            _, (_, _, closed) = advance(windows, writer, reader)
        else:
            advance(windows, writer)
            ((_, _, closed),) = advance(windows, reader)
        assert closed == 16


def test_the_ring_that_was_not_used_for_longest_is_given_away() -> None:
    windows = windows_of(3)
    rings = [advance(windows, (-1, [page], 0, 4))[0][0] for page in (1, 2, 3)]
    advance(windows, (1, [1], 4, 1))
    assert advance(windows, (-1, [4], 0, 4))[0][0] == rings[1]
    kept, lost = advance(windows, (1, [1], 5, 1), (2, [2], 4, 1))
    assert kept == (rings[0], rings[0], 0)
    assert lost[2] == 4


def test_requests_with_the_same_full_page_have_rings_of_the_same_tokens() -> None:
    """The copy takes the ring of the request that was not used for longest, and none of this pass."""
    windows = windows_of(3)
    ((gone, _, _),) = advance(windows, (-1, [1], 0, 4))
    (first, _, _), (other, _, _) = advance(windows, (-1, [2], 0, 16), (-1, [3], 0, 5))
    found = advance(windows, (2, [4], 16, 1), (2, [5], 16, 1), (3, [3], 5, 1))
    assert found == [(first, first, 8), (gone, first, 8), (other, other, 0)]
    assert advance(windows, (5, [5], 17, 1), (4, [4], 17, 1)) == [(gone, gone, 9), (first, first, 9)]


def test_what_is_not_stored_has_no_ring() -> None:
    """It may have any pages, those of others as well, which keep their rings."""
    windows = windows_of(2)
    ((ring, _, _),) = advance(windows, (-1, [1], 0, 4))
    assert advance(windows, (1, [], 4, 1), (-1, [], 0, 1)) == [(0, 0, 4), (0, 0, 0)]
    assert advance(windows, (1, [1], 4, 1)) == [(ring, ring, 0)]


def test_exact_keys_that_are_lost_are_refused() -> None:
    windows = windows_of(1, residual_length=32, group=32)
    advance(windows, (-1, [1], 0, 40))
    advance(windows, (-1, [2], 0, 40))
    windows.check()
    advance(windows, (1, [1], 40, 1))
    with pytest.raises(CacheError, match="too many run at a time"):
        windows.check()
