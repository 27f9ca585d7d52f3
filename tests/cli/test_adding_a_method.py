"""docs/adding_a_method.md and adding_a_suite.md, executed: a file and a line of the registry are all that is needed."""

import json
from pathlib import Path
from typing import Any

import pytest
from console import refused, result
from contract import CacheContract, CodecContract
from foundation.test_method_names import mentions
from typer.testing import CliRunner

import kvcli.eval
import kvcli.methods
from kvcli.bench.suite import BenchOptions, BenchRows, BenchSuite, Row, bench_table, run_row
from kvcli.cli import suites
from kvcli.cli.app import app
from kvcli.commands.tables import DataTable
from kvcli.eval.records import read_rows
from kvcli.methods.method import Method
from kvcli.registry import BENCH_SUITES, EVAL_SUITES, METHODS, get_method, get_suite


@pytest.fixture
def method(adding: Any) -> Method:
    return get_method(adding("adding_a_method.md", kvcli.methods, METHODS, "METHOD")[0])


class TestCodecs(CodecContract):
    """Its codecs."""


class TestCache(CacheContract):
    """Its cache."""


def test_it_generates_and_is_listed(method: Method, tiny: Any) -> None:
    options = ("--residual-length", "16", "--sink-length", "0", "--max-new-tokens", "4", "--json")
    memory = result("generate", "--method", "absmax-3", "--prompt", "x" * 60, *options)["memory"]
    assert memory["num_encoded"] >= 40
    assert memory["nominal_bits"] == [3, 3]
    assert (memory["key_bits"], memory["value_bits"]) == (4, 4)  # a head of 16 channels: 6 bytes and a scale
    assert "k_bits" in refused("generate", "--method", "absmax-5")
    assert "absmax" in [row["name"] for row in result("methods", "--json")["methods"]]


def test_it_is_evaluated(method: Method, tiny: Any) -> None:
    options = ("--seq-len", "128", "--num-sequences", "2", "--batch-size", "2", "--json")
    chosen = ("--method", "absmax-2", "--method", "absmax-3", "--method", "absmax-8")
    errors = [row["kl_mean"] for row in result("eval", *chosen, *options)["rows"]]
    assert errors[0] > errors[1] > errors[2]


@pytest.mark.parametrize("impl", ["reference", pytest.param("fused", marks=pytest.mark.kernels)])
def test_it_is_benched(method: Method, impl: str) -> None:
    options = ("--shape", "tiny", "--contexts", "64", "--repeats", "3", "--impl", impl, "--json")
    _, row = result("bench", "--method", "absmax-3", *options)["rows"]
    assert row["method"] == "absmax-3"
    assert row["p50_us"] > 0
    assert row["true_bits"] == (16 * 3 + 16) / 16  # a head of 16 channels


def test_it_measures_records_and_shows(adding: Any, tiny: Any) -> None:
    name, file = adding("adding_a_suite.md", kvcli.eval, EVAL_SUITES, "SUITE")
    assert mentions(file) == []
    sizes = ("--num-prompts", "8", "--prompt-tokens", "40", "--max-new-tokens", "12", "--residual-length", "8")
    words = ["eval", name, "--method", "kivi-1", "--setting", "group_size=8", *sizes]
    done = CliRunner().invoke(app, [*words, "--json", "--out", "rows.jsonl"])
    assert done.exit_code == 0, done.stderr
    reference, kivi = json.loads(done.stdout)["rows"]
    assert (reference["label"], kivi["label"]) == ("uncompressed", "kivi-1")
    assert len(kivi["units"]) == 8
    assert kivi["metrics"]["repeated"]["difference"]["to"] == "uncompressed"
    assert kivi["memory"]["num_encoded"] > 0
    assert [record.label for record in read_rows(Path("rows.jsonl"))] == ["uncompressed", "kivi-1"]
    shown = CliRunner().invoke(app, [*words, "--baseline", "rows.jsonl"])
    assert (shown.exit_code, "repeated %" in shown.stdout) == (0, True), shown.stderr
    own = CliRunner().invoke(app, ["eval", name, "--help"]).stdout
    assert "--prompt-tokens" in own
    assert "--max-kld" not in own


def test_a_suite_of_bench_needs_rows_and_a_table_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the run goes on after a row that failed, and where records say nothing of weights."""

    def measure(row: Row) -> Row:
        if row.context > 1:
            raise ValueError("too long")
        return row

    def prepare(options: BenchOptions, reporter: Any) -> BenchRows:
        cases = options.choices()
        rows = (run_row(measure, Row(case.label, context, 1, "sdpa")) for case in cases for context in (1, 2))
        return BenchRows(rows, 2 * len(cases))

    def table(records: Any, options: Any) -> DataTable:
        return bench_table("rows", records, {"context": "{context}"})

    suite = BenchSuite(name="rows", help="x", options=BenchOptions, example="x", prepare=prepare, tabulate=table)
    monkeypatch.setitem(BENCH_SUITES, "rows", "x:SUITE")
    monkeypatch.setattr(suites, "get_suite", lambda path: suite if path == "x:SUITE" else get_suite(path))
    done = CliRunner().invoke(app, ["bench", "rows", "--method", "kivi-2", "--device", "cpu"])
    assert done.exit_code == 1
    assert done.stdout.count("sdpa: FAILED") == 2
    assert "error: kivi-2, 2 tokens, batch 1: ValueError: too long" in done.stderr
    with pytest.raises(KeyError, match="suite rows has no figures us"):
        suite.record(Row("fp16", 1, 1, "sdpa").plus(us=3.0))
