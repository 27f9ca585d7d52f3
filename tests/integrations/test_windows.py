"""Which ring is whose, when requests are known by their pages alone."""

from __future__ import annotations

import pytest

from kvcli.errors import CacheError
from kvcli.integrations.windows import Windows


def test_a_request_keeps_its_ring_from_page_to_page() -> None:
    windows = Windows(4, residual_length=8, group=1)
    (first,) = windows.advance([(None, [3, 5], 0, 20)])
    assert (first.first, first.length, windows.closed(first)) == (0, 0, 0)
    same, other = windows.advance([(5, [5], 20, 1), (None, [7], 0, 4)])
    assert (same.slot, same.first, windows.closed(same)) == (first.slot, 0, 12)
    assert other.slot != same.slot
    (same,) = windows.advance([(5, [9], 21, 1)])
    assert (same.slot, windows.closed(same)) == (first.slot, 13)


def test_a_request_that_begins_with_cached_pages_has_no_recent_tokens() -> None:
    windows = Windows(4, residual_length=8, group=4)
    windows.advance([(None, [3, 5], 0, 20)])
    (other,) = windows.advance([(3, [6], 16, 1)])
    assert (other.first, windows.closed(other), windows.ring) == (16, 16, 11)
    (other,) = windows.advance([(6, [6], 17, 9)])
    assert (other.first, windows.closed(other)) == (16, 16)
    (other,) = windows.advance([(6, [6], 26, 1)])
    assert windows.closed(other) == 16
    (other,) = windows.advance([(6, [6], 27, 1)])
    assert windows.closed(other) == 16  # whole groups
    (other,) = windows.advance([(6, [6], 28, 1)])
    assert windows.closed(other) == 20


def test_what_a_page_held_before_is_not_taken_for_what_it_holds() -> None:
    """Page 3 is full, freed, and written by another request in the same pass as a third one reads it, or before."""
    for together in (True, False):
        windows = Windows(4, residual_length=8, group=1)
        windows.advance([(None, [3], 0, 16)])
        writer, reader = (None, [3, 4], 0, 20), (3, [6], 16, 1)
        if together:
            _, found = windows.advance([writer, reader])
        else:
            windows.advance([writer])
            (found,) = windows.advance([reader])
        assert found.first == 16


def test_the_ring_that_was_not_used_for_longest_is_given_away() -> None:
    windows = Windows(3, residual_length=8, group=1)
    slots = [windows.advance([(None, [page], 0, 4)])[0].slot for page in (1, 2, 3)]
    windows.advance([(1, [1], 4, 1)])
    (new,) = windows.advance([(None, [4], 0, 4)])
    assert new.slot == slots[1]
    kept, lost = windows.advance([(1, [1], 5, 1), (2, [2], 4, 1)])
    assert (kept.slot, kept.first, lost.first) == (slots[0], 0, 4)


def test_requests_with_the_same_full_page_have_rings_of_the_same_tokens() -> None:
    """The copy takes the ring of the request that was not used for longest, and none of this pass."""
    windows = Windows(3, residual_length=8, group=1)
    (gone,) = windows.advance([(None, [1], 0, 4)])
    first, other = windows.advance([(None, [2], 0, 16), (None, [3], 0, 5)])
    same, twin, third = windows.advance([(2, [4], 16, 1), (2, [5], 16, 1), (3, [3], 5, 1)])
    assert (same.slot, twin.slot, third.slot) == (first.slot, gone.slot, other.slot)
    assert (twin.first, twin.length, windows.copies) == (0, 16, [(first.slot, gone.slot)])


def test_exact_keys_that_are_lost_are_refused() -> None:
    windows = Windows(1, residual_length=32, group=32)
    windows.advance([(None, [1], 0, 40)])
    windows.advance([(None, [2], 0, 40)])
    with pytest.raises(CacheError, match="too many run at a time"):
        windows.advance([(1, [1], 40, 1)])
