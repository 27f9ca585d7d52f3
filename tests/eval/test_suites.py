"""`kvcli eval --suite`: every suite from the command line, its records, its table, its exit code."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvcli.cli.app import app
from kvcli.cli.suites import suite_first
from kvcli.eval.records import read_rows
from kvcli.models.load import LoadedModel
from kvcli.registry import EVAL_SUITES, get_suite

KIVI = ("--method", "kivi-2", "--setting", "group_size=8", "--residual-length", "8")
SIZES = {
    "kl": ("--seq-len", "64", "--num-sequences", "8"),
    "layers": ("--seq-len", "64", "--num-sequences", "8", "--layers", "1-2"),
    "needle": ("--contexts", "100", "--contexts", "200", "--depths", "50", "--num-prompts", "2"),
    "recall": ("--distances", "20", "--passage-words", "4", "--num-prompts", "2"),
    "ruler": ("--contexts", "700", "--contexts", "900", "--tasks", "vt", "--num-prompts", "1"),
    "tools": ("--contexts", "256", "--contexts", "300", "--num-prompts", "1"),
    "drift": ("--prompt-tokens", "40", "--max-new-tokens", "6", "--num-prompts", "3"),
    "long": ("--prompt-tokens", "8", "--max-new-tokens", "40", "--num-sequences", "3", "--batch-size", "2"),
}

METRICS = {"kl": "kl_mean", "long": "kl_mean", "drift": "equal", "ruler": "found", "tools": "arguments"}


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["eval", *arguments])


@pytest.mark.parametrize("suite", SIZES)
def test_a_suite_measures_prints_and_records(command_model: LoadedModel, suite: str) -> None:
    done = invoke(suite, *KIVI, "--method", "fp16", *SIZES[suite], "--json", "--out", "rows.jsonl")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["suite"] == suite
    labels = [row["label"] for row in found["rows"]]
    if suite == "layers":
        assert labels == ["kivi-2 all layers", "kivi-2 layer 1", "kivi-2 layer 2"]
        whole, *layers = (row["kl_mean"] for row in found["rows"])
        assert all(0 < kl < whole for kl in layers)
        # a layer of 3 bits between two of 32
        assert found["rows"][1]["memory"]["value_bits"] == pytest.approx((2 * 32 + 2 + 2 * 16 / 8) / 3)
    else:
        reference = suite in ("needle", "recall", "ruler", "tools")  # they have no reference of their own
        assert labels == ["uncompressed"] * reference + ["kivi-2", "fp16"]
        metric = METRICS.get(suite, "exact")
        assert {row["metrics"][metric]["difference"]["to"] for row in found["rows"][1:]} == {labels[0]}
        if reference:
            assert found["rows"][0]["memory"] is None
            first, _, last = ([unit["answer"] for unit in row["units"]] for row in found["rows"])
            assert first == last  # the fp16 cache says what the model says
    assert [record.label for record in read_rows(Path("rows.jsonl"))] == labels
    assert "nothing was measured" not in done.stderr
    assert all(row["memory"]["num_encoded"] > 0 for row in found["rows"] if row["memory"])
    whole = get_suite(EVAL_SUITES[suite])
    options = whole.options.model_validate(found["rows"][0]["options"])
    for width in (40, 80):
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(whole.tabulate(found["rows"], options).fitted(width))
        shown = console.export_text().splitlines()
        assert all(len(line.rstrip()) <= width for line in shown)
        assert not any("…" in line for line in shown)
        assert any("kivi-2" in line for line in shown)


def test_texts_inside_the_window_are_told_to_measure_nothing(command_model: LoadedModel) -> None:
    done = invoke("kl", "--method", "fp16", *KIVI, *SIZES["kl"], "--chunk", "4", "--seq-len", "10")
    assert "warning: nothing was measured of kivi-2: its window holds these texts" in done.stderr
    assert done.stderr.count("warning: ") == 1


def test_the_table_says_which_differences_are_real(command_model: LoadedModel) -> None:
    methods = ("--method", "kivi-1", "--method", "kivi-8", "--method", "kivi-1")
    done = invoke(*KIVI[2:], *methods, *SIZES["kl"])
    assert done.exit_code == 0, done.stderr
    assert "KL - kivi-1" in done.stdout
    rows = [line for line in done.stdout.splitlines() if "│ kivi-8" in line]  # of each part of the table
    assert any("*" in row for row in rows)
    assert "next: kvcli bench" in done.stderr
    words = (*KIVI[2:], *methods[:4], *SIZES["kl"], "--compare-with", "kivi-8", "--json")
    named = json.loads(invoke(*words).stdout)["rows"]
    assert [row["label"] for row in named] == ["kivi-8", "kivi-1"]
    assert named[1]["metrics"]["kl_mean"]["difference"]["real"] is True
    wrong = invoke(*KIVI, *SIZES["kl"], "--compare-with", "kivi-3")
    assert (wrong.exit_code, "rows are kivi-2" in wrong.stderr) == (2, True)


def test_gates_end_with_a_code_of_their_own_after_the_table(command_model: LoadedModel) -> None:
    run = (*KIVI, *SIZES["kl"])
    former = invoke(*run, "--json")
    Path("former.json").write_text(former.stdout)
    mean = json.loads(former.stdout)["rows"][0]["kl_mean"]
    assert invoke(*run, "--max-kld", str(1.01 * mean), "--baseline", "former.json").exit_code == 0
    missed = invoke(*run, "--max-kld", str(0.9 * mean), "--max-flips", "0")
    assert (missed.exit_code, "kivi-2" in missed.stdout) == (3, True)
    assert "error: quality gate missed: kivi-2: kl_mean" in missed.stderr
    assert "flips" in missed.stderr
    assert "next:" not in missed.stderr
    Path("former.json").write_text(former.stdout.replace('"label": "kivi-2"', '"label": "kivi-1"'))
    worse = invoke("--method", "kivi-1", *run[2:], "--baseline", "former.json", "--json")
    assert worse.exit_code == 3
    gates = json.loads(worse.stdout)["gates"]
    found = {(gate["gate"], gate["label"], gate["metric"], gate["passed"]) for gate in gates}
    assert found == {("baseline", "kivi-1", metric, False) for metric in ("kl_mean", "flips")}
    other = invoke("--method", "kivi-1", *run[2:], "--baseline", "former.json", "--seed", "1")
    assert (other.exit_code, "seed 0 there, 1 here" in other.stderr) == (2, True)
    assert invoke(*run, "--baseline", "none.json").exit_code == 2
    unknown = invoke(*run, "--baseline", "former.json")
    assert unknown.exit_code == 2
    assert "no row 'kivi-2' of suite kl; its rows are: kivi-1" in unknown.stderr
    assert "tokens/s" not in unknown.stderr  # nothing was measured


def test_an_option_of_other_suites_is_refused_by_name() -> None:
    done = invoke("needle", "--max-kld", "1")
    assert (done.exit_code, "No such option: --max-kld" in done.stderr) == (2, True)
    assert "No such option: --compare-with" in invoke("layers", "--compare-with", "fp16").stderr
    assert "--num-prompts" in invoke("needle", "--help").stdout


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("", "kl"),
        ("smollm2-135m --seed 1", "kl smollm2-135m --seed 1"),
        ("--seed 1 some/model", "kl --seed 1 some/model"),
        ("tiny.gguf --suite needle --seed 1", "needle tiny.gguf --seed 1"),
        ("--suite=drift m/n", "drift m/n"),
        *[(same, same) for same in ("drift --help", "--help")],
    ],
)
def test_the_suite_can_be_named_in_two_ways_or_not_at_all(typed: str, meant: str) -> None:
    assert suite_first(typed.split(), EVAL_SUITES, "kl") == meant.split()


@pytest.mark.parametrize("typed", ["neddle", "--suite neddle", "--suite=neddle"])
def test_a_suite_that_does_not_exist_is_refused_with_the_one_that_was_meant(typed: str) -> None:
    done = invoke(*typed.split())
    assert (done.exit_code, "did you mean 'needle'?" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("needle --depths 101", "--depths: Input should be less than or equal to 100"),
        ("needle --contexts 3", "--contexts: Input should be greater than or equal to 16"),
        ("--suite tasks", "needs --tasks"),
        ("--suite layers --layers 2-1", "a number or a range"),
        ("layers --layers 1-3", "only layers 0-2 are in the model"),
        ("--suite layers --layers x", "a number or a range"),
        ("--suite needle --chat", "no chat template"),
        ("--setting groups=3", "none of the methods has a setting 'groups'"),
        ("--residual-length 8", "must be a positive multiple of group_size 32"),
    ],
)
def test_what_a_suite_cannot_do_is_one_line(command_model: LoadedModel, arguments: str, named: str) -> None:
    done = invoke(*arguments.split(), "--method", "kivi-2")
    assert done.exit_code == 2
    assert named in done.stderr
    assert done.stderr.count("error:") == 1
    assert "tokens/s" not in done.stderr  # nothing was measured


def test_tasks_without_lm_eval_say_what_to_install(command_model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lm_eval", "lm_eval.api.model"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "kvcli.eval.lm_tasks", raising=False)
    done = invoke("--suite", "tasks", "--tasks", "x", "--method", "kivi-2")
    assert done.exit_code == 2
    assert "pip install 'kvcli[eval]'" in done.stderr


def test_sequences_beyond_the_positions_of_the_model_are_said(command_model: LoadedModel) -> None:
    limit = command_model.spec.max_position_embeddings
    for beyond in (0, 1):
        said = invoke("kl", *KIVI, "--num-sequences", "1", "--seq-len", str(limit + beyond)).stderr
        assert (f"tokens are more than the {limit}" in said) == bool(beyond)
        needle = ("needle", *KIVI, "--contexts", str(limit + beyond), "--num-prompts", "1", "--depths", "50")
        assert (f"tokens are more than the {limit}" in invoke(*needle).stderr) == bool(beyond)
