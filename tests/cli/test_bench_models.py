"""The suites of `kvcli bench` that run whole models: tables and records."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from console import invoke, result, says

from kvcli.bench.contexts import SUITE, ContextsOptions, table
from kvcli.bench.model_bench import ModelBench
from kvcli.bench.suite import Row
from kvcli.plan import budget

GROUPS = ("--setting", "group_size=8", "--setting", "residual_length=8", "--method", "kivi-2", "--repeats", "1")
PROMPT = ("bench", "--suite", "generate", *GROUPS, "--prompt-tokens", "40")
GENERATE = (*PROMPT, "--max-new-tokens", "3")
TINY = ("--random-weights", "tiny")


def records(suite: str) -> list[Any]:
    return [json.loads(line) for line in Path(f"runs/bench/{suite}.jsonl").read_text().splitlines()]


def test_generate_runs_random_weights_and_real_models(tiny: Any) -> None:
    batches = ("--method", "fp16", "--batches", "1", "--batches", "2", "--json")
    for source, expected in (((*TINY, "--layers", "2"), ("tiny", "random", 2)), ((), ("smollm2-135m", "model", 3))):
        rows = result(*GENERATE, *source, *batches)["rows"]
        assert [(row["batch"], row["method"]) for row in rows] == [*product((1, 2), ("fp16", "kivi-2"))]
        for row in rows:
            assert (row["model"], row["weights"], row["num_layers"]) == expected
            assert row["tokens_per_s"][1] > 0
            assert (row["codebooks"], row["dtype"], row["memory_budget"]) == ("random", "float32", None)
    assert len(records("generate")) == 8
    assert records("generate")[0]["machine"]["packages"]["transformers"]


def test_the_table_of_generate_puts_ratios_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    lines = invoke(*GENERATE, *TINY).stdout.splitlines()
    heading = next(line for line in lines if "x tok/s" in line)
    names = [name.strip() for name in heading.strip("┃").split("┃")]
    assert names[3:7] == ["x tok/s", "x total", "prefill / fp16", "cache"]
    (row,) = [line for line in lines if "kivi-2" in line]
    assert len(row.strip("│").split("│")) == len(names)


def test_filled_prompts_have_no_times() -> None:
    filled = (*PROMPT, *TINY, "--fill-prompt", "--prefill-chunk", "16")
    fp16, kivi = result(*filled, "--max-new-tokens", "41", "--decode", "steps", "--json")["rows"]
    assert (fp16["decode"], kivi["decode"]) == ("eager", "steps")
    assert kivi["steady_tokens"] == 24  # after two rounds of 8
    for row in (fp16, kivi):
        assert row["prefill"] == "ends computed, middle filled"
        assert row["prefill_ms"] is row["ttft_ms"] is row["total_tokens_per_s"] is row["prefill_ratio"] is None
        assert row["rate_ratio"] > 0
        assert row["ceiling_share"] is None
    says(" ".join(invoke(*filled, "--max-new-tokens", "3").stdout.split()), "ends computed, middle filled")


def test_the_table_of_memory_says_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(self: ModelBench, contexts: list[int], batches: Any, *, longest: bool) -> Any:
        assert (self.memory_budget, self.prefill_chunk, self.fill_middle) == (40 * 2**30, 4096, True)
        assert (contexts, batches, longest) == ([32768], None, True)
        assert [case.label for case in self.cases] == ["fp16", "commvq-1"]
        sizes = {"cache_bytes": 3 * 2**29, "peak_bytes": 2**34, "reserved_bytes": 2**34}
        shared: Any = {"new_tokens": 2, "weights_bytes": 2**20}
        figures = {"question": "largest batch", "cache_ratio": 1.0, **sizes, **shared}
        yield Row("fp16", 32768, 7, "sdpa", figures=figures)
        yield Row("commvq-1", 0, 1, "fused", "out of memory", figures={"question": "longest context", **shared})

    monkeypatch.setattr(ModelBench, "memory", rows)
    monkeypatch.setattr(budget, "check_budget", lambda budget, device: None)
    monkeypatch.setenv("COLUMNS", "200")
    done = result("bench", "--suite", "memory", *TINY, "--memory-budget", "40GiB", "--method", "commvq-1")
    rows_shown = [[cell.strip() for cell in line.split("│")] for line in done.stdout.splitlines() if "│" in line]
    lines = {cells[1]: cells for cells in rows_shown}
    assert lines["fp16"][2:9] == ["largest batch", "32768", "7", "1.50 GiB", "1/1.00", "16.00 GiB", "16.00 GiB"]
    assert lines["commvq-1"][2:6] == ["longest context", "0", "1", "-"]
    assert lines["commvq-1"][-2] == "fused: out of memory"
    assert "budget 40.00 GiB" in " ".join(done.stdout.split())
    row = records("memory")[0]
    assert (row["context"], row["batch"], row["prefill"]) == (32768, 7, "ends computed, middle filled")


def test_contexts_compares_loading_with_reading() -> None:
    lengths = ("--prompt-tokens", "40", "--prompt-tokens", "80", "--context-folder", "files/here")
    made = result("bench", "--suite", "contexts", *TINY, *GROUPS, *lengths, "--json")
    expected = [("fp16", 40), ("kivi-2", 40), ("fp16", 80), ("kivi-2", 80)]
    assert [(row["method"], row["prompt_tokens"]) for row in made["rows"]] == expected
    assert made["faster_from"].keys() == {"fp16", "kivi-2"}
    for row in made["rows"]:
        assert (row["model"], row["weights"], row["codebooks"], row["repeats"]) == ("tiny", "random", "random", 1)
    written = records("contexts")
    assert [record["file_bytes"] for record in written] == [row["file_bytes"] for row in made["rows"]]
    assert written[0]["machine"]["cpu_count"]
    assert not [*Path("files/here").iterdir()]
    shown = table(written, ContextsOptions())
    assert "times faster" in " ".join(shown.columns)
    assert shown.rows[1][:2] == ["kivi-2", "40"]
    assert shown.rows[1][3] == f"{1 / written[1]['file_ratio']:.2f}", "40 tokens of a tiny model are more with metadata"


def test_the_table_of_contexts_shows_rows_without_figures() -> None:
    row = SUITE.record(Row("kivi-2", 40, 1, "fused", "failed", "no space"))
    shared = {"model": "tiny", "weights": "random", "num_layers": 3, "dtype": "float32"}
    shown = table([{**row, **shared}], ContextsOptions())
    assert [len(cells) for cells in shown.rows] == [len(shown.columns)]
    assert shown.rows[0][-1] == "fused: FAILED"
