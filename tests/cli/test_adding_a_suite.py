"""docs/adding_a_suite.md, executed: its file and its registry line are all that a suite needs."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from foundation.test_method_names import mentions
from typer.testing import CliRunner

import kvcli.eval
from kvcli.bench.suite import BenchOptions, BenchRows, BenchSuite, Row, run_row, status
from kvcli.cli import suites
from kvcli.eval.records import read_rows
from kvcli.registry import BENCH_SUITES, EVAL_SUITES, get_suite
from kvcli.tables import DataTable

NAME = "repeats"


@pytest.fixture
def app(repo_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[typer.Typer]:
    """Commands with the page's suite, in a file of its own and with its line in the registry."""
    page = (repo_root / "docs" / "adding_a_suite.md").read_text()
    file, line = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    match = re.fullmatch(r'"(\w+)": "(kvcli\.eval\.(\w+):SUITE)",\n', line)
    assert match is not None
    assert match[1] == match[3] == NAME
    assert NAME not in EVAL_SUITES
    assert mentions(file) == []
    folder = tmp_path / "suites"
    folder.mkdir()
    (folder / f"{NAME}.py").write_text(file)
    monkeypatch.setattr(kvcli.eval, "__path__", [*kvcli.eval.__path__, str(folder)])
    monkeypatch.setitem(EVAL_SUITES, NAME, match[2])
    made = typer.Typer()
    suites.register(made)
    yield made
    del sys.modules[f"kvcli.eval.{NAME}"]


def test_it_measures_records_and_shows(app: typer.Typer, tiny: Any) -> None:
    sizes = ("--num-prompts", "8", "--prompt-tokens", "40", "--max-new-tokens", "12", "--residual-length", "8")
    chosen = ("--method", "kivi-1", "--setting", "group_size=8")
    done = CliRunner().invoke(app, ["eval", NAME, *chosen, *sizes, "--json", "--out", "rows.jsonl"])
    assert done.exit_code == 0, done.stderr
    reference, kivi = json.loads(done.stdout)["rows"]
    assert (reference["label"], kivi["label"]) == ("uncompressed", "kivi-1")
    assert len(kivi["units"]) == 8
    assert kivi["metrics"]["repeated"]["difference"]["to"] == "uncompressed"
    assert kivi["memory"]["num_encoded"] > 0
    assert [record.label for record in read_rows(Path("rows.jsonl"))] == ["uncompressed", "kivi-1"]
    shown = CliRunner().invoke(app, ["eval", NAME, *chosen, *sizes, "--baseline", "rows.jsonl"])
    assert (shown.exit_code, "repeated %" in shown.stdout) == (0, True), shown.stderr


def test_it_has_options_of_its_own(app: typer.Typer) -> None:
    shown = CliRunner().invoke(app, ["eval", NAME, "--help"]).stdout
    assert "--prompt-tokens" in shown
    assert "--max-kld" not in shown


def test_nothing_of_it_is_in_the_package(repo_root: Path) -> None:
    assert not list((repo_root / "kvcli").rglob(f"{NAME}*"))
    assert NAME not in EVAL_SUITES


def test_a_suite_of_bench_needs_rows_and_a_table_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the run goes on after a row that failed, and where records say nothing of weights."""

    def measure(row: Row) -> Row:
        if row.context > 1:
            raise ValueError("too long")
        return row

    def prepare(options: BenchOptions, reporter: Any) -> BenchRows:
        cases = options.method_cases()
        rows = (run_row(measure, Row(case.name, context, 1, "sdpa")) for case in cases for context in (1, 2))
        return BenchRows(rows, 2 * len(cases))

    def table(records: Any, options: Any) -> DataTable:
        return DataTable.of("rows", [{"method": record["method"], **status(record)} for record in records])

    suite = BenchSuite(
        name="rows", help="x", options=BenchOptions, example="kvcli bench rows", prepare=prepare, tabulate=table
    )
    monkeypatch.setitem(BENCH_SUITES, "rows", "x:SUITE")
    monkeypatch.setattr(suites, "get_suite", lambda path: suite if path == "x:SUITE" else get_suite(path))
    app = typer.Typer()
    suites.register(app)
    done = CliRunner().invoke(app, ["bench", "rows", "--method", "kivi-2", "--device", "cpu"])
    assert done.exit_code == 1
    assert done.stdout.count("sdpa: FAILED") == 2
    assert "error: kivi-2, 2 tokens, batch 1: ValueError: too long" in done.stderr
