"""Calibrate, train, export, generate, eval and bench, one after another; calibrating in shards."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, MagicMock

import pytest
from console import invoke, refused, result, says

from kvcli.calibrate import collect
from kvcli.eval import kl

SIZES = ("--tokens", "640", "--seq-len", "32", "--batch-size", "2", "--query-tokens", "128", "--fisher-tokens", "96")


def test_calibrate_train_export_generate_eval_bench_in_order_without_arguments(tiny: Any) -> None:
    Path("small.yaml").write_text("tokens: 1024\nseq-len: 64\nbatch_size: 4\nquery_tokens: 128\n")
    calibrated = result("calibrate", "--config", "small.yaml")
    assert calibrated.stdout == "runs/smollm2-135m/samples\n"
    assert "of disk" in calibrated.stderr
    small = ("--codebook-size", "8", "--num-residuals", "2", "--value-iterations", "2", "--key-iterations", "2")
    trained = result("train-codebook", "--bits", "1.5", *small)
    assert trained.stdout == "runs/smollm2-135m/commvq-1.5bit\n"
    assert "verified: " in trained.stderr
    assert "3 of 3 layers were fitted already" in result("train-codebook", "--bits", "1.5", *small).stderr
    exported = result("export")
    assert exported.stdout == "runs/smollm2-135m/commvq-1.5bit\n"
    assert "holds this artifact already" in exported.stderr
    generated = result("generate", "--method", "commvq", "--stats", "--max-new-tokens", "9")
    assert generated.stdout.startswith("The water cycle is")
    says(generated.stderr, "using runs/smollm2-135m/commvq-1.5bit\n", "KV cache")
    options = ("--seq-len", "128", "--num-sequences", "2", "--batch-size", "2", "--out", "rows.jsonl")
    fp16, commvq = result("eval", *options, "--json")["rows"]
    assert (fp16["method"], commvq["method"]) == ("fp16", "commvq-1.5")
    assert fp16["kl_mean"] < 1e-6
    assert commvq["kl_mean"] > 10 * fp16["kl_mean"]
    assert commvq["memory"]["num_encoded"] == 2 * (128 - 36)
    labels = [json.loads(line)["label"] for line in Path("rows.jsonl").read_text().splitlines()]
    assert labels == ["fp16", "commvq-1.5bit"]
    result("bench", "--shape", "tiny", "--contexts", "64", "--repeats", "3", "--method", "commvq-1")


def test_full_disk_is_named_and_what_was_finished_is_kept(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    full, write = OSError(28, "No space left on device", "part"), MagicMock(wraps=collect.write_part)
    write.side_effect = [DEFAULT, DEFAULT, full, DEFAULT, DEFAULT]
    monkeypatch.setattr(collect, "write_part", write)
    arguments = ("calibrate", "--tokens", "256", "--seq-len", "32", "--batch-size", "2", "--fisher-tokens", "0")
    assert "the disk is full" in refused(*arguments, code=1)
    result(*arguments)
    assert write.call_count == 3 + 2  # four parts, two of them kept


def test_wrong_inputs_and_outputs_are_refused_before_measuring(tiny: Any) -> None:
    Path("empty.txt").write_text("\n")
    assert "fewer than one sequence" in refused("calibrate", "--corpus", "empty.txt", code=1)
    Path("file").write_text("x")
    refused("calibrate", "--tokens", "64", "--seq-len", "64", "--out", "file/samples", code=1)
    assert Path("file").read_text() == "x"
    Path("folder").mkdir()
    words = ("eval", "--method", "fp16", "--out", "folder", "--seq-len", "64", "--num-sequences", "1")
    assert "uncompressed" not in result(*words, exit_code=1).stderr


def test_written_files_can_be_read_by_others(artifact: Path, tmp_path: Path) -> None:
    for folder in (artifact, tmp_path / "recorded", tmp_path / "fitted"):
        assert all(path.stat().st_mode & 0o044 == 0o044 for path in folder.iterdir())


def test_shards_are_recorded_and_merged_where_the_next_command_looks(tiny: Any) -> None:
    for index in (3, 1, 2):
        done = result("calibrate", *SIZES, "--shard", f"{index}/3", "--json")
        assert done["samples"] == f"runs/smollm2-135m/shards/{index}-of-3"
    record = result("merge", "--json")
    assert record == {"samples": "runs/smollm2-135m/samples", "num_tokens": 640, "layers": 3, "shards": 3}
    result("calibrate", *SIZES, "--out", "whole")
    whole, merged = (Path(folder).iterdir() for folder in ("whole", record["samples"]))
    assert {path.name: path.read_bytes() for path in whole} == {path.name: path.read_bytes() for path in merged}
    again = invoke("calibrate", *SIZES).stderr
    assert "were recorded already and are reused" in again
    assert "passes/s" not in again
    assert invoke("merge").stderr.splitlines()[-1] == "next: kvcli fit runs/smollm2-135m/samples"


def test_a_missing_shard_is_named(tiny: Any) -> None:
    assert invoke("merge").stderr == "error: no shards below runs/; run 'kvcli calibrate --shard' first\n"
    done = invoke("calibrate", *SIZES, "--shard", "2/3", "--out", "second")
    assert "when all are, put them together with 'kvcli merge'" in done.stderr
    assert "next:" not in done.stderr
    merged = invoke("merge", "second")
    assert (merged.exit_code, merged.stderr) == (1, "error: shard 1/3, 3/3 is missing\n")
    assert "kvcli merge" in refused("fit", "second", code=1)
    assert not Path("runs/smollm2-135m/samples").exists()


@pytest.mark.parametrize("shard", ["0/2", "3/2", "two", "1/99"])
def test_what_is_no_shard_is_refused(tiny: Any, shard: str) -> None:
    refused("calibrate", *SIZES, "--shard", shard)


def test_ranks_without_a_number_are_refused_by_commands_that_share_work(tiny: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    assert "RANK must be from 0 to WORLD_SIZE - 1" in refused("calibrate", *SIZES)
    result("methods")


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_demo_keeps_its_promises_and_a_second_run_reuses_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole pipeline on the real built-in model: what the README promises, with numbers of less text."""
    options = kl.KLOptions
    monkeypatch.setattr(kl, "KLOptions", lambda **given: options(**{**given, "seq_len": 256, "num_sequences": 1}))
    monkeypatch.setattr("kvcli.cli.demo._PROMPT_CHARACTERS", 1200)
    command = ("demo", "--json", "--tokens", "512", "--max-new-tokens")  # not 12288, the demo's own
    first = invoke(*command, "12")
    record = json.loads(first.stdout)
    assert record["true_bits"] <= 2.2
    assert record["kl_mean"] <= 0.15
    assert record["commvq"]["memory"]["num_encoded"] > 0
    assert record["commvq"]["new_tokens"] == record["fp16"]["new_tokens"] == 12
    assert "quick preset" in first.stderr
    second = invoke(*command, "4")
    again = json.loads(second.stdout)
    assert "30 of 30 layers were fitted already" in second.stderr
    assert again["seconds"]["train"] < 0.2 * record["seconds"]["train"]
    assert record["commvq"]["text"].startswith(again["commvq"]["text"])
    assert again["kl_mean"] == pytest.approx(record["kl_mean"], rel=1e-3)
