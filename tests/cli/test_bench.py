"""`kvcli bench`: the suite `attention`, records and exit codes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commvq_reordered import reordered_attend
from console import invoke, result

from kvcli.bench.suite import default_methods
from kvcli.methods.layer_codec import AttendCodes
from kvcli.registry import METHODS, get_method

GROUPS = ("--settings", "group_size=8", "--settings", "residual_length=8")
BOOKS = ("--settings", "codebook_size=8")
ATTENTION = ("bench", "--shape", "tiny", "--contexts", "64", "--repeats", "3")


def attend_with(monkeypatch: pytest.MonkeyPatch, attend_codes: AttendCodes) -> None:
    """Replaces attention over codes in the suite `attention`."""
    backend = SimpleNamespace(impl="fake", attend_codes=attend_codes)
    monkeypatch.setattr("kvcli.attention.backend.choose_backend", lambda *_: backend)


def test_records_name_the_default_methods() -> None:
    names = default_methods()
    assert names == [name for method in map(get_method, METHODS) for name in method.bench]
    of_papers = ["kivi-2", "kivi-4", "squat-2", "squat-pre-2", "qjl", "commvq-1", "commvq-2"]
    assert [name for name in names if name.startswith(("kivi", "squat", "qjl", "commvq"))] == of_papers
    assert default_methods(few=True) == ["kivi-2", "commvq-1"]
    assert default_methods(kinds_only=True) == ["kivi-2", "kivi-4", "commvq-1", "commvq-2"]


def test_attention_gives_a_table_and_a_record_per_row() -> None:
    words = ("--methods", "kivi-2", "--methods", "commvq-2", "--batches", "1", "--batches", "2")
    done = result(*ATTENTION, *GROUPS, *BOOKS, *words)
    assert "no GPU" in done.stderr
    assert done.stdout.count("kivi-2") == 2
    records = [json.loads(line) for line in Path("runs/bench/attention.jsonl").read_text().splitlines()]
    assert [record["method"] for record in records] == ["fp16", "kivi-2", "commvq-2"] * 2
    for record in records:
        assert record["machine"]["packages"]["torch"]
        assert "commit" in record["machine"]
        assert (record["shape"], record["seed"], record["weights"], record["layer"]) == ("tiny", 0, "random", 2)
        assert record["options"]["setting"] == [*GROUPS[1::2], *BOOKS[1::2]]
        assert record["p50_us"] > 0


def test_json_is_one_object_and_out_is_appended_to() -> None:
    for count in (2, 4):
        shown = result(*ATTENTION, *GROUPS, "--methods", "kivi-4", "--out", "rows.jsonl", "--json")
        assert [row["method"] for row in shown["rows"]] == ["fp16", "kivi-4"]
        assert shown["machine"]["cpu_count"] >= 1
        assert len(Path("rows.jsonl").read_text().splitlines()) == count
    assert not Path("runs").exists()


def test_a_mismatch_shows_no_time_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def attend(*arguments: Any) -> Any:
        calls.append(1)
        out, lse = reordered_attend(*arguments)
        return 1.1 * out, lse

    attend_with(monkeypatch, attend)
    options = (*BOOKS, "--methods", "commvq-2")
    done = result(*ATTENTION, *options, exit_code=1)
    assert len(calls) == 1
    line = next(line for line in done.stdout.splitlines() if "commvq-2" in line)
    assert "MISMATCH" in line
    assert "1.0e-01" in line
    assert line.count(" - ") == 6
    assert "error: commvq-2, 64 tokens, batch 1: differs" in done.stderr
    row = result(*ATTENTION, *options, "--json", exit_code=1)["rows"][1]
    assert {row[x] for x in ("p20_us", "p50_us", "p80_us", "eager_us", "speedup", "stored_gb_s")} == {None}


@pytest.mark.parametrize("where", ["--json", "rows.jsonl"])
def test_numbers_that_json_does_not_have_are_null(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def attend(*arguments: Any) -> Any:
        out, lse = reordered_attend(*arguments)
        return out * float("nan"), lse

    def refuse(text: str) -> None:
        raise AssertionError(text)

    attend_with(monkeypatch, attend)
    options = (*BOOKS, "--methods", "commvq-2", "--out", "rows.jsonl", "--json")
    done = invoke(*ATTENTION, *options)
    assert done.exit_code == 1
    text = done.stdout if where == "--json" else Path(where).read_text().splitlines()[-1]
    record = json.loads(text, parse_constant=refuse)
    record = record["rows"][-1] if where == "--json" else record
    assert (record["status"], record["out_error"]) == ("mismatch", None)


def test_records_are_appended_after_a_truncated_line() -> None:
    path = Path("rows.jsonl")
    path.write_text('{"suite": "atten')
    result(*ATTENTION, *GROUPS, "--methods", "kivi-4", "--out", str(path))
    lines = path.read_text().splitlines()
    assert [json.loads(line)["method"] for line in lines[1:]] == ["fp16", "kivi-4"]


def test_records_go_into_a_pipe() -> None:
    reading, writing = os.pipe()
    result(*ATTENTION, *GROUPS, "--methods", "kivi-4", "--out", f"/dev/fd/{writing}")
    lines = os.read(reading, 2**16).decode().splitlines()
    assert [json.loads(line)["method"] for line in lines] == ["fp16", "kivi-4"]


def test_rows_before_an_interruption_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    attend_with(monkeypatch, attend)
    done = result(*ATTENTION, *BOOKS, "--methods", "commvq-2", exit_code=130)
    assert "fp16" in done.stdout
    assert "stopped after 1 row\n" in done.stderr
    assert done.stderr.endswith("error: interrupted; run the same command again to start over\n")
    assert "resume" not in done.stderr


def test_methods_are_measured_once_and_named_with_their_bits() -> None:
    methods = ("--methods", "fp16", "--methods", "kivi", "--methods", "kivi-2")
    rows = result(*ATTENTION, *GROUPS, *methods, "--json")["rows"]
    assert [row["method"] for row in rows] == ["fp16", "kivi-2"]


def test_nothing_but_refusals_is_an_error() -> None:
    refused, other = ("--methods", "commvq-2", "--settings", "pairs_per_group=5"), ("--methods", "kivi-4", *GROUPS)
    assert invoke(*ATTENTION, *refused).exit_code == 1
    assert invoke(*ATTENTION, *refused, *other).exit_code == 0


@pytest.mark.parametrize("value", ["0", "1"])
def test_records_say_whether_kernels_were_interpreted(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", value)
    rows = result(*ATTENTION, *GROUPS, "--methods", "kivi-4", "--json")["rows"]
    assert [row["interpreted"] for row in rows] == [value == "1"] * 2


def test_a_failure_is_said_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(*arguments: Any) -> Any:
        raise LookupError("out of resource")

    attend_with(monkeypatch, attend)
    done = result(*ATTENTION, *BOOKS, "--methods", "commvq-2", "--contexts", "32", exit_code=1)
    assert done.stdout.count("fake: FAILED") == 2
    assert "error: commvq-2, 32 tokens, batch 1: LookupError: out of resource (test_bench.py" in done.stderr
    assert done.stderr.count("Traceback") == 0
