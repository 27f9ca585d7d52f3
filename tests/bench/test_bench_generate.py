"""The suite that runs a model end to end: random models, runs, ratios, the largest batch."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benched import CPU, bench_of, passes_of, prompt, records, session_of
from commvq_reordered import reordered_attend
from transformers import DynamicCache, LlamaForCausalLM

from kvcli.attention.reference import attend_codes as reference_attend
from kvcli.bench import layer, model_bench
from kvcli.bench.layer import shape_rope
from kvcli.bench.model import (
    ModelRun,
    cache_sizes,
    held_bytes,
    prefill_logits,
    random_model,
    run_model,
    step_weights_bytes,
)
from kvcli.bench.model_bench import memory_figures, time_figures, with_ratios
from kvcli.bench.suite import Row
from kvcli.models.shapes import shape_config
from kvcli.plan import budget as budget_module
from kvcli.plan.budget import largest_by_peak
from kvcli.registry import get_method
from kvcli.spec import ModelSpec

GIB = 2**30
TOKEN_BYTES = 2 * 3 * 2 * 16 * 4  # keys and values of 3 layers with 2 heads of 16 channels, in float32


@pytest.fixture
def any_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a budget be given without a GPU, and limits nothing."""
    monkeypatch.setattr(model_bench, "memory_limit", lambda budget, device: nullcontext())


def generate(
    model: Any, *names: str, contexts: Any = (40,), batches: Any = (2,), memory_budget: Any = None, **counts: int
) -> list[Any]:
    """Rows of fp16 and some methods."""
    counts = {"new_tokens": 4, "repeats": 2, **counts}
    return records(bench_of(model, *names, memory_budget=memory_budget).generate(contexts, batches, **counts))


def make_run(prefill_s: float, decode_s: float, cache: int = 100) -> ModelRun:
    return ModelRun(prefill_s, prefill_s + 0.001, decode_s, cache, 5 * cache, 6 * cache)


def make_row(runs: list[ModelRun], batch: int, new_tokens: int) -> Row:
    figures = {**memory_figures(runs), **time_figures(runs, batch, new_tokens)}
    return Row("x", 10, batch, "sdpa", figures=figures)


def test_random_models_have_all_weights(model: Any) -> None:
    real, again = LlamaForCausalLM(shape_config("tiny")), random_model("tiny", None, CPU, torch.float32, 0)
    ours, theirs = ({name: x.shape for name, x in each.state_dict().items()} for each in (model, real))
    assert ours == theirs
    assert torch.equal(model.model.rotary_emb.inv_freq, real.model.rotary_emb.inv_freq)
    assert all(0.015 < x.std() < 0.025 if x.ndim > 1 else x.eq(1).all() for x in model.parameters())
    assert all(map(torch.equal, model.parameters(), again.parameters()))
    shallow = random_model("tiny", 1, CPU, torch.bfloat16, 1)
    assert (len(shallow.model.layers), shallow.dtype) == (1, torch.bfloat16)


def test_shapes_have_the_angles_and_ties_of_the_real_models() -> None:
    tied = random_model("smollm2-135m", 1, CPU, torch.bfloat16, 0)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert step_weights_bytes(tied) == sum(x.nbytes for x in tied.parameters())
    import torchao.quantization as torchao

    part = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False)).bfloat16()
    torchao.quantize_(part, torchao.Int8WeightOnlyConfig())
    assert 64 * 64 < held_bytes(part[0].weight) < 1.1 * 64 * 64 < part[0].weight.nbytes
    angles = shape_rope("llama-3.1-8b", CPU).inv_freq
    assert angles[0] == 1.0
    assert angles[-1] == pytest.approx(500000.0 ** (-126 / 128) / 8)  # llama3 slows the slowest pairs eightfold


@torch.inference_mode()
def test_greedy_steps_are_those_of_generate(model: Any) -> None:
    ids, cache = prompt(model, 2, 20), DynamicCache(config=model.config)
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
    tokens = [prefill_logits(model, cache, ids, 14).argmax(-1)]
    for _ in range(4):
        tokens.append(prefill_logits(model, cache, tokens[-1], None).argmax(-1))
    assert torch.equal(torch.cat(tokens, dim=1), expected[:, 20:])
    assert cache_sizes(cache)["cache_bytes"] == 2 * 24 * TOKEN_BYTES


