"""The command line: output discipline, exit codes, configuration files, one-line errors."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import CONFIG, load, make_model, record
from typer.testing import CliRunner

from kvcli.cli.app import app
from kvcli.cli.output import Output, describe_error, duration, size
from kvcli.errors import KvcliError, QualityError
from kvcli.fit import assemble, fit_recording
from kvcli.registry import get_method

COMMANDS = ("demo", "calibrate", "train-codebook", "fit-subspace", "export", "generate", "eval", "methods", "env")


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Words:
    """A tokenizer of the tiny models: every character is a token."""

    eos_token_id = pad_token_id = 0
    bos_token_id = 1
    chat_template = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [3 + ord(c) % 90 for c in text]}

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(chr(97 + int(i) % 26) for i in ids)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets every command load a tiny model instead of a real one."""
    from dataclasses import replace

    from kvcli import models

    made = replace(load(make_model("llama")), tokenizer=Words())
    monkeypatch.setattr(models, "load_model", lambda name="tiny", **_: replace(made, name=name))
    return made


@pytest.fixture
def artifact(tiny: Any, tmp_path: Path) -> Path:
    """An artifact for the tiny model where `generate` looks for it."""
    recording = record(tiny.model, tmp_path / "recorded")
    fit_recording(recording, get_method("commvq"), CONFIG.resolve(recording.spec), tmp_path / "fitted")
    folder = tmp_path / "runs" / "smollm2-135m" / "commvq-2bit"
    assemble([tmp_path / "fitted"]).save(folder)
    return folder


def test_help_is_fast_and_loads_no_torch() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "kvcli", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "torch" not in done.stderr
    for name in COMMANDS:
        assert name in done.stdout
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "kvcli", "--help"], capture_output=True, check=True)
        seconds.append(time.perf_counter() - started)
    assert (
        min(seconds) < 5
    )  # a guard against loading torch; the target of 0.5 s is measured, not asserted, on shared machines


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_ends_its_help_with_an_example(name: str) -> None:
    result = invoke(name, "--help")
    assert result.exit_code == 0
    assert "Example: kvcli" in result.stdout
    for flag in ("--json", "--seed", "--config", "--debug"):
        assert flag in result.stdout


def test_version() -> None:
    assert re.fullmatch(r"kvcli \d+\.\d+\.\d+\n", invoke("--version").stdout)


def test_methods_and_env_give_one_json_object() -> None:
    methods = json.loads(invoke("methods", "--json").stdout)["methods"]
    assert {"fp16", "fp8", "rtn", "kivi", "squat", "squat-pre", "qjl", "commvq"} == {m["name"] for m in methods}
    bits = json.loads(invoke("methods", "--bits", "llama-3.1-8b", "--contexts", "4096", "--json").stdout)["rows"]
    assert {row["method"]: row["key_bits"] for row in bits}["commvq-1"] == pytest.approx(1072 / 1024)
    assert invoke("methods", "--bits", "gpt-9").exit_code == 2
    env = json.loads(invoke("env", "--json").stdout)
    assert env["packages"]["torch"]
    assert env["cpu_count"] >= 1
    assert "commvq" in invoke("methods").stdout


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
    assert "held-out error" in trained.stderr
    again = invoke("train-codebook", *small)
    assert "3 of 3 layers were trained already" in again.stderr
    exported = invoke("export")
    assert exported.stdout == "runs/smollm2-135m/commvq-2bit\n"
    assert "holds this artifact already" in invoke("export").stderr
    generated = invoke("generate", "--method", "commvq", "--stats", "--max-new-tokens", "9")
    assert generated.exit_code == 0, generated.stderr
    assert generated.stdout.startswith("The water cycle is")
    assert "KV cache" in generated.stderr
    options = ("--seq-len", "128", "--num-sequences", "2", "--batch-size", "2", "--out", "rows.jsonl")
    measured = invoke("eval", *options, "--json")
    assert measured.exit_code == 0, measured.stderr
    rows = json.loads(measured.stdout)["rows"]
    assert [row["method"] for row in rows] == ["fp16", "commvq"]
    assert rows[0]["kl_mean"] < 1e-6
    assert rows[1]["kl_mean"] > 10 * rows[0]["kl_mean"]
    assert [json.loads(line)["label"] for line in Path("rows.jsonl").read_text().splitlines()] == [
        "fp16",
        "commvq-2bit",
    ]
    assert rows[1]["memory"]["num_encoded"] == 2 * (128 - 36)
    reordered = json.loads(invoke("eval", *options, "--method", "commvq", "--impl", "reordered", "--json").stdout)
    assert reordered["rows"][0]["kl_mean"] == pytest.approx(rows[1]["kl_mean"], rel=1e-3)


