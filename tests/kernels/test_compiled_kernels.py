"""Kernels are compiled for GPUs with less shared memory than those that they are tuned on."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvcli.kernels import launch
from kvcli.kernels.launch import Tiles

HEAVY = r"\._attend_kernel|_extend_kernel|_leading_kernel|_project_kernel|_decode_values_kernel|_sketch|qjl.encode"
"""Kernels that take the most shared memory, or that are launched in other ways than on Hopper."""
WIDE = r"--methods turboquant-3 --head-dim 256 --kernels window_kernels\._attend|turboquant"
EXACT = "--methods kivi-2 --page-size 128 --shared-only --kernels _full_prec|_prepare|_store|_gather|_put|_per_t|_per_c"
QJL = r"--methods qjl --kv-heads 1 --shared-only --kernels \._attend_kernel|_extend_kernel|qjl\.(en|de)code"
FIT = [
    # capability, options, some of the kernels that are compiled
    (86, f"--methods squat-2 qjl commvq-1 --dtype bfloat16 --kernels {HEAVY}", "_extend_kernel window_kernels"),
    (86, f"--methods kivi-2 --dtype float32 --shared-only --kernels {HEAVY}", "_extend_kernel window_kernels"),
    (90, f"{WIDE} --dtype float32 --shared-only", "_attend_kernel _decode_kernel _encode_kernel"),
    (86, f"{WIDE} --dtype bfloat16", "_attend_kernel _decode_kernel _encode_kernel"),
    (90, f"{EXACT} --head-dim 128 --dtype float32", "_attend_full _prepare _store _gather _put _per_chan _per_token"),
    (86, f"{EXACT} --head-dim 256 --dtype bfloat16", "_attend_full_precision _store _prepare"),
    (86, f"{QJL} --head-dim 256 --dtype float32 --heads 7", "qjl.decode_kernels"),
    (120, f"{QJL} --head-dim 80 --dtype bfloat16 --heads 16", "qjl.decode_kernels"),
]


def compile_kernels(capability: int, *options: str, script: str = "compiled_kernels.py") -> str:
    variables = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, f"tests/kernels/{script}", str(capability), *options],
        env={**variables, "PYTHONPATH": "."}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, "\n".join((done.stdout, done.stderr[-2000:]))
    return done.stdout


@pytest.mark.kernels
@pytest.mark.parametrize(("capability", "options", "compiled"), FIT)
def test_kernels_fit_into_shared_memory(capability: int, options: str, compiled: str) -> None:
    printed = compile_kernels(capability, *options.split())
    assert [name for name in compiled.split() if name not in printed] == []


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("methods", "kernels", "limit"),
    [
        (["kivi-2", "kivi-4"], r"scalar\.value_kernels\._value_kernel", 512),
        (["klt-2", "klt-tcq-2"], r"klt\.\w+\._(scores|value)_kernel", 512),
        (["commvq-1"], r"\._(key_scores|bits)_kernel", 4096),  # queries, and what is stored
    ],
)
def test_codes_reach_tensor_cores_without_shared_memory(methods: list[str], kernels: str, limit: int) -> None:
    """What a thread loads is what its products take; Triton would show an exchange in the shared memory of a launch."""
    printed = compile_kernels(90, "--methods", *methods, "--kernels", kernels, "--shared-only")
    launches = [line.split() for line in printed.splitlines() if re.search(kernels, line)]
    assert len(launches) > 2
    assert max(int(shared) for shared, *_ in launches) <= limit


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("capability", "page_size", "methods"),
    [(80, 16, ["klt-2", "klt-tcq-2"]), (80, 128, ["kivi-2"]), (90, 64, ["commvq-1", "qjl"])],
)
def test_codes_in_pages_reach_tensor_cores_without_shared_memory(
    capability: int, page_size: int, methods: list[str]
) -> None:
    """Also where a tile's tokens are in several pages."""
    kernels = ("--kernels", r"_(value|scores|bits)_kernel", "--shared-only")
    printed = compile_kernels(capability, "--page-size", str(page_size), "--methods", *methods, *kernels)
    launches = [line.split() for line in printed.splitlines() if f"PAGE={page_size}" in line]
    assert len(launches) == 2 * len(methods)
    assert max(int(shared) for shared, *_ in launches) <= 4096


@pytest.mark.kernels
@pytest.mark.slow
@pytest.mark.skipif("KVCLI_COMPILE_ALL" not in os.environ, reason="takes half an hour; set KVCLI_COMPILE_ALL")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("capability", [80, 86, 89, 90, 120])
@pytest.mark.parametrize(("head_dim", "dtype"), [(128, "bfloat16"), (64, "bfloat16"), (128, "float32")])
def test_all_kernels_fit(capability: int, head_dim: int, dtype: str) -> None:
    compile_kernels(capability, "--head-dim", str(head_dim), "--dtype", dtype)


@pytest.mark.kernels
@pytest.mark.slow
@pytest.mark.skipif("KVCLI_COMPILE_ALL" not in os.environ, reason="takes an hour; set KVCLI_COMPILE_ALL")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("capability", [80, 86, 90, 120])
def test_the_table_of_shared_memory_is_what_is_compiled(capability: int, tmp_path: Path) -> None:
    lines = Path("docs/results/shared-memory.jsonl").read_text().splitlines()
    written = {line: json.loads(line) for line in lines if json.loads(line)["capability"] == capability}
    sizes = {str(row["head_dim"]) for row in written.values()}
    compile_kernels(capability, "--head-dims", *sizes, "--out", str(tmp_path / "found"), script="shared_memory.py")
    assert (tmp_path / "found").read_text().splitlines() == list(written)


@pytest.mark.parametrize(("limit", "expected"), [(227, 64), (163, 32), (99, 32)])
def test_tiles_follow_the_shared_memory(limit: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "shared_memory_limit", lambda device: limit * 1024)
    launch.has_hopper_shared_memory.cache_clear()
    found = Tiles(hopper={"BLOCK": 64}, smaller={"BLOCK": 32}).on(torch.device("cpu"))
    launch.has_hopper_shared_memory.cache_clear()
    assert found == {"BLOCK": expected}
