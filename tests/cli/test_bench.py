"""`kvcli bench`: tables, records and exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from console import invoke

from kvcli.methods.commvq.attend import reordered_attend
from kvcli.registry import get_method

GROUPS = ("--settings", "group_size=8", "--settings", "residual_length=8")
BOOKS = ("--settings", "codebook_size=8")
ATTENTION = ("bench", "--shape", "tiny", "--contexts", "64", "--repeats", "3")


def test_attention_gives_a_table_and_a_record_a_row() -> None:
    found = invoke(
        *ATTENTION, *GROUPS, *BOOKS, "--methods", "kivi-2", "--methods", "commvq-2", "--batches", "1", "--batches", "2"
    )
    assert found.exit_code == 0, found.stderr
    assert "no GPU" in found.stderr
    assert found.stdout.count("kivi-2") == 2
    records = [json.loads(line) for line in Path("runs/bench/attention.jsonl").read_text().splitlines()]
    assert [record["method"] for record in records] == ["fp16", "kivi-2", "commvq-2"] * 2
    for record in records:
        assert record["machine"]["packages"]["torch"]
        assert "commit" in record["machine"]
        assert (record["shape"], record["seed"], record["weights"], record["layer"]) == ("tiny", 0, "random", 2)
        assert record["options"]["settings"] == [*GROUPS[1::2], *BOOKS[1::2]]
        assert record["p50_us"] > 0


def test_json_is_one_object_and_out_is_appended_to() -> None:
    for count in (2, 4):
        found = invoke(*ATTENTION, *GROUPS, "--methods", "kivi-4", "--out", "rows.jsonl", "--json")
        shown = json.loads(found.stdout)
        assert [row["method"] for row in shown["rows"]] == ["fp16", "kivi-4"]
        assert shown["machine"]["cpu_count"] >= 1
        assert len(Path("rows.jsonl").read_text().splitlines()) == count
    assert not Path("runs").exists()


def test_a_mismatch_shows_no_time_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def form(*arguments: Any) -> Any:
        out, lse = reordered_attend(*arguments)
        return 1.1 * out, lse

    monkeypatch.setitem(get_method("commvq").attend_forms, "reordered", form)  # type: ignore[arg-type]
    options = (*BOOKS, "--methods", "commvq-2", "--impl", "reordered")
    found = invoke(*ATTENTION, *options)
    assert found.exit_code == 1
    line = next(line for line in found.stdout.splitlines() if "commvq-2" in line)
    assert "MISMATCH" in line
    assert "1.0e-01" in line
    assert line.count(" - ") == 6
    assert "error: commvq-2 at 64 tokens" in found.stderr
    shown = json.loads(invoke(*ATTENTION, *options, "--json").stdout)
    assert shown["rows"][1]["p50_us"] is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--methods", "magic"), "choose one of fp16"),
        (("--methods", "fp16-3"), "takes no bits"),
        (("--shape", "gpt-9"), "llama-3.1-8b"),
        (("--contexts", "0"), "--contexts"),
        (("--batches", "-1"), "--batches"),
        (("--layer", "3", "--shape", "tiny"), "layers 0 to 2"),
        (("--settings", "colour=3"), "colour"),
        (("--settings", "k_bits=3"), "k_bits"),
        (("--impl", "magic"), "magic"),
        (("--suite", "magic"), "--suite"),
        (("--repeats", "0"), "--repeats"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], said: str) -> None:
    found = invoke("bench", *arguments)
    assert (found.exit_code, found.stdout) == (2, "")
    (error,) = [line for line in found.stderr.splitlines() if line.startswith("error: ")]
    assert said in error
