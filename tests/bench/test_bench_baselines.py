"""Rows of other libraries' attention, with stand-ins of their signatures, and with the libraries where they are."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from benched import CPU, bench_of, records
from console import refused, result
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvcli.attention.reference import partial_attention
from kvcli.bench import fixed_length
from kvcli.bench.baselines import BaselineName, load_baselines, over_fastest
from kvcli.bench.fixed_length import (
    FIXED_LENGTH,
    FixedLengthCache,
    FixedLengthLayer,
    library_forward,
    replay_step,
    without_mask,
)
from kvcli.bench.layer import uncompressed_layer
from kvcli.bench.model import random_model
from kvcli.errors import UsageError
from kvcli.models.shapes import shape_spec

SPEC = shape_spec("tiny")
NAMES = get_args(BaselineName)
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


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, max_seqlen_q: int, cu_seqlens_q: Tensor, max_seqlen_k: int, **options: Any
) -> Tensor:
    """As in vllm: the query is [queries of all sequences, heads, head_dim], keys of fixed length are of a batch."""
    assert q.dtype == k.dtype
    assert (max_seqlen_q, cu_seqlens_q.tolist()) == (1, list(range(len(k) + 1)))
    assert options["seqused_k"].tolist() == [max_seqlen_k] * len(k) == [k.shape[1]] * len(k)
    assert (options["scheduler_metadata"], options["fa_version"]) == ("metadata", 3)
    return attention(q.unsqueeze(2), k.transpose(1, 2), v.transpose(1, 2)).squeeze(2)


def get_scheduler_metadata(*shape: Any, cu_seqlens_q: Tensor) -> str:
    """As in vllm: batch, queries, tokens, heads, kv heads, channels, tokens of each sequence, dtype."""
    batch, queries, tokens, *heads, lengths, _ = shape
    assert (queries, heads, lengths.tolist()) == (1, [4, 2, 16], [tokens] * batch)
    return "metadata"


class BatchDecodeWithPagedKVCacheWrapper:
    """As in flashinfer: pages [pages, kv heads, page size, head_dim], some for each sequence."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str, use_tensor_cores: bool, backend: str) -> None:
        assert kv_layout == "HND"

    def plan(self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, **others: Any) -> None:
        assert {x.dtype for x in (indptr, indices, last_page_len)} == {torch.int32}
        self.dtypes = others.pop("q_data_type"), others.pop("kv_data_type")
        assert others == {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16, "page_size": 1}
        self.starts, self.indices = indptr.tolist(), indices.long()

    def run(self, q: Tensor, pages: tuple[Tensor, Tensor]) -> Tensor:
        assert (q.dtype, pages[0].dtype) == self.dtypes
        outs = []
        for row, (start, end) in enumerate(zip(self.starts, self.starts[1:], strict=False)):
            key, value = (x.float()[self.indices[start:end], :, 0].transpose(0, 1) for x in pages)
            outs.append(attention(q[row, None, :, None], key[None], value[None]).squeeze(2))
        return torch.cat(outs)


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins of all libraries; of FlashAttention that of its own package."""
    FACTOR[0] = 1.0
    stand_in(monkeypatch, "flashinfer", BatchDecodeWithPagedKVCacheWrapper=BatchDecodeWithPagedKVCacheWrapper)
    stand_in(monkeypatch, "flash_attn_interface", flash_attn_with_kvcache=flash_attn_with_kvcache)


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    module = ModuleType(name)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)


def vllm_stand_in(monkeypatch: pytest.MonkeyPatch, **contents: Any) -> None:
    """Instead of FlashAttention's own package."""
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    for name in ("vllm", "vllm.vllm_flash_attn"):
        stand_in(monkeypatch, name)
    functions = {"flash_attn_varlen_func": flash_attn_varlen_func, "get_scheduler_metadata": get_scheduler_metadata}
    contents = {"FA3_AVAILABLE": True, **functions, **contents}
    stand_in(monkeypatch, "vllm.vllm_flash_attn.flash_attn_interface", **contents)


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("from_vllm", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_library_attends_to_a_cache_as_it_is(name: Any, from_vllm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if from_vllm:
        vllm_stand_in(monkeypatch)
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
    shape = ("bench", "--shape", "tiny", "--contexts", "64", "--repeats", "3", "--dtype", "float16")
    asked = [word for name in NAMES for word in ("--baseline", name)]
    command = (*shape, "--method", "rtn-4", *asked)
    rows = {row["method"]: row for row in result(*command, "--json")["rows"]}
    assert [*rows] == ["fp16", *NAMES, "rtn-4"]
    for name in NAMES:
        row = rows[name]
        assert (row["status"], row["impl"], row["encoded"], row["lse_error"]) == ("ok", name, 64, None)
        assert row["true_bits"] == 8 if name.endswith("-e4m3") else 16
        assert row["speedup"] == pytest.approx(rows["fp16"]["p50_us"] / row["p50_us"])
    table = result(*command).stdout
    assert "x fastest" in table
    assert "x fastest" not in result(*shape, "--method", "rtn-4").stdout
    FACTOR[0] = 1.1
    wrong = result(*command, "--json", exit_code=1)["rows"]
    assert [row["p50_us"] for row in wrong if row["status"] == "mismatch"] == [None] * 4


def test_ratios_are_to_the_fastest_row_of_16_bits() -> None:
    def row(method: str, rate: float | None, context: int = 1, status: str = "ok") -> dict[str, Any]:
        return {"method": method, "rate": rate, "context": context, "batch": 1, "status": status}

    rows = [row("fp16", 2), row("fa3", 4), row("fa3-e4m3", 8), row("flashinfer", None, status="failed"), row("x", 6)]
    rows += [row("fp16", 10, context=2), row("x", 5, context=2), row("x", 5, context=3), row("x", None)]
    ratios = [over_fastest(each, rows, lambda x: x["rate"]) for each in rows]
    assert ratios == ["0.50", "1.00", "2.00", "-", "1.50", "1.00", "0.50", "-", "-"]


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("name", NAMES)
def test_a_step_attends_with_a_library(name: Any, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer, to all tokens, also compiled; the faster step counts."""
    called: list[Any] = []

    def record(call: Any) -> Any:
        call()
        return SimpleNamespace(replay=lambda: called.append(1)), None

    monkeypatch.setattr(fixed_length, "record_graph", record)
    bench = bench_of(model, backend="eager", libraries=load_baselines([name]))
    fp16, row = records(bench.generate([20], [2], new_tokens=8, repeats=3))
    assert (row.method, row.status, row.note, row.impl) == (name, "ok", None, name)
    assert (row.steady_tokens, len(called)) == (7, 42)
    assert row.decode in (FIXED_LENGTH, f"{FIXED_LENGTH}, compiled")
    assert row.cache_bytes == 2 * 3 * 2 * 2 * 21 * 16 * (1 if name.endswith("-e4m3") else 4)
    assert row.rate_ratio == row.tokens_per_s[1] / fp16.tokens_per_s[1]
    assert row.prefill_ms is row.ttft_ms is row.total_tokens_per_s is None


@torch.inference_mode()
@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("name", ["fa3", "flashinfer"])
def test_a_step_with_a_library_is_that_with_sdpa(name: Any, model: Any) -> None:
    (library,) = load_baselines([name])
    query, *cached = uncompressed_layer(SPEC, 2, 21, CPU, torch.float32, 0)
    cache = FixedLengthCache(layers=[FixedLengthLayer(*cached) for _ in range(3)])
    step = {"input_ids": torch.tensor([[3], [5]]), "position_ids": torch.full((2, 1), 20), "past_key_values": cache}
    logits = []
    for forward in (sdpa_attention_forward, library_forward(library, query, cached[0])):
        with without_mask(model, forward):
            logits.append(model(**step).logits)
    assert torch.allclose(*logits, atol=1e-6)


@pytest.mark.usefixtures("libraries")
def test_what_is_not_measured_is_said(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_of(model, libraries=load_baselines(["fa3"]))
    _, row = records(bench.generate([20], [1], new_tokens=1, repeats=1))
    assert (row.status, row.note) == ("refused", "fa3 is measured in decode steps; ask for more new tokens")
    monkeypatch.setattr(fixed_length, "record_graph", lambda call: (None, "no CUDA graph: no"))
    _, row = records(bench.generate([20], [1], new_tokens=3, repeats=1))
    assert (row.status, row.note, row.tokens_per_s) == ("refused", "no CUDA graph: no", None)
    assert "not with auto" in refused("bench", "generate", "--baseline", "fa3", "--batches", "auto")
    assert "--baseline: Input should be 'fa3', 'fa3-e4m3', 'flashinfer' or" in refused("bench", "--baseline", "fa4")


def test_a_library_that_is_not_there_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flashinfer", "flash_attn_interface", "vllm"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=r"--baseline flashinfer-e4m3 .* pip install flashinfer-python"):
        load_baselines(["flashinfer-e4m3"])
    line = refused("bench", "--shape", "tiny", "--baseline", "fa3")
    assert "--baseline fa3 cannot be imported (flash_attn_interface: " in line
    vllm_stand_in(monkeypatch, FA3_AVAILABLE=False, FA3_UNAVAILABLE_REASON="undefined symbol: x")
    with pytest.raises(UsageError, match=r"interface: undefined symbol: x\): build the folder `hopper`"):
        load_baselines(["fa3"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
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
    seconds, _, note = replay_step(model, 2, 1000, 4, 3, None, library)
    assert (len(seconds), note) == (3, None)
