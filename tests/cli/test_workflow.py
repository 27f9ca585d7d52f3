"""Calibrate, train, export, generate, eval and bench, one after another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from console import invoke
from factories import record

from kvcli.registry import get_method


def test_calibrate_train_export_generate_eval_in_order_without_arguments(tiny: Any, tmp_path: Path) -> None:
    config = tmp_path / "small.yaml"
    config.write_text("tokens: 1024\nseq-len: 64\nbatch_size: 4\nquery_tokens: 128\n")
    calibrated = invoke("calibrate", "--config", str(config), "--json")
    assert calibrated.exit_code == 0, calibrated.stderr
    assert json.loads(calibrated.stdout)["num_tokens"] == 1024
    assert "of disk" in calibrated.stderr
    small = ("--codebook-size", "8", "--num-residuals", "2", "--value-iterations", "2", "--key-iterations", "2")
    trained = invoke("train-codebook", *small)
    assert trained.exit_code == 0, trained.stderr
    assert trained.stdout == "runs/smollm2-135m/training/commvq-2bit\n"
    assert "verified: " in trained.stderr
    assert all(label in trained.stderr for label in get_method("commvq").fit_metrics.values())
    again = invoke("train-codebook", *small)
    assert "3 of 3 layers were fitted already" in again.stderr
    exported = invoke("export")
    assert exported.stdout == "runs/smollm2-135m/commvq-2bit\n"
    assert "holds this artifact already" in exported.stderr
    assert "holds this artifact already" in invoke("export").stderr
    generated = invoke("generate", "--method", "commvq", "--stats", "--max-new-tokens", "9")
    assert generated.exit_code == 0, generated.stderr
    assert generated.stdout.startswith("The water cycle is")
    assert "KV cache" in generated.stderr
    options = ("--seq-len", "128", "--num-sequences", "2", "--batch-size", "2", "--out", "rows.jsonl")
    measured = invoke("eval", *options, "--json")
    assert measured.exit_code == 0, measured.stderr
    rows = json.loads(measured.stdout)["rows"]
    assert [row["method"] for row in rows] == ["fp16", "commvq-2"]
    assert rows[0]["kl_mean"] < 1e-6
    assert rows[1]["kl_mean"] > 10 * rows[0]["kl_mean"]
    assert [json.loads(line)["label"] for line in Path("rows.jsonl").read_text().splitlines()] == [
        "fp16",
        "commvq-2bit",
    ]
    assert rows[1]["memory"]["num_encoded"] == 2 * (128 - 36)


def test_the_four_commands_of_the_design_card(tiny: Any, tmp_path: Path) -> None:
    """Each is typed as it is there, but for sizes that a test has time for."""
    calibrated = invoke("calibrate", "--tokens", "512", "--seq-len", "64", "--query-tokens", "128")
    assert calibrated.exit_code == 0, calibrated.stderr
    small = ("--codebook-size", "8", "--num-residuals", "2", "--value-iterations", "2", "--key-iterations", "2")
    trained = invoke("train-codebook", "--bits", "1.5", *small)
    assert trained.exit_code == 0, trained.stderr
    generated = invoke("generate", "--method", "commvq", "--max-new-tokens", "4", "--json")
    assert generated.exit_code == 0, generated.stderr
    assert "using runs/smollm2-135m/commvq-1.5bit\n" in generated.stderr
    assert json.loads(generated.stdout)["method"] == "commvq-1.5"
    timed = invoke("bench", "--shape", "tiny", "--contexts", "64", "--repeats", "3", "--methods", "commvq-1")
    assert timed.exit_code == 0, timed.stderr


@pytest.mark.parametrize("method", ["squat", "squat-pre"])
def test_subspace_is_fitted_exported_and_used(tiny: Any, tmp_path: Path, method: str) -> None:
    record(tiny.model, tmp_path / "recorded")
    small = ("--group-size", "8", "--residual-length", "8")
    fitted = invoke("fit-subspace", "recorded", "--method", method, *small)
    assert fitted.exit_code == 0, fitted.stderr
    assert all(label in fitted.stderr for label in get_method(method).fit_metrics.values())
    folder = invoke("export").stdout.strip()
    assert folder == f"runs/tiny/{method}-subspace"
    used = invoke("generate", "--method", method, "--artifact", folder, "--prompt", "x" * 50, "--json")
    assert used.exit_code == 0, used.stderr
    assert json.loads(used.stdout)["memory"]["num_encoded"] > 40
    onthefly = invoke("generate", "--method", method, "--setting", "group_size=8", "--prompt", "x" * 50, "--json")
    assert onthefly.exit_code == 0, onthefly.stderr


def test_full_disk_is_named_and_what_was_finished_is_kept(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import kvcli.calibrate.collect as module

    write, calls = module.write_part, []

    def full(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise OSError(28, "No space left on device", "part")
        write(*arguments)

    monkeypatch.setattr(module, "write_part", full)
    arguments = ("calibrate", "--tokens", "256", "--seq-len", "32", "--batch-size", "2", "--fisher-tokens", "0")
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert "the disk is full" in result.stderr
    assert invoke(*arguments).exit_code == 0
    assert len(calls) == 3 + 2  # four parts, two of them kept


def test_empty_corpus_and_unwritable_folder(tiny: Any, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    result = invoke("calibrate", "--corpus", "empty.txt")
    assert result.exit_code == 1
    assert "fewer than one sequence" in result.stderr
    (tmp_path / "file").write_text("x")
    result = invoke("calibrate", "--tokens", "64", "--seq-len", "64", "--out", "file/samples")
    assert result.exit_code == 1
    assert (tmp_path / "file").read_text() == "x"


def test_eval_refuses_an_unusable_output_before_measuring(tiny: Any, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    result = invoke("eval", "--method", "fp16", "--out", "folder", "--seq-len", "64", "--num-sequences", "1")
    assert result.exit_code == 1
    assert "uncompressed" not in result.stderr


def test_written_files_can_be_read_by_others(artifact: Path, tmp_path: Path) -> None:
    files = [*artifact.iterdir(), *(tmp_path / "recorded").iterdir(), *(tmp_path / "fitted").iterdir()]
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in files)