@pytest.mark.parametrize(
    ("chunk", "new_tokens", "lengths"),
    [
        (None, 0, [40]),
        (None, 1, [40]),
        (None, 3, [40, 1, 1]),
        (70, 2, [35, 5, 1]),  # 70 tokens of two sequences
        (1, 0, [16, 16, 8]),  # no chunk is shorter
        (100, 0, [40]),
    ],
)
def test_what_a_run_asks_of_the_model(model: Any, chunk: int | None, new_tokens: int, lengths: list[int]) -> None:
    with passes_of(model) as seen:
        run = run_model(model, None, prompt(model, 2, 40), new_tokens, chunk)
    assert seen == lengths
    assert 0 < run.prefill_s <= run.ttft_s
    assert run.cache_bytes == 2 * sum(lengths) * TOKEN_BYTES
    assert run.peak_bytes is None


def test_figures_of_known_runs() -> None:
    runs = [make_run(1.0, 3.0), make_run(1.2, 1.5), make_run(1.1, 2.0)]
    row, with_one, with_none = records(make_row(runs, batch=4, new_tokens=count) for count in (7, 1, 0))
    assert row.prefill_ms == pytest.approx((1040.0, 1100.0, 1160.0))
    assert row.ttft_ms == pytest.approx(1101.0)
    assert row.tokens_per_s == pytest.approx((9.6, 12.0, 14.4))
    assert row.total_tokens_per_s == pytest.approx(28 / (1.101 + 2.0))
    assert (row.cache_bytes, row.peak_bytes, row.reserved_bytes, row.repeats) == (100, 500, 600, 3)
    assert with_one.tokens_per_s is None
    assert with_one.total_tokens_per_s == pytest.approx(4 / (1.101 + 2.0))
    assert with_none.total_tokens_per_s is None


def test_ratios_are_per_sequence_where_batches_differ() -> None:
    baseline = make_row([make_run(1.0, 1.0, cache=300)], 2, 11)
    (row,) = records([with_ratios(make_row([make_run(3.0, 2.0, cache=400)], 8, 11), baseline)])
    assert row.rate_ratio == pytest.approx((8 / 2.0) / (2 / 1.0))
    assert row.total_ratio == pytest.approx((8 / 5.001) / (2 / 2.001))
    assert row.prefill_ratio == pytest.approx((3.0 / 8) / (1.0 / 2))
    assert row.cache_ratio == pytest.approx((300 / 2) / (400 / 8))


def test_every_method_is_compared_with_fp16(model: Any) -> None:
    rotary = model.model.rotary_emb
    names = ("fp8", "rtn-4", "kivi-2", "squat-2", "squat-pre-2", "qjl", "commvq-1")
    rows = [vars(row) for row in generate(model, *names, contexts=(40, 200))]
    assert [(row["prompt_tokens"], row["method"]) for row in rows] == [*product((40, 200), ("fp16", *names))]
    assert {row["impl"] for row in rows[1:8]} == {"reference"}
    for row in rows:
        assert (row["status"], row["repeats"]) == ("ok", 2)
        assert row["tokens_per_s"][0] <= row["tokens_per_s"][2]
        assert row["weights_bytes"] == 4 * sum(x.numel() for x in model.parameters())
    long = {row["method"]: row["cache_ratio"] for row in rows[8:]}
    assert long["commvq-1"] > long["kivi-2"] > long["fp16"] == 1
    assert model.model.rotary_emb is rotary


@pytest.mark.parametrize(("budget", "expected"), [(None, "4 4 4 free " * 2), (GIB, "4 free " * 6)])
def test_fp16_begins_on_a_warm_device_and_runs_with_warm_memory_unless_it_is_limited(
    model: Any, any_budget: None, monkeypatch: pytest.MonkeyPatch, budget: int | None, expected: str
) -> None:
    """Under a limit a run begins as the one did that fitted. Of each method, the first run is not counted."""
    events: list[str] = []

    def run(model: Any, session: Any, ids: Any, new_tokens: int, *rest: Any, **options: Any) -> ModelRun:
        events.append(str(new_tokens))
        return make_run(1.0, 1.0)

    monkeypatch.setattr(model_bench, "run_model", run)
    for module in (budget_module, model_bench):
        monkeypatch.setattr(module, "release_gpu_memory", lambda: events.append("free"))
    monkeypatch.setitem(model_bench._WARM_SECONDS, "cpu", 0.01)
    generate(model, "kivi-2", memory_budget=budget)
    prompts = events.count("0")
    assert prompts > 0
    assert "".join(f"{event} " for event in events) == "0 " * prompts + expected


