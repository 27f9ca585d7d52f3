"""The whole pipeline on the real built-in model: what the README promises, with its numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOKENS = ("--tokens", "4096")
"""A quarter of the demo's own calibration tokens, and of the time."""


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_demo_keeps_its_promises_and_a_second_run_reuses_everything(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvcli", "demo", "--json", *TOKENS, "--max-new-tokens"]
    first = subprocess.run([*command, "60"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stderr
    record = json.loads(first.stdout)
    assert record["true_bits"] <= 2.2
    assert record["kl_mean"] <= 0.15
    assert record["commvq"]["memory"]["num_encoded"] > 0
    assert record["commvq"]["new_tokens"] == record["fp16"]["new_tokens"] == 60
    assert "quick preset" in first.stderr
    second = subprocess.run([*command, "8"], cwd=tmp_path, capture_output=True, text=True, check=True)
    again = json.loads(second.stdout)
    assert "30 of 30 layers were fitted already" in second.stderr
    assert again["seconds"]["train"] < 0.2 * record["seconds"]["train"]
    assert record["commvq"]["text"].startswith(again["commvq"]["text"])
    assert again["kl_mean"] == pytest.approx(record["kl_mean"], rel=1e-3)
