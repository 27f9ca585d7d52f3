"""Heads of all sizes, in all dtypes, with 1 to 16 queries per kv head: every method runs, by kernels or with a note."""

from itertools import product
from typing import Any

import pytest
import torch
from factories import make_model

from kvcli.artifact.choice import MethodChoice
from kvcli.bench.model import open_session
from kvcli.seam.versions import with_cache

METHODS = ("rtn-4", "fp8", "kivi-2", "squat-2", "squat-pre-2", "qjl", "turboquant-3", "commvq-1")
SIZES = (64, 80, 96, 112, 128, 160, 192, 256)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
QUERIES = (4, 7, 6, 16, 1)
"""Queries per kv head, which SIZES and DTYPES go through."""

ALL = [(size, dtype, QUERIES[i % 5]) for i, (size, dtype) in enumerate(product(SIZES, DTYPES))]
PASSES = (150, 20, 5, 1, 1)
ROUNDING = {torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 3e-2}
"""Relative errors of a model's own arithmetic."""


def model_of(head_dim: int, dtype: torch.dtype, queries: int) -> Any:
    heads = {"num_attention_heads": queries, "num_key_value_heads": 1, "hidden_size": 16 * queries}
    return make_model("llama", head_dim=head_dim, num_hidden_layers=1, **heads).to(dtype)


def states(model: Any, method: str, impl: str) -> tuple[torch.Tensor, str | None]:
    """Last hidden states of ragged passes with codes, and the note of the session."""
    device, outputs, seen = model.device, [], 0
    mask = torch.ones(2, sum(PASSES), dtype=torch.long, device=device)
    mask[1, :7] = 0
    ids = torch.randint(3, 97, mask.shape, generator=torch.Generator().manual_seed(0)).to(device)
    with open_session(model, MethodChoice(method).plus({"residual_length": 32}), impl, 0) as session, torch.no_grad():
        cache = session.new_cache()
        for count in PASSES:
            piece, seen = ids[:, seen : seen + count], seen + count
            outputs.append(model.base_model(piece, attention_mask=mask[:, :seen], **with_cache(cache))[0][:, -1])
        assert method == "fp16" or cache.memory().num_encoded > 0
        return torch.stack(outputs).float(), session.backend.note


def check(head_dim: int, dtype: torch.dtype, queries: int, method: str, device: str, impl: str) -> None:
    """Kernels lose no more than the reference does, against the same model without codes in float32."""
    model = model_of(head_dim, dtype, queries).to(device)
    expected, _ = states(model, method, "reference")
    actual, note = states(model, method, impl)
    exact, _ = states(model.float(), "fp16", "reference")
    lost, allowed = (actual - exact).norm(), (expected - exact).norm()
    assert lost < 1.1 * allowed + ROUNDING[dtype] * exact.norm(), note


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("head_dim", "dtype", "queries"), ALL)
def test_every_method_runs_on_a_gpu(head_dim: int, dtype: torch.dtype, queries: int, method: str) -> None:
    check(head_dim, dtype, queries, method, "cuda", "auto")


@pytest.mark.parametrize("method", [name for name in METHODS if name != "commvq-1"])
@pytest.mark.parametrize(("head_dim", "queries"), [(80, 7), (112, 6), (256, 1)])
def test_every_method_runs_in_pytorch(head_dim: int, queries: int, method: str) -> None:
    output, _ = states(model_of(head_dim, torch.float32, queries), method, "reference")
    assert bool(output.isfinite().all())


@pytest.mark.kernels
@pytest.mark.skipif(torch.cuda.is_available(), reason="the test on a GPU runs all of them")
@pytest.mark.parametrize(
    ("head_dim", "dtype", "queries", "method"),
    [
        (80, torch.float32, 7, "kivi-2"),
        (112, torch.float16, 6, "squat-2"),
        (96, torch.float16, 7, "qjl"),
        (160, torch.float32, 1, "turboquant-3"),
        (256, torch.float16, 6, "squat-pre-2"),
    ],
)
def test_kernels_of_odd_heads_give_what_the_reference_gives(
    head_dim: int, dtype: torch.dtype, queries: int, method: str
) -> None:
    """Not in bfloat16, of which the interpreter multiplies bit patterns."""
    check(head_dim, dtype, queries, method, "cpu", "fused")