@pytest.mark.parametrize("method", ["squat", "squat-pre"])
def test_subspace_is_fitted_exported_and_used(tiny: Any, tmp_path: Path, method: str) -> None:
    record(tiny.model, tmp_path / "recorded")
    small = ("--group-size", "8", "--residual-length", "8")
    fitted = invoke("fit-subspace", "recorded", "--method", method, *small)
    assert fitted.exit_code == 0, fitted.stderr
    assert "of the queries' energy" in fitted.stderr
    folder = invoke("export").stdout.strip()
    assert folder == f"runs/tiny/{method}-subspace"
    used = invoke("generate", "--method", method, "--artifact", folder, "--prompt", "x" * 50, "--json")
    assert used.exit_code == 0, used.stderr
    assert json.loads(used.stdout)["memory"]["num_encoded"] > 40
    onthefly = invoke("generate", "--method", method, "--setting", "group_size=8", "--prompt", "x" * 50, "--json")
    assert onthefly.exit_code == 0, onthefly.stderr


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


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("train-codebook", "--bits", "3", "--samples", "x"), 2, ""),
        (("train-codebook", "x", "--bits", "3"), 2, "--bits"),
        (("train-codebook", "nowhere"), 1, "kvcli calibrate"),
        (("train-codebook",), 1, "kvcli calibrate"),
        (("export",), 1, "kvcli train-codebook"),
        (("generate", "--method", "commvq"), 1, "kvcli export"),
        (("generate", "--method", "magic"), 2, "choose one of fp16"),
        (("generate", "no/such/model/here"), 1, "cannot load model"),
        (("generate", "nothing.gguf"), 1, "no such GGUF"),
        (("generate", "--temperature", "-1"), 2, "--temperature"),
        (("generate", "--max-new-tokens", "many"), 2, ""),
        (("calibrate", "--tokens", "0"), 2, "--tokens"),
        (("generate", "--device", "toaster"), 2, "--device cpu"),
        (("generate", "--seed", "99999999999999999999"), 2, "--seed"),
        (("generate", "--prompt-file", "."), 2, "directory"),
        (("methods", "--bits", "llama-3.1-8b", "--contexts", "0"), 2, "--contexts"),
        (("calibrate", "--corpus", "."), 1, "holds no"),
        (("calibrate", "--config", "missing.yaml"), 2, "missing.yaml"),
        (("nonsense",), 2, ""),
    ],
)
def test_bad_input_gets_one_line_and_its_exit_code(arguments: tuple[str, ...], code: int, said: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == code, result.stderr
    assert result.stdout == ""
    if said:
        error = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        assert len(error) == 1
        assert said in error[0]
        assert "Traceback" not in result.stderr


def test_empty_corpus_and_unwritable_folder(tiny: Any, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    result = invoke("calibrate", "--corpus", "empty.txt")
    assert result.exit_code == 1
    assert "fewer than one sequence" in result.stderr
    (tmp_path / "file").write_text("x")
    result = invoke("calibrate", "--tokens", "64", "--seq-len", "64", "--out", "file/samples")
    assert result.exit_code == 1
    assert (tmp_path / "file").read_text() == "x"


def test_full_disk_is_named_and_what_was_finished_is_kept(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import kvcli.calibrate.collect as module

    write, calls = module.write_part, []

    def full(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise OSError(28, "No space left on device", "part")
        write(*arguments)

    monkeypatch.setattr(module, "write_part", full)
    arguments = ("calibrate", "--tokens", "256", "--seq-len", "32", "--batch-size", "2")
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert "the disk is full" in result.stderr
    assert invoke(*arguments).exit_code == 0
    assert len(calls) == 3 + 2  # four parts, two of them kept


def test_errors_are_json_too() -> None:
    result = invoke("export", "--json")
    assert json.loads(result.stdout)["exit_code"] == result.exit_code == 1


def test_debug_shows_the_traceback() -> None:
    result = invoke("export", "--debug")
    assert isinstance(result.exception, KvcliError)


def test_unknown_config_keys_get_a_suggestion(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("tokns: 3\n")
    result = invoke("calibrate", "--config", "c.yaml")
    assert result.exit_code == 2
    assert "did you mean 'tokens'?" in result.stderr
    (tmp_path / "c.yaml").write_text("- 3\n")
    assert invoke("calibrate", "--config", "c.yaml").exit_code == 2
    (tmp_path / "c.yaml").write_text("a: [\n")
    assert "not valid YAML" in invoke("calibrate", "--config", "c.yaml").stderr


def test_flags_win_over_the_file(tiny: Any, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("tokens: 256\nseq_len: 64\n")
    found = json.loads(invoke("calibrate", "--config", "c.yaml", "--tokens", "128", "--json").stdout)
    assert found["num_tokens"] == 128


class OutOfMemoryError(RuntimeError):
    """Named as torch names it."""


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KvcliError("a\n b"), 1, "a b"),
        (QualityError("x"), 3, "x"),
        (KeyboardInterrupt(), 130, "resume"),
        (OSError(28, "No space left on device", "f"), 1, "disk is full (f)"),
        (PermissionError(13, "Permission denied", "/root/x"), 1, "cannot write to /root/x"),
        (OutOfMemoryError("CUDA out of memory"), 1, "--batch-size"),
        (ZeroDivisionError("division by zero"), 1, "--debug"),
    ],
)
def test_error_table(error: BaseException, code: int, said: str) -> None:
    found, line = describe_error(error)
    assert found == code
    assert said in line
    assert "\n" not in line


def test_progress_talks_plainly_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Output().progress("work", 4, "steps") as advance:
        for _ in range(4):
            advance(1)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "work: 4/4 steps" in captured.err


def test_units() -> None:
    assert [size(x) for x in (0, 1023, 1536, 3 * 2**20, 5 * 2**30)] == [
        "0 B",
        "1023 B",
        "1.50 KiB",
        "3.00 MiB",
        "5.00 GiB",
    ]
    assert duration(61.4) == "1:01"


def test_cuda_is_the_default_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcli.cli.options import Options

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert Options().torch_device() == "cuda"


@pytest.mark.parametrize("arguments", [["--nope"], ["nonsense"], ["generate", "--max-new-tokens", "many"]])
def test_misused_flags_are_one_line_too(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "kvcli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    assert json.loads(done.stdout)["exit_code"] == 2


def test_eval_refuses_an_unusable_output_before_measuring(tiny: Any, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    result = invoke("eval", "--method", "fp16", "--out", "folder", "--seq-len", "64", "--num-sequences", "1")
    assert result.exit_code == 1
    assert "uncompressed" not in result.stderr


def test_written_files_can_be_read_by_others(artifact: Path, tmp_path: Path) -> None:
    files = [*artifact.iterdir(), *(tmp_path / "recorded").iterdir(), *(tmp_path / "fitted").iterdir()]
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in files)
