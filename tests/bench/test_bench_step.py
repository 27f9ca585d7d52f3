"""`python -m research bench step`: kernels of a replayed step by what they do."""

import json
from pathlib import Path

import pytest
import torch
from laboratory import run_research

from research.step import figures_of, kind_of


def test_time_is_that_of_kernels_and_between_them() -> None:
    """Of two that overlap, the second counts from the end of the first; what none of them fills is between them."""
    kernels = [("nvjet_sm90_tst", 10.0, 14.0), ("_value_kernel", 16.0, 20.0), ("_merge_splits_kernel", 18.0, 22.0)]
    figures = figures_of([*kernels, ("at::native::reduce_kernel<512>", 23.0, 24.0)], 2)
    assert figures == {"launches": 2, "products": 2, "attention": 3, "others": 0.5, "between": 1.5}


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("_linear_kernel", "products"),
        ("void cublasLt::splitKreduce_kernel<32, 16>", "products"),
        ("_rotate_and_append_kernel", "attention"),
        ("flash_fwd_splitkv_kernel", "attention"),
        ("_rms_norm_kernel", "others"),
        ("void at::native::vectorized_elementwise_kernel<8>", "others"),
    ],
)
def test_kernels_are_told_apart_by_name(kernel: str, kind: str) -> None:
    assert kind_of(kernel) == kind


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_is_needed() -> None:
    done = run_research("bench", "step", "--random-weights", "tiny", "--method", "kivi-2")
    assert "needs a GPU" in done.stderr


@pytest.mark.gpu
def test_steps_are_taken_apart_on_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "x.jsonl"
    command = ("bench", "step", "--random-weights", "smollm2-135m", "--layers", "2", "--prompt-tokens", "1024")
    assert run_research(*command, "--method", "kivi-2", "--out", str(out)).exit_code == 0
    fp16, kivi = (json.loads(line) for line in out.read_text().splitlines())
    assert (fp16["status"], kivi["status"], kivi["how"]) == ("ok", "ok", "graphs")
    assert min(kivi[x] for x in ("ms", "launches", "products", "attention", "others")) > 0
