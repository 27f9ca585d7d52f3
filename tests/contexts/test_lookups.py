"""Look-ups among many long contexts: what is found, and in how many milliseconds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from lookups import LENGTH, SHARED, filled, measure

from kvcli.contexts.search import prefix_digests


def test_checksums_of_first_tokens_are_those_of_each_prefix_alone() -> None:
    ids = np.arange(300, dtype=np.int32)
    digests = {length: blake3(ids[:length].tobytes()).digest(8) for length in (0, 1, 16, 17, 256, 300)}
    expected = {length: int.from_bytes(digest, "little", signed=True) for length, digest in digests.items()}
    assert prefix_digests(ids, [300, 17, 16, 256, 1, 0, 17]) == expected


@pytest.mark.parametrize(("count", "limit_ms"), [(200, 100.0), pytest.param(10_000, 30.0, marks=pytest.mark.slow)])
def test_a_look_up_takes_milliseconds(tmp_path: Path, count: int, limit_ms: float) -> None:
    """At most 10 ms on a quiet machine (`tests/contexts/lookups.py`), also where all contexts begin alike."""
    store = filled(tmp_path / "store", count, block_tokens=256)
    measured = measure(store, count, repeats=5)
    assert [tokens for tokens, _ in measured.values()] == [LENGTH, 4 + 78 * 256, SHARED, 0]
    assert max(took for _, took in measured.values()) < limit_ms
