"""What fits: filling a cache without the model, and the search for batches and contexts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from benched import CPU, bench_of, passes_of, prompt, records, session_of
from families import make
from transformers import DynamicCache

from kvcli.artifact.choice import MethodChoice
from kvcli.bench import model_bench
from kvcli.bench.layer import Agreement, KernelCheck
from kvcli.bench.model import ModelRun, cache_sizes, fill, prefill_logits, random_model, run_model


@pytest.fixture(scope="module")
def shallow_model() -> Any:
    return random_model("tiny", 1, CPU, torch.float32, 0)


def memory(model: Any, *names: str, batches: Any = None, longest: bool = False, **changes: Any) -> list[Any]:
    """Rows of fp16 and some methods."""
    options = {"context": 256, "memory_budget": 2**20, "prefill_chunk": 64, "fill_middle": True, **changes}
    context = options.pop("context")
    return records(bench_of(model, *names, **options).memory([context], batches, longest=longest))


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """A budget for caches alone, kept without a GPU; the (context, batch) of all runs."""
    tried: list[tuple[int, int]] = []
    budgets: list[int | None] = []

    @contextmanager
    def limit(budget: int | None, device: Any) -> Iterator[None]:
        budgets.append(budget)
        yield

    def run_within_budget(model: Any, session: Any, ids: torch.Tensor, *rest: Any, **options: Any) -> ModelRun:
        batch, context = ids.shape
        assert options["fill_middle"] == (model.config.model_type == "llama")  # unless the whole prompt is asked for
        tried.append((context, batch))
        run = run_model(model, session, ids, *rest, **options)
        if run.cache_bytes > (budgets[-1] or 0):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return replace(run, peak_bytes=run.cache_bytes, reserved_bytes=run.cache_bytes)

    monkeypatch.setattr(model_bench, "run_model", run_within_budget)
    monkeypatch.setattr(model_bench, "memory_limit", limit)
    monkeypatch.setattr(model_bench, "_CONTEXT_UNIT", 32)
    return tried


@torch.inference_mode()
@pytest.mark.parametrize("name", ["fp16", "fp8", "kivi-2", "squat-2", "squat-pre-2", "qjl", "commvq-1"])
def test_a_filled_cache_is_as_large_as_a_computed_one(model: Any, name: str) -> None:
    ids = prompt(model, 2, 101)
    with session_of(model, name) as session:
        computed, filled = (session.new_cache() if session else DynamicCache(config=model.config) for _ in range(2))
        prefill_logits(model, computed, ids, 40)
        prefill_logits(model, filled, ids[:, :20], 40)
        fill(model, filled, session, 2, 60, 40)
        logits = prefill_logits(model, filled, ids[:, 80:], 40)
        for cache in (filled, computed):
            prefill_logits(model, cache, logits.argmax(-1), None)
    assert logits.isfinite().all()
    assert cache_sizes(filled) == cache_sizes(computed)
    assert filled.get_seq_length() == computed.get_seq_length() == 102
    if session:
        assert filled.memory() == computed.memory()
        assert filled.memory().num_encoded > 150


@torch.inference_mode()
@pytest.mark.parametrize("name", ["kivi-2", "squat-pre-2"])
def test_kernels_fill_a_cache_where_they_encode(shallow_model: Any, name: str) -> None:
    memories = []
    for impl in ("reference", "fused"):
        with session_of(shallow_model, name, impl, group_size=16, residual_length=16, subspace_dim=2) as session:
            assert session.backend.impl == impl
            fill(shallow_model, cache := session.new_cache(), session, 1, 24, None)
            memories.append(cache.memory())
    assert memories[0] == memories[1]


@pytest.mark.parametrize("name", ["fp16", "kivi-2", "commvq-1"])
def test_the_middle_is_computed_only_when_asked_for(model: Any, name: str) -> None:
    ids = prompt(model, 2, 256)
    with session_of(model, name) as session, passes_of(model) as seen:
        filled, computed = (run_model(model, session, ids, 2, 64, fill_middle=fill) for fill in (True, False))
    assert seen == [32, 32, 1, *[32] * 8, 1]
    assert filled.cache_bytes == computed.cache_bytes


def test_largest_batch_and_longest_context(shallow_model: Any, limited: list[tuple[int, int]]) -> None:
    budget = 2**18 // 3
    rows = memory(shallow_model, "commvq-1", longest=True, context=64, prefill_chunk=32, memory_budget=budget)
    order = [*product(("fp16", "commvq-1"), ("largest batch", "longest context"))]
    assert [(row.method, row.question) for row in rows] == order
    token = 2 * 2 * 16 * 4  # bytes in float32
    assert rows[0].batch == budget // (65 * token) == 5
    assert rows[0].cache_bytes == 5 * 65 * token
    assert rows[1].context == (budget // token - 1) // 32 * 32 == 320  # one token is the decode step's
    assert rows[0].batch < rows[2].batch
    assert rows[1].context < rows[3].context
    for row in rows:
        assert row.status == "ok"
        assert row.cache_bytes <= budget
        assert (row.context, row.batch) in limited
    assert rows[2].cache_ratio == pytest.approx(rows[2].batch * 65 * token / 2 / rows[2].cache_bytes)


def test_given_sizes_fit_or_not(model: Any, limited: list[tuple[int, int]]) -> None:
    rows = memory(model, "commvq-1", batches=[2, 3], memory_budget=2**19)
    assert [(row.method, row.batch) for row in rows] == [("fp16", 2), ("fp16", 3), ("commvq-1", 2), ("commvq-1", 3)]
    assert [row.status for row in rows] == ["ok", "out of memory", "ok", "ok"]
    assert limited == [(256, 2), (256, 3)] * 2
    assert rows[1].cache_bytes is None
    assert rows[0].weights_bytes == 4 * sum(x.numel() for x in model.parameters())
    assert rows[0].prefill_ms is rows[0].tokens_per_s is None


def test_nothing_fits(model: Any, limited: list[tuple[int, int]]) -> None:
    (row,) = memory(model, memory_budget=1000)
    assert (row.batch, row.status) == (0, "out of memory")
    assert limited == [(256, 1)]


def test_a_method_with_wrong_kernels_is_not_run(model: Any, limited: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []

    def wrong(self: Any, case: MethodChoice, context: int, batch: int) -> Agreement | None:
        checked.append(case.label)
        return None if case.is_baseline else Agreement(0.5, 0.0, 5e-3)

    monkeypatch.setattr(KernelCheck, "_compare", wrong)
    rows = memory(model, "kivi-2", batches=[1], longest=True)
    assert [(row.status, row.out_error) for row in rows[2:]] == [("mismatch", 0.5)] * 2
    assert checked == ["fp16", "kivi-2"]  # once per method
    assert all(context for context, _ in limited)


def test_the_ratio_of_a_hybrid_counts_the_caches_of_all_layers(limited: list[tuple[int, int]]) -> None:
    for row in memory(make("gemma3_text"), "kivi-2", context=40, batches=[1], prefill_chunk=16, fill_middle=False):
        assert row.status == "ok"
        # 2 layers with 41 tokens in 16 bits, 2 with 7 in float32; 2 heads of 16 channels
        uncompressed = 2 * 41 * 2 * 2 * 16 * 2 + 2 * 7 * 2 * 2 * 16 * 4
        assert row.cache_ratio == uncompressed / row.cache_bytes


def test_kernels_are_checked_on_a_context_that_has_codes(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[tuple[int, int]] = []
    monkeypatch.setattr(KernelCheck, "_compare", lambda self, case, *shape: checked.append(shape))
    check, case = KernelCheck(model, [], "auto", 0), MethodChoice("kivi-2")
    for context in (20, 300, 20):
        check.agreement(case, context, 2)
    assert checked == [(256, 2), (300, 2)]
