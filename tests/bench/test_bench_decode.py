"""Decoding as it is timed: the tokens of generate, steady steps, the fp16 step of fixed length, the ceiling."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benched import SMALL, bench_of, prompt, records, session_of
from passes import padded
from torch.nn import functional
from transformers import DynamicCache
from transformers.cache_utils import Cache

from kvcli.artifact.choice import MethodChoice
from kvcli.attention.generation import SamplingConfig
from kvcli.attention.session import Session
from kvcli.bench import fixed_length
from kvcli.bench import model as bench_model
from kvcli.bench.fixed_length import FIXED_LENGTH, FixedLengthLayer, replay_step, ways_of_modules, with_fixed_length
from kvcli.bench.model import ModelRun, cache_sizes, prefill_logits, random_model, run_model, step_weights_bytes
from kvcli.bench.model_bench import ModelBench, memory_figures, time_figures, with_ceiling, with_ratios
from kvcli.bench.suite import Row
from kvcli.seam.versions import with_cache

RUNS = [ModelRun(1.0, 1.1, seconds, 100, None, None) for seconds in (2.0, 4.0, 6.0)]
ON_GPU: Any = SimpleNamespace(device=torch.device("cuda"))


@pytest.mark.parametrize("mode", ["passes", "steps"])
@pytest.mark.parametrize("name", ["fp8", "kivi-2", "squat-pre-2"])
def test_what_is_timed_are_the_tokens_of_generate(model: Any, name: str, mode: Any, monkeypatch: Any) -> None:
    made: list[Any] = []
    generate = Session.generate
    monkeypatch.setattr(Session, "generate", lambda *x, **y: made.append(generate(*x, **y)) or made[-1])
    ids = prompt(model, 2, 40)
    with session_of(model, name) as session:
        run = run_model(model, session, ids, 41, None, mode=mode)
        expected = session.generate(ids, sampling=SamplingConfig(41), mode="passes")
    assert torch.equal(made[0].sequences, expected.sequences)
    assert (run.how, run.note) == (mode, None)
    assert 0 < run.steady[1] < run.decode_s
    assert run.used_bytes == cache_sizes(expected.cache)["used_bytes"] < run.cache_bytes
    # two rounds of 8 or of 2 tokens are left out; steps are looked at after every 8 tokens
    expected_tokens = {("kivi-2", "passes"): 24, ("kivi-2", "steps"): 24, ("fp8", "passes"): 36, ("fp8", "steps"): 32}
    assert run.steady[0] == expected_tokens.get((name, mode), run.steady[0])


@pytest.mark.parametrize(
    ("name", "expected"), [("kivi-2", 8), ("squat-2", 8), ("fp8", 2), ("qjl", 2), ("commvq-1", 2), ("squat-pre-2", 8)]
)
def test_rounds_are_the_longer_interval(name: str, expected: int) -> None:
    assert bench_model.round_tokens(MethodChoice(name).plus(SMALL)) == expected


@pytest.mark.parametrize(
    ("counts", "interval", "expected"),
    [
        ([1, 9, 17, 25, 33, 41], 8, (24, 2.4)),  # from 17 on
        ([1, 9, 17, 25, 33, 41], 16, (0, 0.0)),  # from 33 on there is no whole round
        ([1, 9, 17, 25, 33, 41, 49, 57], 16, (16, 1.6)),  # 33 to 49; 8 more are no round
        ([1, 9, 17, 25, 33, 41, 49, 57], 12, (32, 3.2)),  # ends between marks: the next ones, 25, 41, 57
        ([50, 58, 66, 74], 8, (8, 0.8)),
        ([1], 8, (0, 0.0)),
        ([], 8, (0, 0.0)),
    ],
)
def test_whole_rounds_after_two(counts: list[int], interval: int, expected: tuple[int, float]) -> None:
    assert bench_model.steady_span([(count, 5.0 + count / 10) for count in counts], interval) == pytest.approx(expected)


def test_tokens_around_a_capture_are_not_steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two passes, then steps of 1 s; the first look after each capture comes 100 s later."""
    cache: Any = SimpleNamespace(passes=SimpleNamespace(step=None))
    now = [0.0]
    monkeypatch.setattr(bench_model.time, "perf_counter", lambda: now[0])
    clock = bench_model.StepClock(cache, 8)

    def looks(times: int, count: int, seconds: float, step: object) -> None:
        cache.passes.step = step
        for _ in range(times):
            now[0] += seconds
            clock(torch.zeros(1, count))

    looks(40, 1, 0.5, None)
    looks(1, 8, 108.0, "first")
    looks(4, 8, 8.0, "first")
    assert clock.steady(True) == (24, 24.0)
    looks(1, 8, 108.0, "second")
    assert clock.steady(True) == (24, 24.0)
    looks(3, 8, 8.0, "second")
    assert clock.steady(True) == (40, 40.0)
    assert clock.first == 0.5
    assert clock.steady(False) == (16, 8.0)


