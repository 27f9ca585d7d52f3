"""Flags and configuration files: checks, suggestions, precedence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from console import refused, result

from kvcli.options import ComputeOptions


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("train-codebook", "x", "--bits", "9"), 2, "--bits"),
        (("fit", "--method", "kivi"), 2, "choose one of squat, squat-pre, oscar, kvquant, commvq"),
        (("generate", "no/such/model/here"), 1, "cannot load model"),
        (("generate", "--temperature", "-1"), 2, "--temperature"),
        (("calibrate", "--tokens", "0"), 2, "--tokens"),
        (("generate", "--device", "toaster"), 2, "--device cpu"),
        (("eval", "--device", "auto"), 2, "name one"),
        (("generate", "--seed", "99999999999999999999"), 2, "--seed"),
        (("generate", "--prompt-file", "."), 2, "directory"),
        (("methods", "--bits", "llama-3.1-8b", "--contexts", "0"), 2, "--contexts"),
        (("calibrate", "--corpus", "."), 1, "holds no"),
        (("calibrate", "--config", "missing.yaml"), 2, "missing.yaml"),
    ],
)
def test_bad_input_gets_one_line_and_its_exit_code(arguments: tuple[str, ...], code: int, said: str) -> None:
    assert said in refused(*arguments, code=code)


def test_unknown_config_keys_get_a_suggestion(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("tokns: 3\n")
    assert "did you mean 'tokens'?" in refused("calibrate", "--config", "c.yaml")
    (tmp_path / "c.yaml").write_text("- 3\n")
    refused("calibrate", "--config", "c.yaml")
    (tmp_path / "c.yaml").write_text("a: [\n")
    assert "not valid YAML" in refused("calibrate", "--config", "c.yaml")


def test_flags_win_over_the_file(tiny: Any, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("tokens: 256\nseq_len: 64\n")
    assert result("calibrate", "--config", "c.yaml", "--tokens", "128", "--json")["num_tokens"] == 128


def test_cuda_is_the_default_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert ComputeOptions().torch_device() == "cuda"


@pytest.mark.parametrize("arguments", [["--nope"], ["nonsense"], ["generate", "--max-new-tokens", "many"]])
def test_misused_flags_are_one_line_too(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "kvcli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    assert json.loads(done.stdout)["exit_code"] == 2


def test_all_gpus_are_for_commands_that_can_run_on_several() -> None:
    words = ("bench", "--suite", "generate", "--random-weights", "tiny", "--device", "auto")
    assert "'--device auto' is not for it" in refused(*words)
    result("plan", "tiny", "--device", "auto", "--method", "fp16")
