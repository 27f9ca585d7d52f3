"""Rows of other libraries' attention, with a stand-in of FlashAttention, and with the libraries where they are."""

import json
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from benched import CPU, SMALL, records
from laboratory import run_research
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvcli.artifact.choice import MethodChoice
from kvcli.attention.reference import partial_attention
from kvcli.bench import fixed_length
from kvcli.bench.fixed_length import FixedLengthLayer, without_mask
from kvcli.bench.layer import uncompressed_layer
from kvcli.bench.model import random_model
from kvcli.errors import UsageError
from kvcli.models.shapes import shape_spec
from kvcli.seam.versions import with_cache
from research import library_bench
from research.libraries import BaselineName, load_baselines, over_fastest
from research.library_bench import LibraryBench, library_forward, library_runs

SPEC = shape_spec("tiny")
NAMES = get_args(BaselineName)
FLASH = ("fa3", "fa3-e4m3")
FACTOR = [1.0]
"""What stand-ins multiply their output by."""


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Of [batch, num_heads, 1, head_dim], as a library computes it: fp8 gives bfloat16."""
    dtype = torch.bfloat16 if query.dtype.itemsize == 1 else query.dtype
    return (partial_attention(query, key, value, None, query.shape[-1] ** -0.5)[0] * FACTOR[0]).to(dtype)


def flash_attn_with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, **options: Any) -> Tensor:
    """As in `hopper/flash_attn_interface.py`: [batch, tokens, heads, head_dim]."""
    assert q.dtype == k_cache.dtype
    assert k_cache.stride(-1) == 1
    return attention(*(x.transpose(1, 2) for x in (q, k_cache, v_cache))).transpose(1, 2)


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in of FlashAttention's own package."""
    FACTOR[0] = 1.0
    module: Any = ModuleType("flash_attn_interface")
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("name", FLASH)
def test_a_library_attends_to_a_cache_as_it_is(name: Any) -> None:
    (library,) = load_baselines([name, name])
    layer = uncompressed_layer(SPEC, 3, 13, CPU, torch.float16, 0)
    good, attend = library.check(*layer)
    sizes = [x.dtype.itemsize for x in attend.args]
    assert sizes == [2 - (name == "fa3-e4m3"), *[2 - name.endswith("-e4m3")] * 2]
    assert attend().shape == (3, 4, 1, 16)
    assert good.holds
    assert 0 < good.out_error < 5e-3
    FACTOR[0] = 1.1
    wrong, _ = library.check(*layer)
    assert not wrong.holds
    assert "output by 1.0e-01" in wrong.describe()
    assert "log-sum-exp" not in wrong.describe()


@pytest.mark.usefixtures("libraries")
def test_attention_has_a_row_of_each_library() -> None:
    shape = ("bench", "--shape", "tiny", "--contexts", "64", "--repeats", "3", "--dtype", "float16", "--device", "cpu")
    command = (*shape, "--method", "rtn-4", *(word for name in FLASH for word in ("--baseline", name)))
    rows = {row["method"]: row for row in json.loads(run_research(*command, "--json").stdout)["rows"]}
    assert [*rows] == ["fp16", *FLASH, "rtn-4"]
    for name in FLASH:
        row = rows[name]
        assert (row["status"], row["impl"], row["encoded"], row["lse_error"]) == ("ok", name, 64, None)
        assert row["true_bits"] == 8 if name.endswith("-e4m3") else 16
        assert row["speedup"] == pytest.approx(rows["fp16"]["p50_us"] / row["p50_us"])
    FACTOR[0] = 1.1
    done = run_research(*command)
    assert (done.exit_code, done.stdout.count("MISMATCH"), "x fastest" in done.stdout) == (1, 2, True)


def test_ratios_are_to_the_fastest_row_of_16_bits() -> None:
    def row(method: str, rate: float | None, context: int = 1, status: str = "ok") -> dict[str, Any]:
        return {"method": method, "rate": rate, "context": context, "batch": 1, "status": status}

    rows = [row("fp16", 2), row("fa3", 4), row("fa3-e4m3", 8), row("flashinfer", None, status="failed"), row("x", 6)]
    rows += [row("fp16", 10, context=2), row("x", 5, context=2), row("x", 5, context=3), row("x", None)]
    ratios = [over_fastest(each, rows, lambda x: x["rate"]) for each in rows]
    assert ratios == ["0.50", "1.00", "2.00", "-", "1.50", "1.00", "0.50", "-", "-"]


