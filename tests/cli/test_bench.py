"""`kvcli bench`: tables, records and exit codes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from commvq_reordered import reordered_attend
from console import invoke

from kvcli.bench import budget, model_bench
from kvcli.bench.contexts import ContextRow
from kvcli.bench.model_bench import ModelBench
from kvcli.bench.model_row import ModelRow
from kvcli.cli.bench import default_methods
from kvcli.cli.bench_tables import contexts_table
from kvcli.cli.output import parse_size
from kvcli.errors import UsageError
from kvcli.methods.encoded import AttendCodes
from kvcli.registry import METHODS, get_method

GROUPS = ("--settings", "group_size=8", "--settings", "residual_length=8")
BOOKS = ("--settings", "codebook_size=8")
ATTENTION = ("bench", "--shape", "tiny", "--contexts", "64", "--repeats", "3")


def attend_with(monkeypatch: pytest.MonkeyPatch, attend_codes: AttendCodes) -> None:
    """Replaces attention over codes in the suite `attention`."""
    monkeypatch.setattr("kvcli.bench.attention.choose_attend", lambda *_: ("fake", attend_codes))


def test_records_name_the_default_methods() -> None:
    names = default_methods()
    assert names == [name for method in map(get_method, METHODS) for name in method.bench]
    assert [name for name in names if name.startswith(("kivi", "squat", "qjl", "commvq"))] == [
        "kivi-2",
        "kivi-4",
        "squat-2",
        "squat-pre-2",
        "qjl",
        "commvq-1",
        "commvq-2",
    ]
    assert default_methods(few=True) == ["kivi-2", "commvq-1"]
    assert default_methods(kinds_only=True) == ["kivi-2", "kivi-4", "commvq-1", "commvq-2"]


def test_attention_gives_a_table_and_a_record_per_row() -> None:
    result = invoke(
        *ATTENTION, *GROUPS, *BOOKS, "--methods", "kivi-2", "--methods", "commvq-2", "--batches", "1", "--batches", "2"
    )
    assert result.exit_code == 0, result.stderr
    assert "no GPU" in result.stderr
    assert result.stdout.count("kivi-2") == 2
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
        result = invoke(*ATTENTION, *GROUPS, "--methods", "kivi-4", "--out", "rows.jsonl", "--json")
        shown = json.loads(result.stdout)
        assert [row["method"] for row in shown["rows"]] == ["fp16", "kivi-4"]
        assert shown["machine"]["cpu_count"] >= 1
        assert len(Path("rows.jsonl").read_text().splitlines()) == count
    assert not Path("runs").exists()


def test_a_mismatch_shows_no_time_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(*arguments: Any) -> Any:
        out, lse = reordered_attend(*arguments)
        return 1.1 * out, lse

    attend_with(monkeypatch, attend)
    options = (*BOOKS, "--methods", "commvq-2")
    result = invoke(*ATTENTION, *options)
    assert result.exit_code == 1
    line = next(line for line in result.stdout.splitlines() if "commvq-2" in line)
    assert "MISMATCH" in line
    assert "1.0e-01" in line
    assert line.count(" - ") == 6
    assert "error: commvq-2, 64 tokens, batch 1: differs" in result.stderr
    shown = json.loads(invoke(*ATTENTION, *options, "--json").stdout)
    assert shown["rows"][1]["p50_us"] is None


@pytest.mark.parametrize("where", ["--json", "rows.jsonl"])
def test_numbers_that_json_does_not_have_are_null(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def attend(*arguments: Any) -> Any:
        out, lse = reordered_attend(*arguments)
        return out * float("nan"), lse

    def refuse(text: str) -> None:
        raise AssertionError(text)

    attend_with(monkeypatch, attend)
    options = (*BOOKS, "--methods", "commvq-2", "--out", "rows.jsonl", "--json")
    result = invoke(*ATTENTION, *options)
    assert result.exit_code == 1
    text = result.stdout if where == "--json" else Path(where).read_text().splitlines()[-1]
    record = json.loads(text, parse_constant=refuse)
    record = record["rows"][-1] if where == "--json" else record
    assert (record["status"], record["out_error"]) == ("mismatch", None)


def test_records_are_appended_after_a_truncated_line() -> None:
    path = Path("rows.jsonl")
    path.write_text('{"suite": "atten')
    result = invoke(*ATTENTION, *GROUPS, "--methods", "kivi-4", "--out", str(path))
    assert result.exit_code == 0
    lines = path.read_text().splitlines()
    assert [json.loads(line)["method"] for line in lines[1:]] == ["fp16", "kivi-4"]


def test_records_go_into_a_pipe() -> None:
    reading, writing = os.pipe()
    result = invoke(*ATTENTION, *GROUPS, "--methods", "kivi-4", "--out", f"/dev/fd/{writing}")
    assert result.exit_code == 0, result.stderr
    lines = os.read(reading, 2**16).decode().splitlines()
    assert [json.loads(line)["method"] for line in lines] == ["fp16", "kivi-4"]


def test_rows_before_an_interruption_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    attend_with(monkeypatch, attend)
    result = invoke(*ATTENTION, *BOOKS, "--methods", "commvq-2")
    assert result.exit_code == 130
    assert "fp16" in result.stdout
    assert "interrupted after 1 of 2 rows" in result.stderr
    assert "resume" not in result.stderr


def test_fp16_is_measured_once() -> None:
    result = invoke(*ATTENTION, *GROUPS, "--methods", "fp16", "--methods", "kivi-4", "--json")
    assert [row["method"] for row in json.loads(result.stdout)["rows"]] == ["fp16", "kivi-4"]


def test_nothing_but_refusals_is_an_error() -> None:
    refused, other = ("--methods", "commvq-2", "--settings", "pairs_per_group=5"), ("--methods", "kivi-4", *GROUPS)
    assert invoke(*ATTENTION, *refused).exit_code == 1
    assert invoke(*ATTENTION, *refused, *other).exit_code == 0


@pytest.mark.parametrize("value", ["0", "1"])
def test_records_say_whether_kernels_were_interpreted(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", value)
    result = invoke(*ATTENTION, *GROUPS, "--methods", "kivi-4", "--json")
    assert [row["interpreted"] for row in json.loads(result.stdout)["rows"]] == [value == "1"] * 2


def test_a_failure_is_said_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(*arguments: Any) -> Any:
        raise LookupError("out of resource")

    attend_with(monkeypatch, attend)
    result = invoke(*ATTENTION, *BOOKS, "--methods", "commvq-2", "--contexts", "32")
    assert result.exit_code == 1
    assert result.stdout.count("fake: FAILED") == 2
    assert "error: commvq-2, 32 tokens, batch 1: LookupError: out of resource (test_bench.py" in result.stderr
    assert result.stderr.count("Traceback") == 0


GENERATE = ("bench", "--suite", "generate", "--new-tokens", "3", "--prompt-tokens", "40", "--repeats", "1", *GROUPS)


def test_generate_runs_random_weights_and_real_models(tiny: Any) -> None:
    options = ("--methods", "kivi-2", "--methods", "fp16")
    for source, expected in (
        (("--random-weights", "tiny", "--layers", "2"), ("tiny", "random", 2)),
        ((), ("smollm2-135m", "model", 3)),
    ):
        result = invoke(*GENERATE, *source, *options, "--batches", "1", "--batches", "2", "--json")
        assert result.exit_code == 0, result.stderr
        rows = json.loads(result.stdout)["rows"]
        assert [(row["method"], row["batch"]) for row in rows] == [
            ("fp16", 1),
            ("kivi-2", 1),
            ("fp16", 2),
            ("kivi-2", 2),
        ]
        for row in rows:
            assert (row["model"], row["weights"], row["num_layers"]) == expected
            assert row["tokens_per_s"][1] > 0
            assert (row["codebooks"], row["dtype"], row["memory_budget"]) == ("random", "float32", None)
    lines = Path("runs/bench/generate.jsonl").read_text().splitlines()
    assert len(lines) == 8
    assert json.loads(lines[0])["machine"]["packages"]["transformers"]


def test_the_table_of_generate_puts_ratios_first() -> None:
    result = invoke(*GENERATE, "--random-weights", "tiny", "--methods", "kivi-2")
    heading = next(line for line in result.stdout.splitlines() if "x tok/s" in line)
    names = [name.strip() for name in heading.strip("┃").split("┃")]
    assert names[3:7] == ["x tok/s", "x total", "prefill / fp16", "cache"]
    (row,) = [line for line in result.stdout.splitlines() if "kivi-2" in line]
    assert len(row.strip("│").split("│")) == len(names)


def test_filled_prompts_have_no_times() -> None:
    options = ("--random-weights", "tiny", "--methods", "kivi-2", "--fill-prompt", "--prefill-chunk", "16")
    steps = ("--prompt-tokens", "40", "--max-new-tokens", "41", "--decode", "steps", "--json")
    result = invoke("bench", "--suite", "generate", *GROUPS, "--repeats", "1", *options, *steps)
    assert result.exit_code == 0, result.stderr
    fp16, kivi = json.loads(result.stdout)["rows"]
    assert (fp16["decode"], kivi["decode"]) == ("eager", "steps")
    assert kivi["steady_tokens"] == 24  # after two rounds of 8
    assert {row["prefill"] for row in (fp16, kivi)} == {"ends computed, middle filled"}
    for row in (fp16, kivi):
        assert row["prefill_ms"] is row["ttft_ms"] is row["total_tokens_per_s"] is row["prefill_ratio"] is None
        assert row["rate_ratio"] > 0
        assert row["ceiling_share"] is None
    table = invoke(*GENERATE, *options).stdout
    assert "ends computed, middle filled" in " ".join(table.split())


def test_the_table_of_memory_says_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(self: ModelBench, contexts: list[int], batches: Any, *, longest: bool, full_prefill: bool) -> Any:
        assert (self.memory_budget, self.prefill_chunk) == (40 * 2**30, 4096)
        assert (contexts, batches, longest, full_prefill) == ([32768], None, True, False)
        assert [case.name for case in self.cases] == ["fp16", "commvq-1"]
        sizes = {"cache_bytes": 3 * 2**29, "peak_bytes": 2**34, "reserved_bytes": 2**34, "weights_bytes": 2**20}
        yield ModelRow("fp16", 32768, 7, "sdpa", question="largest batch", new_tokens=2, cache_ratio=1.0, **sizes)
        yield ModelRow(
            "commvq-1", 0, 1, "fused", "out of memory", question="longest context", new_tokens=2, weights_bytes=2**20
        )

    monkeypatch.setattr(ModelBench, "memory", rows)
    monkeypatch.setattr(budget, "check_budget", lambda budget, device: None)
    monkeypatch.setattr(model_bench, "check_budget", lambda budget, device: None)
    options = ("--random-weights", "tiny", "--memory-budget", "40GiB", "--methods", "commvq-1")
    result = invoke("bench", "--suite", "memory", *options)
    assert result.exit_code == 0, result.stderr
    lines = {
        line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")]
        for line in result.stdout.splitlines()
        if "│" in line
    }
    assert lines["fp16"][2:9] == ["largest batch", "32768", "7", "1.50 GiB", "1/1.00", "16.00 GiB", "16.00 GiB"]
    assert lines["commvq-1"][2:6] == ["longest context", "-", "1", "-"]
    assert lines["commvq-1"][-2] == "fused: out of memory"
    assert "budget 40.00 GiB" in " ".join(result.stdout.split())
    records = [json.loads(line) for line in Path("runs/bench/memory.jsonl").read_text().splitlines()]
    assert (records[0]["context"], records[0]["batch"], records[0]["prefill"]) == (
        32768,
        7,
        "ends computed, middle filled",
    )


def test_contexts_compares_loading_with_reading() -> None:
    lengths = ("--prompt-tokens", "40", "--prompt-tokens", "80", "--repeats", "1", "--context-folder", "files/here")
    options = ("--random-weights", "tiny", "--methods", "kivi-2", *GROUPS, *lengths)
    result = invoke("bench", "--suite", "contexts", *options, "--json")
    assert result.exit_code == 0, result.stderr
    made = json.loads(result.stdout)
    assert [(row["method"], row["prompt_tokens"]) for row in made["rows"]] == [
        ("fp16", 40),
        ("kivi-2", 40),
        ("fp16", 80),
        ("kivi-2", 80),
    ]
    assert made["faster_from"].keys() == {"fp16", "kivi-2"}
    for row in made["rows"]:
        assert (row["model"], row["weights"], row["codebooks"], row["repeats"]) == ("tiny", "random", "random", 1)
    records = [json.loads(line) for line in Path("runs/bench/contexts.jsonl").read_text().splitlines()]
    assert [record["file_bytes"] for record in records] == [row["file_bytes"] for row in made["rows"]]
    assert records[0]["machine"]["cpu_count"]
    assert not [*Path("files/here").iterdir()]
    table = " ".join(contexts_table(records).columns)
    assert "times faster" in table
    cells = contexts_table(records).rows[1]
    assert cells[:2] == ["kivi-2", "40"]
    assert cells[3] == f"1/{records[1]['file_ratio']:.2f}"


def test_the_table_of_contexts_shows_rows_without_figures() -> None:
    row = ContextRow("kivi-2", 40, 1, "fused", "failed", "no space").to_dict()
    shared = {"model": "tiny", "weights": "random", "num_layers": 3, "dtype": "float32"}
    table = contexts_table([{**row, **shared}])
    assert [len(cells) for cells in table.rows] == [len(table.columns)]
    assert table.rows[0][-1] == "fused: FAILED"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24GiB", 24 * 2**30),
        ("1.5 GiB", 3 * 2**29),
        ("500MB", 5 * 10**8),
        ("64kib", 65536),
        ("1000", 1000),
        (None, None),
    ],
)
def test_sizes_are_read(text: str | None, expected: int | None) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["much", "-1GiB", "24GiBB", "0", "", "24 G iB", "GiB"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="24GiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [((), "llama-3.1-8b"), (("--random-weights", "tiny"), "tiny"), (("a-model",), None)],
)
def test_memory_takes_a_model_if_one_is_named(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], expected: str | None
) -> None:
    def load(options: Any, shape: str | None, output: Any) -> Any:
        raise UsageError(f"asked for {shape}")

    monkeypatch.setattr(budget, "check_budget", lambda budget, device: None)
    monkeypatch.setattr("kvcli.cli.bench.load", load)
    assert f"asked for {expected}" in invoke("bench", "--suite", "memory", *arguments).stderr


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
        (("--batches", "auto"), "--suite generate"),
        (("--batches", "auto", "--batches", "2", "--suite", "generate"), "--batches"),
        (("--suite", "generate", "--random-weights", "gpt-9"), "llama-3.1-8b"),
        (("--suite", "generate", "--random-weights", "tiny", "--batches", "auto"), "needs a GPU"),
        (("--suite", "generate", "--random-weights", "tiny", "--memory-budget", "1GiB"), "needs a GPU"),
        (("--suite", "generate", "--memory-budget", "much"), "24GiB"),
        (("--suite", "generate", "--layers", "2"), "--random-weights"),
        (("--suite", "generate", "--prompt-tokens", "0"), "--prompt-tokens"),
        (("--suite", "memory"), "needs a GPU"),
        (("--contexts", "99999999999999999999999"), "lengths from 1 to 2147483647"),
        (("--batches", "99999999999999999999999"), "numbers from 1 to 2147483647"),
        (("--memory-budget", "1GiB"), "--memory-budget goes with --suite generate or memory"),
        (("--suite", "generate", "--contexts", "64"), "--contexts goes with --suite attention or memory"),
        (("--suite", "generate", "--random-weights", "tiny", "--decode", "graphs"), "CUDA graphs need a GPU"),
        (("--suite", "memory", "--compile"), "--compile goes with --suite generate"),
        (("--suite", "generate", "--random-weights", "tiny", "--decode", "passes", "--compile"), "graphs or steps"),
        (("--suite", "memory", "--decode", "steps"), "--decode goes with --suite generate"),
        (("--suite", "contexts", "--batches", "2"), "--batches goes with --suite attention, generate or memory"),
        (("--context-folder", "x"), "--context-folder goes with --suite contexts"),
        (("--fill-prompt",), "--fill-prompt goes with --suite generate"),
        (("--suite", "generate", "--no-longest"), "--longest goes with --suite memory"),
        (("--methods", "kivi-2", "--settings", "group_size=48"), "kivi: settings: residual_length 128 must be"),
        (("some-model",), "runs no model"),
        (("some-model", "--suite", "generate", "--random-weights", "tiny"), "not both"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], said: str) -> None:
    result = invoke("bench", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    (error,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert said in error
