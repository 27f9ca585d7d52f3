"""`pytest -m fast` stays a loop to work in: about a minute on 2 cores."""

import pytest

MAX_CASES = 800
WHOLE_SUITE = 4000
"""Fewer cases are a part of the suite, which says nothing."""


def test_fast_tests_are_few(request: pytest.FixtureRequest) -> None:
    items = request.session.items
    if len(items) < WHOLE_SUITE:
        pytest.skip("counts the cases of the whole suite")
    cases = sum(item.get_closest_marker("fast") is not None for item in items)
    assert 300 < cases <= MAX_CASES, "take files out of tests/support/fast.py"