def bench_of(model: Any, name: Any) -> LibraryBench:
    """Measures fp16 and a library."""
    cases = [MethodChoice("fp16").plus(SMALL)]
    return LibraryBench(model, cases, impl="auto", seed=0, libraries=load_baselines([name]))


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("name", FLASH)
def test_a_step_attends_with_a_library(name: Any, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer, to all tokens, also with kernels for modules; the faster step counts."""
    called: list[Any] = []

    def record(call: Any) -> Any:
        call()
        return SimpleNamespace(replay=lambda: called.append(1)), None

    monkeypatch.setattr(fixed_length, "record_graph", record)
    monkeypatch.setattr(library_bench, "ways_of_modules", lambda model: [(x, nullcontext) for x in "ab"])
    bench = bench_of(model, name)
    fp16, row = records(bench.generate([20], [2], new_tokens=8, repeats=3))
    assert (row.method, row.status, row.note, row.impl) == (name, "ok", None, name)
    assert (row.steady_tokens, len(called)) == (7, 42)
    assert row.decode in ("a", "b")
    assert row.cache_bytes == 2 * 3 * 2 * 2 * 21 * 16 * (1 if name.endswith("-e4m3") else 4)
    assert row.rate_ratio == row.tokens_per_s[1] / fp16.tokens_per_s[1]
    assert row.prefill_ms is row.ttft_ms is row.total_tokens_per_s is None


@torch.inference_mode()
@pytest.mark.usefixtures("libraries")
def test_a_step_with_a_library_is_that_with_sdpa(model: Any) -> None:
    (library,) = load_baselines(["fa3"])
    query, *cached = uncompressed_layer(SPEC, 2, 21, CPU, torch.float32, 0)
    cache = Cache(layers=[FixedLengthLayer(*cached) for _ in range(3)])
    step = {"input_ids": torch.tensor([[3], [5]]), "position_ids": torch.full((2, 1), 20), **with_cache(cache)}
    logits = []
    for forward in (sdpa_attention_forward, library_forward(library, query, cached[0])):
        with without_mask(model, forward):
            logits.append(model(**step).logits)
    assert torch.allclose(*logits, atol=1e-6)


@pytest.mark.usefixtures("libraries")
def test_what_is_not_measured_is_said(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_of(model, "fa3")
    _, row = records(bench.generate([20], [1], new_tokens=1, repeats=1))
    assert (row.status, row.note) == ("refused", "fa3 is measured in decode steps; ask for more new tokens")
    monkeypatch.setattr(fixed_length, "record_graph", lambda call: (None, "no CUDA graph: no"))
    _, row = records(bench.generate([20], [1], new_tokens=3, repeats=1))
    assert (row.status, row.note, row.tokens_per_s) == ("refused", "no CUDA graph: no", None)
    line = run_research("bench", "generate", "--baseline", "fa3", "--batches", "auto").stderr
    assert "not with auto" in line


def test_a_library_that_is_not_there_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flashinfer", "flash_attn_interface", "vllm"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=r"--baseline flashinfer-e4m3 .* pip install flashinfer-python"):
        load_baselines(["flashinfer-e4m3"])
    line = run_research("bench", "--shape", "tiny", "--baseline", "fa3").stderr
    assert "--baseline fa3 cannot be imported (flash_attn_interface: " in line


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_libraries_on_a_gpu(name: Any) -> None:
    try:
        (library,) = load_baselines([name])
    except UsageError as error:
        pytest.skip(f"needs the library: {error}")
    device = torch.device("cuda")
    for batch, tokens in ((1, 8192), (3, 1001)):
        layer = uncompressed_layer(shape_spec("llama-3.1-8b"), batch, tokens, device, torch.float16, 0)
        agreement, _ = library.check(*layer)
        assert agreement.holds, agreement.describe()
    model = random_model("llama-3.1-8b", 1, device, torch.bfloat16, 0)
    assert len(library_runs(model, library, 2, 1000, 5, 3, None)) == 3