@torch.inference_mode()
def test_codebooks_of_the_bench_are_random_and_seeded(model: Any) -> None:
    codes = []
    for seed in (0, 0, 1):
        with session_of(model, "commvq-1", seed=seed) as session:
            prefill_logits(model, cache := session.new_cache(), prompt(model, 1, 64), None)
            codes.append(cache.layers[0].store.key_codes.codes.packed)
    assert torch.equal(codes[0], codes[1])
    assert not torch.equal(codes[0], codes[2])


def test_a_method_with_wrong_kernels_is_not_run(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(*arguments: Any) -> Any:
        out, lse = reordered_attend(*arguments)
        return out, lse + 0.1

    fake = SimpleNamespace(impl="fake", attend_codes=attend)
    monkeypatch.setattr(layer, "choose_backend", lambda *_: fake)
    run = replace(make_run(1.0, 1.0), note="slow")
    monkeypatch.setattr(model_bench, "run_model", lambda *_, **options: run)
    fp16, commvq = generate(model, "commvq-2")
    assert [(row.status, row.impl) for row in (fp16, commvq)] == [("ok", "sdpa"), ("mismatch", "fake")]
    assert fp16.note == "slow"
    assert commvq.lse_error == pytest.approx(0.1, abs=1e-4)
    assert commvq.prefill_ms is commvq.tokens_per_s is commvq.rate_ratio is None


@pytest.mark.parametrize(("factor", "status"), [(1.0, "ok"), (1.001, "ok"), (1.1, "mismatch")])
def test_kernels_that_encode_worse_are_a_mismatch(model: Any, monkeypatch: Any, factor: float, status: str) -> None:
    codec = type(get_method("fp8").build(ModelSpec.from_config(model.config), None, 0).key)
    encode = codec.encode
    worse = {True: factor, False: 1.0}
    monkeypatch.setattr(codec, "encode", lambda self, x, state=None: encode(self, x * worse[self.fused], state))
    fused = SimpleNamespace(impl="fused", attend_codes=partial(reference_attend))
    monkeypatch.setattr(layer, "choose_backend", lambda *_: fused)
    _, row = generate(model, "fp8", repeats=1)
    assert row.status == status
    assert row.encoding_gap is not None
    assert (row.encoding_gap == 0) == (factor == 1)
    assert (row.prefill_ms is None) == (status != "ok")


def test_the_largest_batch_is_each_methods_own(model: Any, any_budget: None, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[bool, int]] = []

    def run(model: Any, session: Any, ids: torch.Tensor, *rest: Any, **options: Any) -> ModelRun:
        tried.append((session is None, len(ids)))
        peak = 16 * GIB + len(ids) * (GIB // (8 if session is None else 32))
        if peak > 24 * GIB:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return ModelRun(1.0, 1.0, 1.0, len(ids), peak, peak)

    monkeypatch.setattr(model_bench, "run_model", run)
    fp16, kivi = generate(model, "kivi-2", batches=None, memory_budget=24 * GIB, new_tokens=339)
    assert fp16.question == kivi.question == "largest batch"
    assert 62 <= fp16.batch <= 64
    assert 248 <= kivi.batch <= 256
    assert kivi.rate_ratio == pytest.approx(kivi.batch / fp16.batch)
    assert len(tried) < 24
    assert tried[-1] == (False, kivi.batch)


@pytest.mark.parametrize("limit", [0, 1, 2, 5, 8, 9, 10, 47, 300, 5000])
@pytest.mark.parametrize("bend", [0.8, 1.0, 1.2])
def test_a_search_by_peaks_needs_few_runs(limit: int, bend: float) -> None:
    """Peaks that grow faster or slower than a line through the first two mislead the guess, not the answer."""
    tried = []

    def peak(size: int) -> int | None:
        tried.append(size)
        return 1000 + int(1e6 * size**bend) if size <= limit else None

    size = largest_by_peak(peak, 1000 + int(1e6 * limit**bend))
    assert limit / (1 + 1 / 30) <= size <= limit
    assert len(tried) <= 16