def test_rates_are_of_steady_steps_and_totals_of_all() -> None:
    runs = [replace(run, steady=(4, 0.5), how="graphs", note="slow") for run in RUNS]
    row = Row("x", 10, 3, "fused", figures=memory_figures(runs))
    times, of_filled = (time_figures(runs, 3, 11, filled=filled) for filled in (False, True))
    (timed,) = records([row.plus(**times)])
    assert timed.tokens_per_s == pytest.approx((24.0, 24.0, 24.0))
    assert timed.total_tokens_per_s == pytest.approx(33 / 5.1)
    assert (timed.decode, timed.steady_tokens) == ("graphs", 4)
    (filled,) = records([with_ratios(row.plus(**of_filled), row.plus(**of_filled))])
    assert filled.tokens_per_s == timed.tokens_per_s
    assert filled.prefill_ms is filled.ttft_ms is filled.total_tokens_per_s is None
    assert filled.rate_ratio == 1
    assert filled.prefill_ratio is None
    (bounded,) = records([with_ceiling(row.plus(**times), 2 * 10**9, 1000.0)])  # what a step reads, at a copy's rate
    assert (bounded.read_bytes, bounded.copy_gb_s) == (2 * 10**9, 1000.0)
    assert bounded.ceiling_tokens_per_s == pytest.approx(1500.0)
    assert bounded.ceiling_share == pytest.approx(24 / 1500)


@torch.inference_mode()
def test_bytes_in_use_are_without_headroom(model: Any) -> None:
    with session_of(model, "kivi-2") as session:
        prefill_logits(model, cache := session.new_cache(), prompt(model, 2, 101), None)
    # a step reads no table of input embeddings, unless it is the output layer too (test_shapes_have_...)
    assert step_weights_bytes(model) == sum(x.nbytes for x in model.parameters()) - 97 * 64 * 4
    memory = cache.memory()
    assert cache_sizes(cache)["used_bytes"] == memory.cache_bytes - memory.position_bytes < memory.allocated_bytes


