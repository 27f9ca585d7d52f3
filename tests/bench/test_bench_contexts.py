"""The suite that loads contexts from files: what is timed, what is checked, which rows have figures."""

import errno
import json
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcli.attention.session import Session
from kvcli.bench.contexts import SUITE, ContextsOptions, break_even, percentiles_ms, prepare
from kvcli.bench.serve import ServeBenchOptions, _bodies
from kvcli.cache.compressed import CompressedCache
from kvcli.cache.context import Context
from kvcli.cli.app import app
from kvcli.cli.output import Output


def rows(folder: Path, *names: str, context: int = 20, repeats: int = 1) -> list[Any]:
    """Rows of fp16 and some methods with groups of 8, on the tiny model."""
    known = {"kivi-2": ["group_size=8", "residual_length=8"], "commvq-1": ["codebook_size=8"]}
    settings = ["sink_length=0", *(text for name in names for text in known[name])]
    options = {"method": [*names], "setting": settings, "prompt_tokens": [context], "repeats": repeats, "device": "cpu"}
    chosen = ContextsOptions(random_weights="tiny", prefill_chunk=32, context_folder=folder, **options)
    return [SimpleNamespace(**SUITE.record(row)) for row in prepare(chosen, Output(quiet=True)).rows]


def test_files_are_measured_and_removed(tmp_path: Path) -> None:
    made = rows(tmp_path, "kivi-2", "commvq-1", context=72)
    assert [row.method for row in made] == ["fp16", "kivi-2", "commvq-1"]
    assert not [*tmp_path.iterdir()]
    values = 72 * 2 * 3 * 32  # tokens, keys and values, layers, channels of two heads
    for row in made:
        assert (row.status, row.batch, row.logits_error) == ("ok", 1, 0)
        assert row.file_bits == pytest.approx(8 * row.file_bytes / values)
        assert row.file_ratio == pytest.approx(2 * values / row.file_bytes)
        assert row.write_ms
        assert 0 < row.load_ms[1] < row.load_token_ms[1]
        assert row.speedup == pytest.approx(row.prefill_token_ms[1] / row.load_token_ms[1])
    assert made[0].file_bits > 32  # the model is in float32
    assert made[1].file_bytes < made[0].file_bytes


def test_each_run_reads_the_file_of_the_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, saved, load, save = [], [], Session.load_cache, CompressedCache.save

    def load_cache(self: Session, source: Any) -> CompressedCache:
        context = Context.load(source)
        lengths.append((context.snapshot.num_tokens, context.input_ids.shape[1]))
        return load(self, source)

    def save_new(self: CompressedCache, path: Path, input_ids: Any = None) -> None:
        saved.append(path.exists())
        save(self, path, input_ids)

    monkeypatch.setattr(Session, "load_cache", load_cache)
    monkeypatch.setattr(CompressedCache, "save", save_new)
    assert [(row.status, row.repeats) for row in rows(tmp_path, "kivi-2", repeats=2)] == [("ok", 2)] * 2
    assert lengths == [(20, 20)] * 8  # of each row: the check, a run that is not counted, two that are
    assert saved == [False] * 6


def test_the_first_run_is_left_out() -> None:
    runs = iter([(100.0, 200.0), (1.0, 4.0), (3.0, 6.0), (2.0, 5.0)])
    first, second = percentiles_ms(lambda: next(runs), 3)
    assert first == pytest.approx((1400, 2000, 2600))
    assert second[1] == pytest.approx(5000)


def test_another_cache_than_was_saved_has_no_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    restore = CompressedCache.restore

    def without_values(self: CompressedCache, snapshot: Any, release: bool = False) -> None:
        restore(self, snapshot, release)
        for layer in self.layers:
            layer.store.values.zero_()

    monkeypatch.setattr(CompressedCache, "restore", without_values)
    _, row = rows(tmp_path, "kivi-2")
    assert (row.status, row.speedup, row.file_bytes) == ("mismatch", None, None)
    assert "logits after loading differ" in row.note


def test_a_full_disk_is_the_failure_of_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = CompressedCache.save

    def full(self: CompressedCache, path: Path, input_ids: Any = None) -> None:
        if self.method.name == "fp16":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        save(self, path, input_ids)

    monkeypatch.setattr(CompressedCache, "save", full)
    failed, fine = rows(tmp_path, "kivi-2")
    assert (failed.status, fine.status) == ("failed", "ok")
    assert "No space left" in failed.note
    assert not [*tmp_path.iterdir()]


def test_break_even_is_where_loading_stays_faster() -> None:
    speedups = {
        **{("a", 32): 2.0, ("a", 8): 1.5, ("a", 16): 0.9, ("a", 24): 1.1},
        **{("b", 8): 3.0, ("b", 16): 0.5, ("c", 8): None, ("c", 16): 1.2, ("d", 8): None},
    }
    records = [{"method": name, "context": tokens, "speedup": speedup} for (name, tokens), speedup in speedups.items()]
    assert break_even(records) == {"a": 24, "b": None, "c": 16, "d": None}


def test_prompts_are_found_in_memory_and_on_disk(tmp_path: Path) -> None:
    shape = ("--random-weights", "tiny", "--layers", "1", "--device", "cpu", "--prompt-tokens", "300")
    small = ("--method", "kivi-2", "--setting", "group_size=8", "--setting", "residual_length=8", "--new-tokens", "3")
    done = CliRunner().invoke(
        app,
        ["bench", "serve", *shape, *small, "--clients", "1", "--clients", "3", "--json", "--out", str(tmp_path / "x")],
    )
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout.splitlines()[0])["rows"]
    assert [(row["batch"], row["method"]) for row in rows] == [*product((1, 3), ("fp16", "kivi-2"))]
    for row in rows:
        assert row["status"] == "ok", row["note"]
        assert row["hot_cached"] == row["disk_cached"] > 0.8
        assert min(row[f"{state}_{x}"] for state in ("cold", "hot", "disk") for x in ("first_s", "tokens_per_s")) > 0
        assert (row["direct_first_s"] is None) == (row["batch"] > 1)
        assert (row["busy_first_s"] is None) == (row["batch"] == 1)


def test_requests_of_many_clients_are_sampled_as_the_api_allows() -> None:
    sent = [json.loads(body) for body in _bodies([[1]] * 100, ServeBenchOptions())]
    assert [x["temperature"] for x in sent[:2]] == [0, 1 / 16]
    assert max(x["temperature"] for x in sent) <= 2
    assert len({x["seed"] for x in sent}) == 100
