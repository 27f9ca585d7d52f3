"""Look-ups among many long contexts: their results, and how much SQLite works for them."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from kvcli.contexts.index import Index
from kvcli.contexts.search import prefix_digests
from research.lookups import LENGTH, SHARED, filled, measure


def test_checksums_of_first_tokens_are_those_of_each_prefix_alone() -> None:
    ids = np.arange(300, dtype=np.int32)
    digests = {length: blake3(ids[:length].tobytes()).digest(8) for length in (0, 1, 16, 17, 256, 300)}
    expected = {length: int.from_bytes(digest, "little", signed=True) for length, digest in digests.items()}
    assert prefix_digests(ids, [300, 17, 16, 256, 1, 0, 17]) == expected


def test_a_look_up_does_not_read_all_contexts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instructions of SQLite's virtual machine, in hundreds: as many among 200 contexts as among 25.

    `python -m research.lookups` measures the times.
    """
    executed = [0]

    def count() -> int:
        executed[0] += 1
        return 0

    @contextmanager
    def counted(index: Index) -> Iterator[sqlite3.Connection]:
        with reading(index) as db:
            db.set_progress_handler(count, 100)
            yield db

    reading = Index.reading
    monkeypatch.setattr(Index, "reading", counted)
    work = []
    for num_contexts in (25, 200):
        store = filled(tmp_path / str(num_contexts), num_contexts)
        executed[0] = 0
        tokens = [tokens for tokens, _ in measure(store, num_contexts, repeats=1).values()]
        assert tokens == [LENGTH, 4 + 78 * 256, SHARED, 0]
        work.append(executed[0])
    assert 0 < work[1] < 1.5 * work[0]