@torch.inference_mode()
def test_a_step_of_fixed_length_is_that_of_a_growing_cache(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    grown = DynamicCache(config=model.config)
    token = prefill_logits(model, grown, prompt(model, 2, 20), None).argmax(-1)
    room = torch.full((2, 2, 1, 16), float("nan"))
    layers = [FixedLengthLayer(torch.cat((x.keys, room), 2), torch.cat((x.values, room), 2)) for x in grown.layers]
    cache, fixed = Cache(layers=layers), token.clone()
    asked: list[tuple[Any, Any, int]] = []
    sdpa = functional.scaled_dot_product_attention

    def spy(query: Any, key: Any, value: Any, attn_mask: Any = None, **options: Any) -> Any:
        asked.append((attn_mask, options.get("is_causal"), key.shape[1:3]))
        return sdpa(query, key, value, attn_mask=attn_mask, **options)

    with monkeypatch.context() as patch:
        patch.setattr(functional, "scaled_dot_product_attention", spy)
        for _ in range(2):  # a second step overwrites what the first wrote
            fixed.copy_(token)
            fixed_length.fixed_length_step(model, cache, fixed, torch.full_like(token, 20))
            assert cache.get_seq_length() == 20
        assert asked == [(None, False, (2, 21))] * 6  # keys are not repeated per query head
        made = [(x.keys.clone(), x.values.clone()) for x in layers]
        # not even where transformers would make a mask, as it does during a capture
        padding = torch.ones(2, 21, dtype=torch.int64)
        padding[0, 0] = 0
        former = model.config._attn_implementation
        for context, masked in ((nullcontext(), True), (fixed_length.without_mask(model), False)):
            asked.clear()
            with context:
                model(input_ids=token, attention_mask=padding, **with_cache(cache))
            assert [mask is not None for mask, *_ in asked] == [masked] * 3
        assert model.config._attn_implementation == former
    assert torch.equal(fixed, prefill_logits(model, grown, token, None).argmax(-1))
    for (keys, values), ours, theirs in zip(made, layers, grown.layers, strict=True):
        assert torch.allclose(keys, theirs.keys, atol=1e-6)
        assert torch.allclose(values, theirs.values, atol=1e-6)
        assert ours.get_mask_sizes(1) == (21, 0)


def test_a_captured_step_is_replayed_as_often_as_tokens_are_made(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []

    def record(call: Any) -> Any:
        call()
        return SimpleNamespace(replay=lambda: called.append(1)), None

    monkeypatch.setattr(fixed_length, "record_graph", record)
    seconds, held, note = replay_step(model, 2, 20, 7, 3)
    assert (len(seconds), len(called), note) == (3, 21, None)
    assert held == 2 * 3 * 2 * 2 * 21 * 16 * 4
    monkeypatch.setattr(fixed_length, "record_graph", lambda call: (None, "no CUDA graph: no"))
    assert replay_step(model, 2, 20, 7, 3)[::2] == ([], "no CUDA graph: no")


def test_the_baseline_is_the_faster_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed_length, "ways_of_modules", lambda model: [(FIXED_LENGTH, nullcontext)])

    def runs_with(*replays: Any) -> list[ModelRun]:
        monkeypatch.setattr(fixed_length, "replay_step", lambda *_: (*replays,))
        return with_fixed_length(ON_GPU, RUNS, 2, 20, 11)

    assert runs_with([1.0, 1.5, 3.0], 77, None) == [
        replace(run, how=FIXED_LENGTH, decode_s=seconds, steady=(10, seconds), used_bytes=77)
        for run, seconds in zip(RUNS, (1.0, 1.5, 3.0), strict=True)
    ]
    assert runs_with([4.0, 4.5, 9.0], 77, None) == RUNS
    assert runs_with([], 77, "no CUDA graph: no") == [replace(run, note="no CUDA graph: no") for run in RUNS]
    assert with_fixed_length(ON_GPU, RUNS, 2, 20, 1) is RUNS
    monkeypatch.setattr(fixed_length, "attempt", lambda call: None)  # out of memory
    (note,) = {run.note for run in with_fixed_length(ON_GPU, RUNS, 2, 20, 11)}
    assert note == "a cache of fixed length does not fit beside the model"


@torch.inference_mode()
def test_the_baseline_may_run_the_kernels_that_methods_have(model: Any) -> None:
    """What stands in for modules computes the same step."""
    tokens = []
    for _, modules in ways_of_modules(model):
        cache = DynamicCache(config=model.config)
        model(padded(6, 6)["input_ids"], **with_cache(cache))
        with modules():
            tokens.append(model(torch.tensor([[5], [6]]), **with_cache(cache)).logits)
    assert len(tokens) == 2
    assert torch.allclose(*tokens, atol=1e-5)


def test_without_a_gpu_the_baseline_is_eager_and_methods_make_passes(model: Any) -> None:
    assert with_fixed_length(model, RUNS, 2, 20, 11) is RUNS
    row, kivi = records(bench_of(model, "kivi-2").generate([20], [1], new_tokens=3, repeats=1))
    assert (row.decode, row.steady_tokens, row.note) == ("eager", None, None)
    assert (kivi.decode, kivi.steady_tokens, kivi.note) == ("passes", None, None)
    assert row.read_bytes is row.copy_gb_s is row.ceiling_tokens_per_s is row.ceiling_share is None
    for prompt_only in records(bench_of(model, "kivi-2").generate([20], [1], new_tokens=0, repeats=1)):
        assert prompt_only.decode is prompt_only.tokens_per_s is prompt_only.total_tokens_per_s is None


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [None, "graphs", "steps", "passes"])
def test_rows_on_a_gpu(mode: Any) -> None:
    model = random_model("smollm2-135m", 2, torch.device("cuda"), torch.bfloat16, 0)
    settings = {"group_size": 32, "residual_length": 32}
    cases = [MethodChoice(name).plus(settings) for name in ("fp16", "kivi-2", "commvq-1")]
    bench = ModelBench(model, cases, impl="auto", seed=0, prefill_chunk=128, fill_middle=True, mode=mode)
    rows = records(bench.generate([1024], [2], new_tokens=129, repeats=2))
    assert [(row.status, row.note) for row in rows] == [("ok", None)] * 3
    assert rows[0].decode.startswith(FIXED_LENGTH)
    assert [row.decode for row in rows[1:]] == [mode or "graphs"] * 2
    assert (rows[0].steady_tokens, rows[1].steady_tokens) == (128, 64)
    for row in rows:
        assert 0 < row.ceiling_share < 1
        assert row.read_bytes > step_weights_bytes(model)


@pytest.mark.gpu
def test_a_step_of_fixed_length_is_captured() -> None:
    model = random_model("smollm2-135m", 2, torch.device("cuda"), torch.bfloat16, 0)
    seconds, cache_bytes, note = replay_step(model, 2, 512, 20, 3)
    assert (len(seconds), cache_bytes, note) == (3, 2 * 2 * 2 * 3 * 513 * 64 * 2, None)
