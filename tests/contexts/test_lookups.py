"""Look-ups among many long contexts: what is found, and in how many milliseconds."""

from __future__ import annotations

from pathlib import Path

import pytest
from lookups import LENGTH, SHARED, filled, measure


@pytest.mark.parametrize(("count", "limit_ms"), [(200, 100.0), pytest.param(10_000, 30.0, marks=pytest.mark.slow)])
def test_a_look_up_takes_milliseconds(tmp_path: Path, count: int, limit_ms: float) -> None:
    """At most 10 ms on a quiet machine (`tests/contexts/lookups.py`), also where all contexts begin alike."""
    store = filled(tmp_path / "store", count, block_tokens=256)
    measured = measure(store, count, repeats=5)
    assert [tokens for tokens, _ in measured.values()] == [LENGTH, 4 + 78 * 256, SHARED, 0]
    assert max(took for _, took in measured.values()) < limit_ms
