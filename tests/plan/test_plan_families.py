"""Plans of families whose attention or layers are not those of Llama; the bound of a pass against traced passes."""

from typing import Any

import pytest
import torch
from families import make, tiny_config
from live_bytes import META, peak_bytes

from kvcli import attach
from kvcli.attention.backend import REFERENCE
from kvcli.attention.layer import attend_layer
from kvcli.cache.compressed import CompressedCache, MemoryReport
from kvcli.calibrate.config import CollectConfig
from kvcli.calibrate.fisher import backward
from kvcli.models.shapes import shape_config
from kvcli.plan.memory import MethodPlan, PlannedModel, calibration, pass_bound
from kvcli.registry import METHODS, get_method
from kvcli.seam.patch import Seam
from kvcli.seam.versions import with_cache

FAMILIES = ["gemma3_text", "gpt_oss", "gpt2", "qwen3_moe", "glm4", "smollm3", "phi3", "cohere2", "olmo3"]


def planned(config: Any, dtype: torch.dtype = torch.float32, name: str = "kivi") -> MethodPlan:
    method = get_method(name)
    model = PlannedModel(config.model_type, config, dtype, torch.device("cpu"))
    return MethodPlan(model, name, method, method.config_cls().resolve(model.spec))


def memory_after(model: Any, *passes: int) -> MemoryReport:
    """What a cache of two sequences holds after passes of so many tokens."""
    with attach(model, "kivi-2") as session, torch.no_grad():
        cache = session.new_cache()
        for count in passes:
            ids = torch.randint(3, model.config.vocab_size, (2, count))
            model(ids, **with_cache(cache))
        return cache.memory()


def test_values_of_another_width_than_keys() -> None:
    plan = planned(tiny_config("mimo_v2_flash", v_head_dim=8))
    assert memory_after(make("mimo_v2_flash", v_head_dim=8), 200) == plan.memory(200, 1, batch=2)


def check_bound(plan: MethodPlan, tokens: int) -> None:
    """A prompt in one pass and a chunk after it take no more than the bound, and not less than a fifth of it."""
    model: Any = plan.planned.empty
    codecs = [codec.to(META) for codec in plan.codecs]
    with torch.no_grad(), Seam(model, lambda call: attend_layer(call, REFERENCE)) as seam:
        cache = CompressedCache(seam.attention.spec, plan.method, plan.config, codecs, seam)
        for count, context in ((tokens, tokens), (300, tokens + 300)):
            ids = torch.zeros(1, count, dtype=torch.int64, device=META)
            before = cache.memory().allocated_bytes
            traced = peak_bytes(lambda ids=ids: model(ids, **with_cache(cache), logits_to_keep=1))
            passes = traced - (cache.memory().allocated_bytes - before)
            bound = pass_bound(plan.planned, count, context, 1, fused=False)
            assert passes <= bound, (count, context)
            assert bound <= 6 * passes, (count, context)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_bound_of_a_pass_holds_in_every_family(family: str, dtype: torch.dtype) -> None:
    check_bound(planned(tiny_config(family, max_position_embeddings=4096), dtype), 2048)


@pytest.mark.parametrize("name", METHODS)
def test_the_bound_of_a_pass_holds_for_every_method(name: str) -> None:
    check_bound(planned(shape_config("llama-3.1-8b", 1), torch.bfloat16, name), 2048)
    check_bound(planned(shape_config("smollm2-135m", 2), torch.float32, name), 512)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_experts_of_all_dtypes_are_traced(dtype: torch.dtype) -> None:
    rows, experts = torch.zeros(6, 8, dtype=dtype, device=META), torch.zeros(2, 8, 16, dtype=dtype, device=META)
    ends = torch.zeros(2, dtype=torch.int32, device=META)
    results = []
    peak = peak_bytes(lambda: results.append(torch.nn.functional.grouped_mm(rows, experts, offs=ends)))
    assert results[0].shape == (6, 16)
    assert peak == 6 * 16 * dtype.itemsize


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", ["llama-3.1-8b", "smollm2-135m", "gemma3_text"])
def test_the_bound_of_gradients_holds(shape: str, dtype: torch.dtype) -> None:
    config = tiny_config(shape) if shape == "gemma3_text" else shape_config(shape, 4)
    model = PlannedModel(shape, config, dtype, torch.device("cuda"))
    network, ids = model.empty.requires_grad_(False), torch.zeros(1024, dtype=torch.int64, device=META)
    traced = peak_bytes(lambda: backward(network, ids, torch.rand(len(ids), dtype=torch.float64)))
    bound = calibration(model, CollectConfig(1, 1024, 1, 1, 1, 1))["peak_bytes"] - model.weights_bytes
    assert traced <= bound <= 3 * traced
