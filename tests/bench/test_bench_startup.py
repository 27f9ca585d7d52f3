"""`python -m research bench startup`: processes of their own, and what the table compares."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from laboratory import run_research

from research import startup

TINY = ("--random-weights", "tiny", "--layers", "1", "--prompt-tokens", "60", "--device", "cpu")


def test_a_process_is_timed_from_its_start(tmp_path: Path) -> None:
    options = startup.StartupOptions(
        random_weights="tiny", layers=1, prompt_tokens=60, device="cpu", setting=["group_size=8"], out=tmp_path / "x"
    )
    run = startup._run(options, "kivi-2", str(tmp_path))
    assert 0 <= run["warmup_s"] < run["s"] < run["tokens_s"]
    assert (run["impl"], run["kernels"], run["later"]) == ("reference", 0, 0)


def test_rows_are_compared_with_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter((10.0, 9.0, 25.0, 9.5))
    folders = []

    def run(options: Any, method: str, folder: str) -> dict[str, Any]:
        folders.append(folder)
        time = next(seconds)
        return {"s": time, "tokens_s": time + 1, "warmup_s": 0.5, "kernels": 3, "later": 0, "impl": "fused"}

    monkeypatch.setattr(startup, "_run", run)
    done = run_research("bench", "startup", *TINY, "--method", "kivi-2", "--setting", "group_size=8", "--json")
    fp16, kivi = json.loads(done.stdout.splitlines()[0])["rows"]
    assert (fp16["cold_extra_s"], fp16["warm_extra_s"]) == (0, 0)
    assert (kivi["cold_extra_s"], kivi["warm_extra_s"], kivi["cold_s"]) == (15, 0.5, 25)
    assert folders[0] == folders[1] != folders[2] == folders[3]
    assert not any(Path(folder).exists() for folder in folders)


def test_a_process_that_fails_is_a_failed_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'Traceback' >&2\necho 'OutOfResources: shared memory' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    first, _ = startup.prepare(startup.StartupOptions(random_weights="tiny", method=["kivi-2"]), startup.Silent()).rows
    assert first.status == "failed"
    assert str(first.note).startswith("KvcliError: OutOfResources: shared memory")
