"""Plans of families whose attention or layers are not those of Llama."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from families import make, tiny_config

from kvcli import attach
from kvcli.attention.attach import build_codecs
from kvcli.attention.backend import REFERENCE
from kvcli.attention.layer import attend_layer
from kvcli.cache.compressed import CompressedCache
from kvcli.plan.live_bytes import META, peak_bytes
from kvcli.plan.model import PlannedModel
from kvcli.plan.stages import LEFT_OVER, MethodPlan
from kvcli.plan.working import _held
from kvcli.registry import get_method
from kvcli.seam.patch import Seam

FAMILIES = ["gemma3_text", "gpt_oss", "gpt2", "qwen3_moe", "glm4", "smollm3", "phi3", "cohere2"]
HYBRIDS = ["gemma3_text", "olmo3", "llama4_text", "qwen3_next", "olmo_hybrid", "lfm2", "jamba", "bamba", "nemotron_h"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_planned(family: str, dtype: torch.dtype) -> None:
    plan = planned_kivi(family, dtype)
    planned = plan.planned
    assert plan.generate(300, 8).peak_bytes > planned.weights_bytes
    short, longer = (plan.cache.memory(count).fp16_bytes for count in (300, 600))
    assert longer == 2 * short == 600 * planned.spec.num_layers * planned.spec.num_kv_heads * 16 * 2 * 2


def planned_kivi(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> MethodPlan:
    method = get_method("kivi")
    planned = PlannedModel(family, tiny_config(family, **changes), dtype, torch.device("cpu"))
    return MethodPlan(planned, "kivi-2", method, method.config_cls())


@pytest.mark.parametrize("tokens", [3, 40])
@pytest.mark.parametrize("family", HYBRIDS)
def test_caches_of_other_layers_are_those_of_a_run(family: str, tokens: int) -> None:
    plan, model = planned_kivi(family), make(family)
    with attach(model, "kivi-2") as session, torch.no_grad():
        cache = session.new_cache()
        ids = torch.randint(3, model.config.vocab_size, (2, tokens))
        model(ids, past_key_values=cache, use_cache=True)
        model(ids[:, :1], past_key_values=cache, use_cache=True)
        held = cache.memory()
    told = plan.memory(tokens, 2, batch=2)
    assert held.other_bytes == told.other_bytes > 0
    assert held.share == told.share


def test_what_other_layers_keep_is_counted_once() -> None:
    plan, tokens = planned_kivi("gemma3_text"), 512
    memory = plan.memory(tokens, 1)
    assert plan._held(memory) - plan._held(replace(memory, other_bytes=0)) == memory.other_bytes > 0
    model: Any = plan.planned.empty()
    codecs = [codec.to(META) for codec in build_codecs(plan.method, plan.planned.spec, plan.config)]
    with torch.no_grad(), Seam(model, lambda call: attend_layer(call, REFERENCE)) as seam:
        cache = CompressedCache(seam.attention.spec, plan.method, plan.config, codecs, seam)
        ids = torch.zeros(1, tokens, dtype=torch.int64, device=META)
        peak_bytes(lambda: model(ids, past_key_values=cache, use_cache=True))
    # of two layers the window is cut from the whole prompt: keys and values, 2 heads of 16 channels, float32
    assert _held(cache) - cache.memory().allocated_bytes == 2 * 2 * tokens * 2 * 16 * 4


def test_values_of_another_width_than_keys() -> None:
    narrow = {"v_head_dim": 8}
    plan, model = planned_kivi("mimo_v2_flash", **narrow), make("mimo_v2_flash", **narrow)
    with attach(model, "kivi-2") as session, torch.no_grad():
        cache = session.new_cache()
        model(torch.randint(3, model.config.vocab_size, (2, 200)), past_key_values=cache, use_cache=True)
        assert cache.memory() == plan.memory(200, 1, batch=2)


@pytest.mark.parametrize("tokens", [512, 2048, 6000])
@pytest.mark.parametrize("window", [8, 4096])
@pytest.mark.parametrize("family", ["gemma3_text", "olmo3", "lfm2"])
def test_the_peak_of_reading_with_a_hybrid(family: str, window: int, tokens: int) -> None:
    plan = planned_kivi(family, **({} if family == "lfm2" else {"sliding_window": window}))
    model: Any = plan.planned.empty()
    ids = torch.zeros(1, tokens, dtype=torch.int64, device=META)
    codecs = [codec.to(META) for codec in build_codecs(plan.method, plan.planned.spec, plan.config)]
    with torch.no_grad(), Seam(model, lambda call: attend_layer(call, REFERENCE)) as seam:
        cache = CompressedCache(seam.attention.spec, plan.method, plan.config, codecs, seam)
        measured = peak_bytes(lambda: model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)).total
    told = plan.generate(tokens, 1).peak_bytes - plan.planned.weights_bytes - LEFT_OVER
    assert told == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_experts_of_all_dtypes_are_traced(dtype: torch.dtype) -> None:
    rows, experts = torch.zeros(6, 8, dtype=dtype, device=META), torch.zeros(2, 8, 16, dtype=dtype, device=META)
    ends = torch.zeros(2, dtype=torch.int32, device=META)
    made = []
    peak = peak_bytes(lambda: made.append(torch.nn.functional.grouped_mm(rows, experts, offs=ends)))
    assert made[0].shape == (6, 16)
    assert peak.total == 6 * 16 * dtype.itemsize
