"""Plans of families whose attention or layers are not those of Llama."""

from __future__ import annotations

import pytest
import torch
from families import tiny_config

from kvcli.plan.live_bytes import META, peak_bytes
from kvcli.plan.model import PlannedModel
from kvcli.plan.stages import MethodPlan
from kvcli.registry import get_method

FAMILIES = ["gemma3_text", "gpt_oss", "gpt2", "qwen3_moe", "glm4", "smollm3", "phi3", "cohere2"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_planned(family: str, dtype: torch.dtype) -> None:
    planned = PlannedModel(family, tiny_config(family), dtype, torch.device("cpu"))
    method = get_method("kivi")
    plan = MethodPlan(planned, "kivi-2", method, method.config_cls())
    assert plan.generate(300, 8).peak_bytes > planned.weights_bytes
    short, longer = (plan.cache.memory(count).fp16_bytes for count in (300, 600))
    assert longer == 2 * short == 600 * planned.spec.num_layers * planned.spec.num_kv_heads * 16 * 2 * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_experts_of_all_dtypes_are_traced(dtype: torch.dtype) -> None:
    rows, experts = torch.zeros(6, 8, dtype=dtype, device=META), torch.zeros(2, 8, 16, dtype=dtype, device=META)
    ends = torch.zeros(2, dtype=torch.int32, device=META)
    made = []
    peak = peak_bytes(lambda: made.append(torch.nn.functional.grouped_mm(rows, experts, offs=ends)))
    assert made[0].shape == (6, 16)
    assert peak.total == 6 * 16 * dtype.itemsize
