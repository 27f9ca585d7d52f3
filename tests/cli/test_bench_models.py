"""The suites of `kvcli bench` that run whole models: tables and records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from byte_tokenizer import CHAT, byte_tokenizer
from console import invoke, result, says
from families import make

from kvcli.bench.contexts import SUITE, ContextsOptions, table
from kvcli.bench.model_bench import ModelBench
from kvcli.bench.suite import Row
from kvcli.plan import budget

GROUPS = ("--setting", "group_size=8", "--setting", "residual_length=8", "--method", "kivi-2", "--repeats", "1")
PROMPT = ("bench", "--suite", "generate", *GROUPS, "--prompt-tokens", "40")
GENERATE = (*PROMPT, "--max-new-tokens", "3")
TINY = ("--random-weights", "tiny")
STATES = 3 * (4 * 128 * 2 + 4 * 16 * 16 * 4)
"""Bytes of 3 linear layers of qwen3_5_text: 4 tokens of a convolution in 16 bits, states of 4 heads in float32."""


def records(suite: str) -> list[Any]:
    return [json.loads(line) for line in Path(f"runs/bench/{suite}.jsonl").read_text().splitlines()]


def test_generate_runs_random_weights_and_real_models(tiny: Any) -> None:
    batches = ("--method", "fp16", "--batches", "1", "--batches", "2", "--json")
    for source, expected in (((*TINY, "--layers", "2"), ("tiny", "random", 2)), ((), ("smollm2-135m", "model", 3))):
        rows = result(*GENERATE, *source, *batches)["rows"]
        assert [(row["method"], row["batch"]) for row in rows] == [
            (method, batch) for batch in (1, 2) for method in ("fp16", "kivi-2")
        ]
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


@pytest.fixture(scope="module", params=["gemma3_text", "gpt_oss"])
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, tokenizer = tmp_path_factory.mktemp("models") / str(request.param), byte_tokenizer(CHAT)
    make(request.param, vocab_size=259).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_bench_runs_a_hybrid_and_counts_the_caches_of_all_its_layers(hybrid: Path) -> None:
    sizes = ("--repeats", "1", "--prompt-tokens", "16", "--max-new-tokens", "4")
    words = ("bench", str(hybrid), "--suite", "generate", "--method", "kivi-2", *sizes)
    stock, ours = result(*words, "--method", "fp16", "--json")["rows"]
    # 19 tokens in 2 layers and 7 in 2 with a window of 8; keys and values, 2 heads, 16 channels, float32
    whole, windows = (2 * 19 * 2 * 2 * 16 * 4, 2 * 7 * 2 * 2 * 16 * 4)
    assert stock["cache_bytes"] == whole + windows
    assert stock["other_bytes"] == ours["other_bytes"] == windows
    assert ours["cache_bytes"] > whole + windows  # all is in the window, with headroom and positions
    shown = " ".join(result(*words).stdout.split())
    assert "2 of 4 layers compressed (73 % of fp16's cache)" in shown  # 19 of 19 + 7 tokens


@pytest.mark.parametrize("hybrid", ["gemma3_text", "qwen3_5_text", "nemotron_h"], indirect=True)
def test_the_planned_size_of_a_context_counts_states_of_other_layers(hybrid: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("word " * 300)
    words = ("--method", "rtn-4", "--setting", "sink_length=2", "--setting", "residual_length=64")
    path = str(tmp_path / "c.safetensors")
    made = result("compress", str(hybrid), "--prompt-file", str(tmp_path / "text.txt"), *words, "--out", path, "--json")
    (context,) = made["contexts"]
    plan = result("plan", str(hybrid), "--device", "cpu", *words, "--prompt-tokens", str(context["tokens"]), "--json")
    assert plan["methods"][-1]["context_bytes"] == pytest.approx(context["file_bytes"], rel=0.1)


@pytest.mark.parametrize("hybrid", ["qwen3_5_text"], indirect=True)
def test_the_line_for_a_card_counts_the_caches_of_all_layers(hybrid: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("word " * 600)
    text = ("--corpus", str(tmp_path / "text.txt"), "--seq-len", "64", "--num-sequences", "8", "--context", "512")
    words = ("--method", "kivi", "--setting", "group_size=8", "--residual-length", "8", "--max-bits", "16")
    found = result("tune", str(hybrid), *text, *words, "--json", "--out", str(tmp_path / "r.yaml"))
    best = next(row for row in found["rows"] if row["label"] == found["best"])
    fp16 = 512 * 2 * 2 * 16 * 2  # keys and values of 2 heads of 16 channels, in 16 bits
    whole = (fp16 + STATES) / (best["cache_bytes"] + STATES)
    said = f"1 of 4 layers, whole cache 1/{whole:.2f} of 16 bits at 512 tokens"
    assert f" bits in {said}, KL " in unquote(found["badge"])
    assert result("inspect", str(tmp_path / "r.yaml"), "--json")["measured"]["compressed"] == said
