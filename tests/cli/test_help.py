"""Help, version and the commands that list: what every command promises."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from console import invoke, refused, result

from kvcli.registry import METHODS

COMMANDS = ("demo", "calibrate", "fit", "train-codebook", "fit-subspace", "export", "generate", "compress", "chat")
COMMANDS += ("eval", "bench", "methods", "env")


def test_help_is_fast_and_loads_no_torch() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "kvcli", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "torch" not in done.stderr
    for name in COMMANDS:
        assert name in done.stdout
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "kvcli", "--help"], capture_output=True, check=True)
    assert time.perf_counter() - started < 10  # the target of 0.5 s is measured, not asserted, on shared machines


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_ends_its_help_with_an_example(name: str) -> None:
    shown = result(name, "--help").stdout
    assert "Example: kvcli" in shown
    if suite := {"eval": "kl", "bench": "attention"}.get(name):
        shown = result(name, suite, "--help").stdout
    assert all(flag in shown for flag in ("--json", "--config", "--quiet", "--verbose", "--debug"))
    assert ("--seed" in shown) == ("--device" in shown) == (name not in ("export", "methods", "env"))


def test_version() -> None:
    assert re.fullmatch(r"kvcli \d+\.\d+\.\d+\n", invoke("--version").stdout)


def test_methods_and_env_give_one_json_object() -> None:
    assert [method["name"] for method in result("methods", "--json")["methods"]] == list(METHODS)
    bits = result("methods", "--bits", "llama-3.1-8b", "--contexts", "4096", "--json")["rows"]
    assert {row["method"]: row["key_bits"] for row in bits}["commvq-1"] == pytest.approx(1072 / 1024)
    refused("methods", "--bits", "gpt-9")
    env = result("env", "--json")
    assert env["packages"]["torch"]
    assert env["cpu_count"] >= 1
    assert "commvq" in invoke("methods").stdout


SLIPS = {
    "generate --method kivvi": (2, "did you mean 'kivi-2'?"),
    "generate --method kivi-3": (2, "choose kivi-1, kivi-2, kivi-4 or kivi-8"),
    "generate --method turboquant-7": (2, "choose turboquant-1, turboquant-2"),
    "generate --method kivi-2 --setting k_bit=2": (2, "did you mean 'k_bits'?"),
    "generate --method oscar-2 --artifact missing": (1, "no artifact in missing"),
    "generate --method magic": (2, "choose one of fp16"),
    "generate --method commvq": (1, "kvcli fit --method commvq"),
    "generate --context missing --prompt x": (1, "no context 'missing'"),
    "generate --context x --reuse --prompt x": (2, "give one of them"),
    "generate --prompt-file missing": (2, "cannot read missing"),
    "generate --prompt x --prompt-file y": (2, "exclude each other"),
    "generate no-such-folder": (1, "no such folder"),
    "generate missing.gguf": (1, "no such GGUF file"),
    "generate --impl fussed": (2, "auto, fused or reference"),
    "generate --bits 2": (2, "--method NAME-2"),
    "chat --resume missing": (1, "no context 'missing'"),
    "chat --method kivvi": (2, "did you mean 'kivi-2'?"),
    "compress --prompt-file missing": (2, "cannot read missing"),
    "calibrate --corpus missing.txt": (1, "missing.txt"),
    "fit --method kivvi": (2, "did you mean 'kivi-2'?"),
    "fit missing": (1, "no recorded samples in missing"),
    "train-codebook --codebook-size 1000": (2, "--codebook-size"),
    "export missing": (1, "no run in missing"),
    "fit": (1, "kvcli calibrate"),
    "train-codebook": (1, "kvcli calibrate"),
    "export": (1, "kvcli fit"),
    "methods kivvi": (2, "did you mean 'kivi-2'?"),
}


def test_slips_are_told_before_torch_is_imported(tmp_path: Path) -> None:
    program = f"""
import contextlib, io, sys
from kvcli.cli.app import run_command_line
for line, (exit_code, expected) in {SLIPS!r}.items():
    sys.argv = ["kvcli", *line.split()]
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = run_command_line()
    assert code == exit_code and expected in said.getvalue(), (line, code, said.getvalue())
    assert not {{"torch", "transformers"}} & sys.modules.keys(), line
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["generate", "chat", "compress", "calibrate", "fit", "train-codebook"])
def test_options_are_in_groups_and_fit_100_columns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    shown = invoke(name, "--help").stdout
    assert max(map(len, shown.splitlines())) <= 100
    assert "…" not in shown
    flags = re.findall(r"^│ (--[a-z-]+)", shown, re.MULTILINE)
    machine = [flag for flag in ("--device", "--dtype", "--seed") if flag in flags]
    place = flags.index(machine[0])
    assert flags[place : place + len(machine)] == machine
    assert flags.index("--out" if "--out" in flags else "--store") < place
    if "--prompt" in flags:
        assert flags[0] == "--prompt"
