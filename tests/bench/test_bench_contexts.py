"""The suite that loads contexts from files: what is timed, what is checked, which rows have figures."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcli.attention.session import Session
from kvcli.bench.context_bench import ContextBench, ContextRow, _percentiles_ms
from kvcli.bench.contexts import break_even
from kvcli.bench.layer import MethodCase
from kvcli.bench.model import random_model
from kvcli.cache.compressed import CompressedCache
from kvcli.cache.context import Context

SMALL = {"group_size": 8, "residual_length": 8, "codebook_size": 8, "sink_length": 0}


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model("tiny", None, torch.device("cpu"), torch.float32, 0)


def rows(model: Any, folder: Path, *names: str, context: int = 72, repeats: int = 1) -> list[ContextRow]:
    cases = [MethodCase.parse(name, SMALL) for name in names]
    bench = ContextBench(model, cases, impl="auto", seed=0, prefill_chunk=32, folder=folder)
    return list(bench.rows([context], repeats))


def test_files_are_measured_and_removed(model: Any, tmp_path: Path) -> None:
    made = rows(model, tmp_path, "fp16", "kivi-2", "commvq-1")
    assert [(row.method, row.status, row.batch) for row in made] == [
        ("fp16", "ok", 1),
        ("kivi-2", "ok", 1),
        ("commvq-1", "ok", 1),
    ]
    assert not [*tmp_path.iterdir()]
    values = 72 * 2 * 3 * 32  # tokens, keys and values, layers, channels of two heads
    for row in made:
        assert row.logits_error == 0
        assert row.file_bytes
        assert row.file_bits == pytest.approx(8 * row.file_bytes / values)
        assert row.file_ratio == pytest.approx(2 * values / row.file_bytes)
        assert row.prefill_token_ms
        assert row.load_token_ms
        assert row.load_ms
        assert row.write_ms
        assert 0 < row.load_ms[1] < row.load_token_ms[1]
        assert row.speedup == pytest.approx(row.prefill_token_ms[1] / row.load_token_ms[1])
    assert (made[0].file_bits or 0) > 32  # the model is in float32
    assert (made[1].file_bytes or 0) < (made[0].file_bytes or 0)


def test_each_run_reads_the_file_of_the_context(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, saved, load, save = [], [], Session.load_cache, CompressedCache.save

    def load_cache(self: Session, source: Any) -> CompressedCache:
        context = Context.load(source)
        assert context.input_ids is not None
        lengths.append((context.snapshot.num_tokens, context.input_ids.shape[1]))
        return load(self, source)

    def save_new(self: CompressedCache, path: Path, input_ids: Any = None) -> None:
        saved.append(path.exists())
        save(self, path, input_ids)

    monkeypatch.setattr(Session, "load_cache", load_cache)
    monkeypatch.setattr(CompressedCache, "save", save_new)
    (row,) = rows(model, tmp_path, "kivi-2", context=20, repeats=2)
    assert (row.status, row.repeats) == ("ok", 2)
    assert lengths == [(20, 20)] * 4  # the check, a run that is not counted, two that are
    assert saved == [False] * 3


def test_the_first_run_is_left_out() -> None:
    runs = iter([(100.0, 200.0), (1.0, 4.0), (3.0, 6.0), (2.0, 5.0)])
    first, second = _percentiles_ms(lambda: next(runs), 3)
    assert first == pytest.approx((1400, 2000, 2600))
    assert second[1] == pytest.approx(5000)


def test_another_cache_than_was_saved_has_no_figures(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restore = CompressedCache.restore

    def without_values(self: CompressedCache, snapshot: Any) -> None:
        restore(self, snapshot)
        for layer in self.layers:
            assert layer.store is not None
            layer.store.values.zero_()

    monkeypatch.setattr(CompressedCache, "restore", without_values)
    (row,) = rows(model, tmp_path, "kivi-2", context=20)
    assert (row.status, row.speedup, row.file_bytes) == ("mismatch", None, None)
    assert row.note is not None
    assert "logits after loading differ" in row.note


def test_a_full_disk_is_the_failure_of_a_row(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = CompressedCache.save

    def full(self: CompressedCache, path: Path, input_ids: Any = None) -> None:
        if self.method.name == "fp16":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        save(self, path, input_ids)

    monkeypatch.setattr(CompressedCache, "save", full)
    failed, fine = rows(model, tmp_path, "fp16", "kivi-2", context=20)
    assert (failed.status, fine.status) == ("failed", "ok")
    assert failed.note is not None
    assert "No space left" in failed.note
    assert not [*tmp_path.iterdir()]


def test_break_even_is_where_loading_stays_faster() -> None:
    def record(method: str, context: int, speedup: float | None) -> dict[str, Any]:
        return {"method": method, "context": context, "speedup": speedup}

    records = [
        record("a", 32, 2.0),
        record("a", 8, 1.5),
        record("a", 16, 0.9),
        record("a", 24, 1.1),
        record("b", 8, 3.0),
        record("b", 16, 0.5),
        record("c", 8, None),
        record("c", 16, 1.2),
        record("d", 8, None),
    ]
    assert break_even(records) == {"a": 24, "b": None, "c": 16, "d": None}
