"""What fits: filling a cache without the model, and the search for batches and contexts."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvcli.attention.session import attend_forms
from kvcli.bench import memory
from kvcli.bench.layer import Subject
from kvcli.bench.memory import MemoryConfig, MemoryRow, Probe, bench_memory
from kvcli.bench.model import cache_bytes, fill, opened, prefill, random_model, random_prompt, step
from kvcli.errors import UsageError
from kvcli.spec import ModelSpec

CPU = torch.device("cpu")
SMALL = {"group_size": 8, "residual_length": 8, "codebook_size": 8, "sink_length": 2}


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model("tiny", None, CPU, torch.float32, 0)


def make_config(model: Any, *names: str, **changes: Any) -> MemoryConfig:
    values = {
        "model": model,
        "subjects": [Subject.parse(name, SMALL) for name in ("fp16", *names)],
        "contexts": [256],
        "batches": None,
        "longest": False,
        "memory_budget": 2**20,
        "prefill_chunk": 64,
        "full_prefill": False,
        "impl": "auto",
        "seed": 0,
    }
    return MemoryConfig(**{**values, **changes})


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """A budget for caches alone, kept without a GPU; the (context, batch) probed."""
    probe, probed = memory._Bench.probe, []

    def within(self: Any, new_cache: Any, context: int, batch: int) -> Probe:
        probed.append((context, batch))
        found = probe(self, new_cache, context, batch)
        if found.cache_bytes > self.config.memory_budget:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return replace(found, peak_bytes=found.cache_bytes, reserved_bytes=found.cache_bytes)

    monkeypatch.setattr(memory._Bench, "probe", within)
    monkeypatch.setattr(memory, "need_gpu", lambda device: None)
    monkeypatch.setattr(memory, "memory_limit", lambda budget, device: nullcontext())
    monkeypatch.setattr(memory, "_CONTEXT_UNIT", 32)
    return probed


@pytest.mark.parametrize("name", ["fp16", "fp8", "kivi-2", "squat-2", "squat-pre-2", "qjl", "commvq-1"])
def test_a_filled_cache_is_as_large_as_a_computed_one(model: Any, name: str) -> None:
    ids = random_prompt(ModelSpec.from_config(model.config), 2, 101, CPU, 0)
    with opened(model, Subject.parse(name, SMALL), "auto", 0) as new_cache, torch.inference_mode():
        computed, filled = new_cache(), new_cache()
        prefill(model, computed, ids, 40)
        prefill(model, filled, ids[:, :20], 40)
        fill(model, filled, 2, 60, 40)
        logits = prefill(model, filled, ids[:, 80:], 40)
        token = step(model, filled, logits.argmax(-1))
        step(model, computed, token)
    assert logits.isfinite().all()
    assert cache_bytes(filled) == cache_bytes(computed)
    assert filled.get_seq_length() == computed.get_seq_length() == 102
    if not isinstance(filled, DynamicCache):
        assert filled.memory() == computed.memory()
        assert filled.memory().num_encoded > 150


@pytest.mark.parametrize("name", ["kivi-2", "squat-pre-2"])
def test_kernels_fill_a_cache_where_they_encode(model: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    used, forms = [], attend_forms
    monkeypatch.setattr("kvcli.bench.model.attend_forms", lambda method, impl: used.append(impl) or forms(method, impl))
    with opened(model, Subject.parse(name, SMALL), "auto", 0) as new_cache:
        caches = [new_cache(), new_cache()]
        for fused, cache in zip((False, True), caches, strict=True):
            for layer in cache.layers:
                layer.codec.use_kernels(fused)
            fill(model, cache, 1, 24, None)
    assert used == ["reference", "fused"]
    assert caches[0].memory() == caches[1].memory()


@pytest.mark.parametrize("name", ["fp16", "kivi-2", "commvq-1"])
def test_the_middle_is_computed_only_when_asked_for(model: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    seen: list[int] = []
    monkeypatch.setattr(
        memory,
        "prefill",
        lambda model, cache, ids, chunk: seen.append(ids.shape[1]) or prefill(model, cache, ids, chunk),
    )
    found = {}
    for full in (False, True):
        bench = memory._Bench(make_config(model, name, full_prefill=full))
        with opened(model, Subject.parse(name, SMALL), "auto", 0) as new_cache:
            found[full] = bench.probe(new_cache, 256, 2)
    assert seen == [32, 32, 256]
    assert found[False] == found[True]


def test_largest_batch_and_longest_context(model: Any, limited: list[tuple[int, int]]) -> None:
    config = make_config(model, "commvq-1", longest=True, contexts=[64], prefill_chunk=32, memory_budget=2**18)
    rows = list(bench_memory(config))
    assert [(row.method, row.question) for row in rows] == [
        (name, question) for name in ("fp16", "commvq-1") for question in ("largest batch", "longest context")
    ]
    token = 2 * 2 * 3 * 16 * 4  # bytes in float32
    assert rows[0].batch == 2**18 // (65 * token) == 5
    assert rows[0].cache_bytes == 5 * 65 * token
    assert rows[1].context == (2**18 // token - 1) // 32 * 32 == 320  # one token is the decode step's
    assert rows[0].batch < rows[2].batch
    assert rows[1].context < rows[3].context
    for row in rows:
        assert row.status == "ok"
        assert row.cache_bytes is not None
        assert row.cache_bytes <= 2**18
        assert (row.context, row.batch) in limited
    assert rows[2].cache_ratio == pytest.approx(rows[2].batch * 65 * token / 2 / rows[2].cache_bytes)


def test_given_sizes_fit_or_not(model: Any, limited: list[tuple[int, int]]) -> None:
    rows = list(bench_memory(make_config(model, "commvq-1", batches=[2, 3], memory_budget=2**19)))
    assert [(row.method, row.batch, row.status) for row in rows] == [
        ("fp16", 2, "ok"),
        ("fp16", 3, "out of memory"),
        ("commvq-1", 2, "ok"),
        ("commvq-1", 3, "ok"),
    ]
    assert limited == [(256, 2), (256, 3)] * 2
    assert rows[1].cache_bytes is None
    assert rows[0].weights_bytes == 4 * sum(x.numel() for x in model.parameters())


def test_nothing_fits(model: Any, limited: list[tuple[int, int]]) -> None:
    (row,) = bench_memory(make_config(model, memory_budget=1000))
    assert (row.batch, row.status) == (0, "out of memory")
    assert limited == [(256, 1)]


def test_a_mismatch_is_not_probed(model: Any, limited: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcli.bench.check import Agreement, ModelCheck

    checked = []

    def wrong(self: Any, subject: Subject, context: int, batch: int) -> Agreement | None:
        checked.append(subject.name)
        return None if subject.is_baseline else Agreement(0.5, 0.0, 5e-3)

    monkeypatch.setattr(ModelCheck, "agreement", wrong)
    rows: list[MemoryRow] = list(bench_memory(make_config(model, "kivi-2", batches=[1], longest=True)))
    assert [row.status for row in rows[2:]] == ["mismatch"] * 2
    assert rows[2].out_error == 0.5
    assert checked == ["fp16", "kivi-2"]  # once a method
    assert all(context for context, _ in limited)


def test_it_needs_a_gpu(model: Any) -> None:
    with pytest.raises(UsageError, match="needs a GPU"):
        list(bench_memory(make_config(model)))
