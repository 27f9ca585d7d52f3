"""Calibrate, train, export, generate, eval and bench, one after another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from console import invoke, refused, result

import kvcli.calibrate.collect as module
from kvcli.registry import get_method


def test_calibrate_train_export_generate_eval_bench_in_order_without_arguments(tiny: Any) -> None:
    Path("small.yaml").write_text("tokens: 1024\nseq-len: 64\nbatch_size: 4\nquery_tokens: 128\n")
    calibrated = result("calibrate", "--config", "small.yaml")
    assert calibrated.stdout == "runs/smollm2-135m/samples\n"
    assert "of disk" in calibrated.stderr
    small = ("--codebook-size", "8", "--num-residuals", "2", "--value-iterations", "2", "--key-iterations", "2")
    trained = result("train-codebook", "--bits", "1.5", *small)
    assert trained.stdout == "runs/smollm2-135m/training/commvq-1.5bit\n"
    assert "verified: " in trained.stderr
    assert all(label in trained.stderr for label in get_method("commvq").fit_metrics.values())
    again = result("train-codebook", "--bits", "1.5", *small)
    assert "3 of 3 layers were fitted already" in again.stderr
    exported = result("export")
    assert exported.stdout == "runs/smollm2-135m/commvq-1.5bit\n"
    assert "holds this artifact already" in exported.stderr
    generated = result("generate", "--method", "commvq", "--stats", "--max-new-tokens", "9")
    assert generated.stdout.startswith("The water cycle is")
    assert "using runs/smollm2-135m/commvq-1.5bit\n" in generated.stderr
    assert "KV cache" in generated.stderr
    options = ("--seq-len", "128", "--num-sequences", "2", "--batch-size", "2", "--out", "rows.jsonl")
    rows = result("eval", *options, "--json")["rows"]
    assert [row["method"] for row in rows] == ["fp16", "commvq-1.5"]
    assert rows[0]["kl_mean"] < 1e-6
    assert rows[1]["kl_mean"] > 10 * rows[0]["kl_mean"]
    labels = [json.loads(line)["label"] for line in Path("rows.jsonl").read_text().splitlines()]
    assert labels == ["fp16", "commvq-1.5bit"]
    assert rows[1]["memory"]["num_encoded"] == 2 * (128 - 36)
    result("bench", "--shape", "tiny", "--contexts", "64", "--repeats", "3", "--methods", "commvq-1")


@pytest.mark.parametrize("method", ["squat", "squat-pre"])
def test_subspace_is_fitted_exported_and_used(recorded: Any, method: str) -> None:
    small = ("--group-size", "8", "--residual-length", "8")
    fitted = result("fit-subspace", "recorded", "--method", method, *small)
    assert all(label in fitted.stderr for label in get_method(method).fit_metrics.values())
    folder = invoke("export").stdout.strip()
    assert folder == f"runs/tiny/{method}-subspace"
    words = ("generate", "--method", method, "--prompt", "x" * 50, "--json")
    assert result(*words, "--artifact", folder)["memory"]["num_encoded"] > 40
    result(*words, "--setting", "group_size=8")


def test_full_disk_is_named_and_what_was_finished_is_kept(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write, calls = module.write_part, []

    def full(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise OSError(28, "No space left on device", "part")
        write(*arguments)

    monkeypatch.setattr(module, "write_part", full)
    arguments = ("calibrate", "--tokens", "256", "--seq-len", "32", "--batch-size", "2", "--fisher-tokens", "0")
    assert "the disk is full" in refused(*arguments, code=1)
    result(*arguments)
    assert len(calls) == 3 + 2  # four parts, two of them kept


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
    files = [*artifact.iterdir(), *(tmp_path / "recorded").iterdir(), *(tmp_path / "fitted").iterdir()]
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in files)
