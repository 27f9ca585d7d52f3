"""The files of `examples/`, as a user runs them, with a tiny random model as their argument."""

import json
import re
import runpy
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcli.artifact.artifact import Artifact
from kvcli.seam.versions import CACHE_ARGUMENT

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def model(tiny_folder: Path) -> str:
    return str(tiny_folder)


@pytest.fixture
def run(model: str, tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs an example in an empty folder and returns what it printed."""
    monkeypatch.chdir(tmp_path)

    def run_one(name: str, *arguments: str) -> str:
        path = EXAMPLES / f"{name}.py"
        monkeypatch.setattr(sys, "argv", [str(path), model, *arguments])
        capsys.readouterr()
        runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out

    return run_one


def number(pattern: str, text: str) -> float:
    """The number in the group of a pattern, which the text has once."""
    (found,) = re.findall(pattern, text)
    return float(found)


def coded(text: str, bits: int = 4) -> float:
    """The share of tokens said to be codes: these bits, and 32 for each 32 keys or, in a head, 16 values."""
    assert number(r"codes of ([\d.]+) bits per value", text) == bits + 1.5
    return number(r"(\d+) of \d+ tokens are codes", text) / number(r"\d+ of (\d+) tokens are codes", text)


def test_a_document_is_read_once(run: Callable[..., str]) -> None:
    first, second = (run("ask_a_document") for _ in range(2))
    tokens = number(r"(\d+) tokens, 0 of them", first)
    assert tokens > 1000
    assert number(r"(\d+) of them from the store", second) == tokens
    assert first.splitlines()[1:] == second.splitlines()[1:]
    assert coded(first) > 0.8


def run_notebook(name: str, **replaced: object) -> dict[str, Any]:
    """The names of a notebook after a run with other values in place of its first cell of code."""
    cells = json.loads((EXAMPLES / f"{name}.ipynb").read_text())["cells"]
    first, *others = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert first.startswith(", ".join(replaced) + " = ")
    names = dict(replaced)
    for cell in others:
        exec(compile(cell, name, "exec"), names)
    assert all(cell["outputs"] for cell in cells if any("print(" in line for line in cell["source"]))
    return names


@pytest.mark.skipif(CACHE_ARGUMENT != "cache", reason="it is written for transformers 5.24 and newer")
def test_a_notebook_compares_methods(model: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """Cell after cell, of other models and methods; its outputs are those of a run."""
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(SVG=str))
    monkeypatch.chdir(tmp_path)
    names = run_notebook("quickstart", MODEL=model, METHODS=["fp8", "kivi-4", "rtn-2"])
    kl = {row["method"]: row["kl"] for row in names["rows"]}
    assert 0 < kl["fp8"] < kl["rtn-2"]
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed[:3]] == [*kl]


def test_a_notebook_puts_documents_side_by_side(model: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """What it says of the second run of a cell is so."""
    monkeypatch.chdir(tmp_path)
    for read in (True, False):
        names = run_notebook("library", MODEL=model, METHOD="fp16", TOKENS=300)
        printed = capsys.readouterr().out
        assert [int(x) > 300 for x in re.findall(r"(\d+) tokens read", printed)] == [read] * 3
        sizes = {int(x) for x in re.findall(r"(\d+) tokens side by side", printed)}
        assert len(re.findall("side by side", printed)) == 6
        assert min(sizes) > 600
        assert [*names["library"].documents()] == [*names["texts"]]


def test_a_conversation_is_resumed(run: Callable[..., str], tmp_path: Path) -> None:
    printed = run("chat_with_resume")
    assert number(r"saved (\d+) bytes", printed) == (tmp_path / "talk.safetensors").stat().st_size
    assert number(r"(\d+) of \d+ prompt tokens", printed) > 32
    assert "4 messages" in printed


@pytest.mark.skipif(CACHE_ARGUMENT != "cache", reason="the pipeline's is written for transformers 5.24 and newer")
@pytest.mark.parametrize("name", ["batch", "transformers_pipeline"])
def test_prompts_of_different_lengths_are_one_batch(run: Callable[..., str], name: str) -> None:
    printed = run(name)
    assert printed.count(" ... ") == printed.count("\n") - 1 >= 2
    assert 0.3 < coded(printed) < 1


def test_a_task_of_ones_own_is_scored(run: Callable[..., str]) -> None:
    printed = run("lm_eval_task")
    assert 0 <= number(r"boxes: (\d+)% of 12 questions right", printed) <= 100
    assert coded(printed, bits=2) > 0.8


@pytest.mark.slow
def test_a_method_is_fitted_to_ones_own_text(run: Callable[..., str], tmp_path: Path) -> None:
    pages = [EXAMPLES.parent / name for name in ("README.md", "docs/concepts.md")]
    (tmp_path / "own.txt").write_text("\n".join(page.read_text() for page in pages))
    printed = run("calibrate_own_text", "own.txt")
    assert "The best of times" in printed
    assert 1.5 < number(r"([\d.]+) bits per value", printed) < 3
    assert Artifact.load(tmp_path / "own" / "klt-2").method == "klt"


@pytest.mark.slow
def test_a_server_finds_a_document_again(run: Callable[..., str]) -> None:
    first, second = re.findall(r"(\d+) of (\d+) tokens were not read again", run("serve_openai"))
    assert first[0] == "0"
    assert 0.8 < int(second[0]) / int(second[1]) < 1


def test_vllm_gets_a_tier_that_kvcli_accepts(run: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine stands for vLLM's; `tests/integrations/vllm` drives the tier itself."""
    monkeypatch.setitem(sys.modules, "vllm", None)  # it is not there
    with pytest.raises(SystemExit, match="vLLM is not installed"):
        run("vllm_tier")
    made: list[Any] = []
    outputs = [SimpleNamespace(text="Mr. Brook")]
    answer = SimpleNamespace(outputs=outputs, num_cached_tokens=512, prompt_token_ids=[0] * 600)
    engine = SimpleNamespace(generate=lambda prompts, sampling: [answer])
    fake = SimpleNamespace(LLM=lambda *words, **named: made.append((words, named)) or engine, SamplingParams=dict)
    monkeypatch.setitem(sys.modules, "vllm", fake)
    command, *said = run("vllm_tier").splitlines()
    (((model,), named),) = made
    program, verb, served, flag, transfer = shlex.split(command)
    assert (program, verb, served, flag) == ("vllm", "serve", model, "--kv-transfer-config")
    assert json.loads(transfer) == named["kv_transfer_config"]
    page = (EXAMPLES.parent / "docs" / "tiers.md").read_text().partition(f"{flag} '")[2].partition("'")[0]
    extra, of_page = (x["kv_connector_extra_config"] for x in (json.loads(transfer), json.loads(page)))
    assert extra.keys() == of_page.keys()
    assert extra["secondary_tiers"][0].keys() == of_page["secondary_tiers"][0].keys()
    assert said[1] == "512 of 600 tokens were not read again"


def test_examples_are_short_listed_and_run_by_a_test() -> None:
    page, tests = (EXAMPLES / "README.md").read_text(), Path(__file__).read_text()
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 30, path.name
        assert f"]({path.name})" in page
        assert f'"{path.stem}"' in tests
