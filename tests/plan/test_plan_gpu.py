"""The bound of a GPU's memory against what torch allocates there; caches are planned exactly."""

from typing import Any

import pytest
import torch

from kvcli.attention.generation import SamplingConfig
from kvcli.attention.session import Session
from kvcli.bench.layer import randomize_
from kvcli.bench.model import random_model
from kvcli.calibrate.collect import collect
from kvcli.calibrate.config import CollectConfig
from kvcli.methods.per_layer import build_codecs
from kvcli.models.fingerprint import fingerprint
from kvcli.models.load import LoadedModel
from kvcli.models.shapes import shape_config
from kvcli.plan.memory import MethodPlan, PlannedModel, calibration
from kvcli.registry import make_config, parse_method
from kvcli.spec import ModelSpec

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

SHAPE, LAYERS = "llama-3.1-8b", 4


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model(SHAPE, LAYERS, torch.device("cuda"), torch.bfloat16, 0)


@pytest.fixture
def planned() -> PlannedModel:
    return PlannedModel(SHAPE, shape_config(SHAPE, LAYERS), torch.bfloat16, torch.device("cuda"))


def check(planned_bytes: int, others: int = 0) -> None:
    peak = torch.cuda.max_memory_allocated() - others
    print(f"planned {planned_bytes / 2**20:.0f} MiB, was {peak / 2**20:.0f} MiB")
    assert peak <= planned_bytes <= 1.5 * peak


@pytest.mark.parametrize("name", ["fp16", "kivi-2", "squat-pre-2", "qjl", "commvq-1", "commvq-2"])
@pytest.mark.parametrize(("tokens", "batch", "chunk"), [(16384, 1, None), (4096, 8, None), (65536, 1, 4096)])
def test_the_memory_of_generating(
    model: Any, planned: PlannedModel, name: str, tokens: int, batch: int, chunk: int | None
) -> None:
    method, from_bits = parse_method(name)
    plan = MethodPlan(planned, name, method, make_config(method.name, from_bits).resolve(planned.spec), fused=True)
    codecs = build_codecs(method, planned.spec, plan.config)
    for codec in codecs:
        codec.cuda()
        randomize_(codec, torch.Generator("cuda").manual_seed(0))
    ids = torch.randint(3, 1000, (batch, tokens), device="cuda")
    with Session(model, planned.spec, method, plan.config, codecs, "fused") as session:
        session.generate(ids[:, :512], sampling=SamplingConfig(2), prefill_chunk=chunk)  # kernels are compiled
        torch.cuda.synchronize()
        others = torch.cuda.memory_allocated() - sum(x.nbytes for x in model.parameters())  # by tests before
        torch.cuda.reset_peak_memory_stats()
        made = session.generate(ids, sampling=SamplingConfig(40), prefill_chunk=chunk)
    check(plan.peak_bytes(tokens, 40, batch, chunk=chunk), others)
    live, expected = made.cache.memory(), plan.memory(tokens, 40, batch, chunk=chunk)
    assert expected.allocated_bytes == pytest.approx(live.allocated_bytes, rel=0.01)
    assert expected.artifact_bytes == live.artifact_bytes
    assert (expected.code_bytes, expected.window_bytes) == (live.code_bytes, live.window_bytes)


@pytest.mark.parametrize("fisher_sequences", [0, 2])
def test_the_memory_of_calibrating(model: Any, planned: PlannedModel, fisher_sequences: int, tmp_path: Any) -> None:
    spec = ModelSpec.from_config(model.config)
    loaded = LoadedModel("random", model, None, spec, fingerprint(model, spec))  # type: ignore[arg-type]
    config = CollectConfig(8, 2048, 4, 4, 0, fisher_sequences)
    torch.cuda.reset_peak_memory_stats()
    collect(loaded, torch.randint(3, 1000, (8, 2048)), config, tmp_path / "samples", {"corpus": {"source": "random"}})
    check(calibration(planned, config)["peak_bytes"])
