"""`kvcli bench`: the suite `attention`, records, exit codes, and what is refused."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from commvq_reordered import reordered_attend
from console import invoke, refused, result, says

from kvcli.bench.suite import default_methods
from kvcli.commands.sizes import parse_size
from kvcli.errors import UsageError
from kvcli.methods.layer_codec import AttendCodes
from kvcli.registry import METHODS, get_method

GROUPS = ("--setting", "group_size=8", "--setting", "residual_length=8")
BOOKS = ("--setting", "codebook_size=8", "--method", "commvq-2")
ATTENTION = ("bench", "--shape", "tiny", "--contexts", "64", "--repeats", "3")
KIVI = (*ATTENTION, *GROUPS, "--method", "kivi-4")


def attend_with(monkeypatch: pytest.MonkeyPatch, attend_codes: AttendCodes | BaseException) -> MagicMock:
    """Replaces attention over codes in the suite `attention` by a function, or by an exception."""
    attend = MagicMock(side_effect=attend_codes)
    backend = SimpleNamespace(impl="fake", attend_codes=attend)
    monkeypatch.setattr("kvcli.attention.backend.choose_backend", lambda *_: backend)
    return attend


def scaled(factor: float) -> AttendCodes:
    def attend(*arguments: Any) -> Any:
        out, lse = reordered_attend(*arguments)
        return factor * out, lse

    return attend


def test_records_name_the_default_methods() -> None:
    names = default_methods()
    assert names == [name for method in map(get_method, METHODS) for name in method.bench]
    of_papers = ["kivi-2", "kivi-4", "squat-2", "squat-pre-2", "qjl", "commvq-1", "commvq-2"]
    assert [name for name in names if name.startswith(("kivi", "squat", "qjl", "commvq"))] == of_papers
    assert default_methods(few=True) == ["kivi-2", "klt-2.25"]
    assert default_methods(kinds_only=True) == ["kivi-2", "kivi-4", "klt-2.25"]


def test_attention_gives_a_table_and_a_record_per_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    done = result(*ATTENTION, *GROUPS, *BOOKS, "--method", "kivi-2", "--batches", "1", "--batches", "2")
    assert "no GPU" in done.stderr
    assert "next: kvcli report runs/bench/attention.jsonl" in done.stderr
    assert done.stdout.count("kivi-2") == 2
    records = [json.loads(line) for line in Path("runs/bench/attention.jsonl").read_text().splitlines()]
    assert [record["method"] for record in records] == ["fp16", "commvq-2", "kivi-2"] * 2
    for record in records:
        assert record["machine"]["packages"]["torch"]
        assert "commit" in record["machine"]
        assert (record["shape"], record["seed"], record["weights"], record["layer"]) == ("tiny", 0, "random", 2)
        assert record["options"]["setting"] == [*GROUPS[1::2], BOOKS[1]]
        assert record["p50_us"] > 0


def test_json_is_one_object_and_out_is_appended_to() -> None:
    """Also after a line that was cut off."""
    Path("rows.jsonl").write_text('{"suite": "atten')
    for _ in range(2):
        shown = result(*KIVI, "--out", "rows.jsonl", "--json")
        assert [row["method"] for row in shown["rows"]] == ["fp16", "kivi-4"]
        assert shown["machine"]["cpu_count"] >= 1
    lines = Path("rows.jsonl").read_text().splitlines()
    assert [json.loads(line)["method"] for line in lines[1:]] == ["fp16", "kivi-4"] * 2
    assert not Path("runs").exists()


def test_records_go_into_a_pipe() -> None:
    reading, writing = os.pipe()
    result(*KIVI, "--out", f"/dev/fd/{writing}")
    lines = os.read(reading, 2**16).decode().splitlines()
    assert [json.loads(line)["method"] for line in lines] == ["fp16", "kivi-4"]


def test_a_mismatch_shows_no_time_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = attend_with(monkeypatch, scaled(1.1))
    monkeypatch.setenv("COLUMNS", "200")
    done = result(*ATTENTION, *BOOKS, exit_code=1)
    assert attend.call_count == 1
    line = next(line for line in done.stdout.splitlines() if "commvq-2" in line)
    says(line, "MISMATCH", "1.0e-01")
    assert line.count(" - ") == 7
    assert "error: commvq-2, 64 tokens, batch 1: differs" in done.stderr
    row = result(*ATTENTION, *BOOKS, "--json", exit_code=1)["rows"][1]
    assert {row[x] for x in ("p20_us", "p50_us", "p80_us", "eager_us", "speedup", "stored_gb_s")} == {None}


def test_numbers_that_json_does_not_have_are_null(monkeypatch: pytest.MonkeyPatch) -> None:
    attend_with(monkeypatch, scaled(float("nan")))
    done = invoke(*ATTENTION, *BOOKS, "--out", "rows.jsonl", "--json")
    assert done.exit_code == 1
    shown = json.loads(done.stdout, parse_constant=pytest.fail)["rows"][-1]
    written = json.loads(Path("rows.jsonl").read_text().splitlines()[-1], parse_constant=pytest.fail)
    for record in (shown, written):
        assert (record["status"], record["out_error"]) == ("mismatch", None)


def test_rows_before_an_interruption_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    attend_with(monkeypatch, KeyboardInterrupt())
    done = result(*ATTENTION, *BOOKS, exit_code=130)
    assert "fp16" in done.stdout
    assert "stopped after 1 row\n" in done.stderr
    assert done.stderr.endswith("error: interrupted; run the same command again to start over\n")
    assert "resume" not in done.stderr


def test_a_failure_is_said_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    attend_with(monkeypatch, LookupError("out of resource"))
    done = result(*ATTENTION, *BOOKS, "--contexts", "32", exit_code=1)
    assert done.stdout.count("fake: FAILED") == 2
    assert "error: commvq-2, 32 tokens, batch 1: LookupError: out of resource (mock.py" in done.stderr
    assert "Traceback" not in done.stderr


def test_methods_are_measured_once_and_named_with_their_bits() -> None:
    methods = ("--method", "fp16", "--method", "kivi", "--method", "kivi-2")
    rows = result(*ATTENTION, *GROUPS, *methods, "--json")["rows"]
    assert [row["method"] for row in rows] == ["fp16", "kivi-2"]


def test_nothing_but_refusals_is_an_error() -> None:
    odd = ("--method", "commvq-2", "--setting", "pairs_per_group=5")
    assert invoke(*ATTENTION, *odd).exit_code == 1
    assert invoke(*KIVI, *odd).exit_code == 0


@pytest.mark.parametrize("value", ["0", "1"])
def test_records_say_whether_kernels_were_interpreted(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", value)
    assert [row["interpreted"] for row in result(*KIVI, "--json")["rows"]] == [value == "1"] * 2


def test_sizes_are_read() -> None:
    sizes = {"24GiB": 24 * 2**30, "24G": 24 * 2**30, "24g": 24 * 2**30, "24GB": 24 * 10**9, "1.5 GiB": 3 * 2**29}
    sizes |= {"500MB": 5 * 10**8, "64kib": 65536, "1000B": 1000}
    assert {text: parse_size(text) for text in sizes} == sizes
    assert parse_size(None) is None


@pytest.mark.parametrize("text", ["much", "5i", "5iB", "24", "-1GiB", "24GiBB", "0", "", "24 G iB", "GiB"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="24GiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("arguments", "expected"), [((), "llama-3.1-8b"), (("--random-weights", "tiny"), "tiny"), (("a-model",), None)]
)
def test_memory_takes_a_model_if_one_is_named(monkeypatch: Any, arguments: tuple[str, ...], expected: Any) -> None:
    def load(options: Any, shape: str | None, output: Any) -> Any:
        raise UsageError(f"asked for {shape}")

    monkeypatch.setattr("kvcli.plan.budget.check_budget", lambda budget, device: None)
    monkeypatch.setattr("kvcli.bench.suite.WholeModelOptions.load_model", load)
    monkeypatch.setattr("kvcli.bench.suite.check_model_name", lambda name: None)
    assert f"asked for {expected}" in invoke("bench", "--suite", "memory", *arguments).stderr


HUGE = "99999999999999999999999"
WRONG = {
    "--method magic": "choose one of fp16",
    "--method fp16-3": "takes no bits",
    "--shape gpt-9": "llama-3.1-8b",
    "--contexts 0": "--contexts",
    "--batches -1": "--batches",
    "--layer 3 --shape tiny": "layers 0 to 2",
    "--setting colour=3": "colour",
    "--setting k_bits=3": "k_bits",
    "--impl magic": "magic",
    "--repeats 0": "--repeats",
    "--batches auto": "goes with suite generate or memory",
    "--batches auto --batches 2 --suite generate": "--batches",
    "--suite generate --random-weights gpt-9": "llama-3.1-8b",
    "--suite generate --random-weights tiny --batches auto": "needs a GPU",
    "--suite generate --random-weights tiny --memory-budget 1GiB": "needs a GPU",
    "--suite generate --memory-budget much": "24GiB",
    "--suite generate --layers 2": "--random-weights",
    "--suite generate --prompt-tokens 0": "--prompt-tokens",
    "--suite memory": "needs a GPU",
    "--suite serve --clients 0": "--clients: Input should be greater than or equal to 1",
    f"--contexts {HUGE}": "--contexts: Input should be less than or equal to 2147483647",
    f"--batches {HUGE}": "numbers from 1 to 2147483647",
    "--suite generate --random-weights tiny --decode graphs": "CUDA graphs need a GPU",
    "--method kivi-2 --setting group_size=48": "kivi: settings: residual_length 128 must be",
    "some-model": "runs no model",
    "some-model --suite generate --random-weights tiny": "not both",
    "--suite generate --random-weights tiny --device auto": "'--device auto' is not for it",
}


@pytest.mark.parametrize(("arguments", "said"), WRONG.items())
def test_bad_input_is_one_line(arguments: str, said: str) -> None:
    assert said in refused("bench", *arguments.split())
