"""A session's kernels are compiled before its first pass, and none later."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")


@pytest.mark.kernels
@pytest.mark.parametrize(
    "arguments",
    [
        "kivi-2 128 8 2 1 bfloat16",
        "commvq-2 128 32 8 1 bfloat16",
        "squat-pre-2 64 9 3 3 float32",
        "qjl 64 4 4 17 float16",
        "turboquant-3 256 3 3 2 bfloat16",
        "rtn-4 112 7 1 1 float32",
        "fp16 128 8 2 3 bfloat16",
    ],
)
def test_nothing_is_compiled_after_the_warm_up(arguments: str) -> None:
    """Over growing lengths, chunks, ragged batches, and steps as they are captured."""
    variables = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "tests/attention/launches.py", *arguments.split()],
        env={**variables, "PYTHONPATH": ".:tests/kernels"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.endswith(" 0 after it\n"), done.stdout
