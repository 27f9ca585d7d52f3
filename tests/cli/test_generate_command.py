"""`kvcli generate`: prompts, sampling, settings of the cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from console import invoke
from typer.testing import CliRunner

from kvcli.cli.app import app


def test_every_method_generates(tiny: Any) -> None:
    for method in ("fp8", "rtn-4", "kivi-4", "kivi-2", "squat-2", "squat-pre-2", "qjl"):
        group = () if method == "fp8" else ("--setting", "group_size=8")
        options = ("--residual-length", "16", "--sink-length", "0", "--max-new-tokens", "4", "--stats")
        result = invoke("generate", "--method", method, "--prompt", "x" * 60, *options, *group)
        assert result.exit_code == 0, result.stderr
        assert "KV cache" in result.stderr
    assert invoke("generate", "--method", "qjl-3").exit_code == 2
    assert invoke("generate", "--method", "kivi", "--setting", "colour=3").exit_code == 2
    assert invoke("generate", "--method", "kivi", "--setting", "nonsense").exit_code == 2


def test_generate_reads_prompts_from_everywhere(tiny: Any, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("from a file\n")
    short = ("--max-new-tokens", "3")
    assert invoke("generate", "--prompt", "from a flag", *short).stdout.startswith("from a flag")
    assert invoke("generate", "--prompt-file", "prompt.txt", *short).stdout.startswith("from a file")
    piped = CliRunner().invoke(app, ["generate", "--prompt", "-", *short], input="from a pipe\n")
    assert piped.stdout.startswith("from a pipe")
    empty = json.loads(invoke("generate", "--prompt", "", "--json", *short).stdout)
    assert (empty["prompt_tokens"], empty["new_tokens"]) == (1, 3)
    assert "the prompt is empty: the model starts" in invoke("generate", "--prompt", "", *short).stderr
    both = invoke("generate", "--prompt", "x", "--prompt-file", "prompt.txt")
    assert (both.exit_code, both.stdout) == (2, "")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert invoke("generate", "--prompt-file", "binary").exit_code == 2
    assert invoke("generate", "--prompt", "x", "--chat").exit_code == 2  # this model has no chat template


def test_sampling_is_seeded(tiny: Any) -> None:
    def sample(seed: str) -> str:
        return invoke("generate", "--prompt", "x", "--temperature", "1.5", "--seed", seed).stdout

    assert sample("1") == sample("1")
    assert sample("1") != sample("2")


def test_cache_options_reach_the_cache(artifact: Path) -> None:
    options = ("--prompt", "x" * 60, "--max-new-tokens", "2", "--json", "--method", "commvq")
    memory = json.loads(invoke("generate", *options, "--residual-length", "8", "--sink-length", "1").stdout)["memory"]
    assert memory["num_tokens"] - memory["num_encoded"] <= 8 + 1 + 2
    assert json.loads(invoke("generate", *options).stdout)["memory"]["num_encoded"] == 0


def test_settings_may_be_a_mapping_in_a_file(tiny: Any, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("method: kivi\nresidual_length: 16\nsetting:\n  k_bits: 4\n  group_size: 8\n")
    options = ("--config", "c.yaml", "--prompt", "x" * 60, "--max-new-tokens", "2", "--json")
    memory = json.loads(invoke("generate", *options).stdout)["memory"]
    assert memory["nominal_bits"] == [4, 2]


def test_more_tokens_than_the_model_knows_are_announced(tiny: Any) -> None:
    options = ("generate", "--method", "fp8", "--prompt", "x")
    assert "warning: " not in invoke(*options, "--max-new-tokens", "2").stderr
    long = invoke("generate", "--method", "fp8", "--prompt", "x " * 600, "--max-new-tokens", "1")
    assert long.exit_code == 0
    assert "warning: " in long.stderr


def test_an_artifact_names_its_method(artifact: Path) -> None:
    result = invoke("generate", "--artifact", str(artifact), "--prompt", "x", "--json")
    assert json.loads(result.stdout)["method"] == "commvq-2"


def test_a_prompt_inside_the_window_is_said_to_be_there_and_where_compression_starts(tiny: Any) -> None:
    options = ("generate", "--method", "rtn", "--setting", "group_size=8", "--max-new-tokens", "1", "--prompt")
    said = invoke(*options, "x" * 50, "--stats").stderr
    assert "all 50 tokens are inside the full-precision window; compression starts at 164 tokens" in said
    for length, encoded in ((163, False), (164, True)):
        memory = json.loads(invoke(*options, "x" * length, "--json").stdout)["memory"]
        assert (memory["num_encoded"] > 0) == encoded


def test_a_measured_row_is_shown_although_the_disk_is_full(tiny: Any, monkeypatch: Any) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "rows.jsonl")

    monkeypatch.setattr("kvcli.cli.suites.append_record", full)
    sizes = ("--seq-len", "64", "--num-sequences", "1", "--out", "rows.jsonl")
    result = invoke("eval", "--method", "fp16", *sizes)
    assert result.exit_code == 1
    assert "fp16" in result.stdout
    assert "the disk is full" in result.stderr
