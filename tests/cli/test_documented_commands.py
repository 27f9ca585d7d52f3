"""What README and docs tell to type: every option exists, and what takes seconds on a tiny model is run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from console import invoke, result
from doc_blocks import PAGES, ROOT, Block, blocks, commands, inline
from factories import load, make_model
from laboratory import research
from typer.main import get_command

import kvcli
from kvcli.artifact.choice import MethodChoice, choose
from kvcli.artifact.recipe import Recipe
from kvcli.cli import command
from kvcli.cli.app import app
from kvcli.cli.flags import resolve
from kvcli.commands.options import parse_settings
from kvcli.models import load as models
from kvcli.plan import memory
from kvcli.seam.versions import CACHE_ARGUMENT

RUN = ("README.md", "docs/quickstart.md", "docs/contexts.md", "docs/planning.md")
NOT_RUN = {
    "CONTRIBUTING.md": "the whole tests, and benchmarks for a GPU",
    "docs/adding_a_method.md": "tests/cli/test_adding_a_method.py runs it",
    "docs/adding_a_suite.md": "tests/cli/test_adding_a_method.py runs it",
    "docs/benchmarks.md": "hours on a GPU",
    "docs/engines.md": "tests/integrations runs its parts; vLLM's server needs a GPU",
    "docs/library.md": "tests/cli/test_library_command.py runs such commands",
    "docs/methods.md": "an hour on a GPU",
    "docs/quality.md": "hours on a GPU",
    "docs/records.md": "tests/cli/test_inspect_and_diff.py and tests/eval/test_report.py run such commands",
    "docs/rivals.md": "half an hour, and a network",
    "docs/scaling.md": "a cluster; tests/calibrate/test_ranks.py and test_workflow.py run the same in small",
    "docs/serving.md": "a server does not end; tests/serve and examples/serve_openai.py run it",
    "docs/tiers.md": "engines; tests/integrations drives their own classes and starts LMCache's server",
    "docs/tuning.md": "minutes; tests/eval/test_tune.py runs it in small",
}
"""Pages with commands or programs that no test here runs, and why; their options are checked all the same."""

OTHERS = {"venv", ".", "pip", "pytest", "ruff", "mypy", "lmcache", "sglang", "vllm"}
OTHERS |= {"research.vllm_throughput", "research.engine_capacity"}
"""Programs of others, and one that needs vLLM and a GPU; `.ci/run` calls all but the last three."""

FEW = ("--max-new-tokens", "4")
SMALL = {
    "demo": None,  # test_workflow.py
    "pull": None,  # test_share.py
    "serve": None,  # tests/serve
    "ask": FEW,
    "generate": FEW,
    "chat": FEW,
    "calibrate": ("--tokens", "2048", "--seq-len", "64", "--query-tokens", "512", "--fisher-tokens", "512"),
    "train-codebook": ("--codebook-size", "8", "--num-residuals", "2", "--value-iterations", "2"),
    "tune": (
        *("--method", "kivi", "--setting", "group_size=8", "--max-kld", "10", "--seq-len", "64"),
        *("--num-sequences", "2", "--search-sequences", "1", "--context", "512", "--residual-length", "8"),
    ),
    "eval": ("--seq-len", "64", "--num-sequences", "2"),
    "bench": ("--shape", "tiny", "--contexts", "64", "--repeats", "1", "--method", "kivi-2"),
}
"""Options that make a command small enough for a test."""

BLOCKS = [*blocks()]


def program(made: typer.Typer) -> Any:
    """A program with the suites of now."""
    found: Any = get_command(made)
    assert all(found.get_command(None, name) for name in ("eval", "bench"))
    return found


PROGRAMS = {"kvcli": program(app)}
with research() as laboratory:
    PROGRAMS["research"] = program(laboratory)


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Parses a command line and validates its values as the command does, methods and settings too."""

    def check(told: Any, flags: dict[str, Any], config: str | None, output: Any) -> None:
        options = resolve(told.options, flags, config, told.arguments, told.settings)
        methods = getattr(options, "method", None) or []
        names = [methods] if isinstance(methods, str) else methods
        choose(map(MethodChoice, names), parse_settings(getattr(options, "setting", [])) if names else {})

    monkeypatch.setattr(command, "_run", check)
    recipe = Recipe(model="MODEL", fingerprint="", method="kivi-4")
    monkeypatch.setattr(Recipe, "read", lambda path: recipe)  # files of the pages are not there
    with research():
        yield lambda words: PROGRAMS[words[0]].main(words[1:], words[0], standalone_mode=False) or 0


def _options(words: list[str]) -> set[str]:
    """Options of the command that is named, or of the suites of one with suites."""
    found = PROGRAMS[words[0]]
    for word in words[1:]:
        if word not in getattr(found, "commands", {}):
            break
        found = found.get_command(None, word)
    below = (found.get_command(None, name) for name in getattr(found, "commands", ()))
    parameters = [x for y in (found, *below) for x in y.params]
    return {"--help", *(flag for x in parameters for flag in (*x.opts, *x.secondary_opts))}


@pytest.mark.parametrize("page", [page for page in (*RUN, *NOT_RUN) if "adding" not in page])
def test_commands_in_blocks_are_those_of_the_program(page: str, parse: Any) -> None:
    """But for a method and a suite that a page adds."""
    for block in BLOCKS:
        for words in commands(block) if block.page == page and block.language != "python" else ():
            if words[0] in PROGRAMS:
                assert parse(words) == 0, words
            else:
                assert words[0] in OTHERS
                assert all((ROOT / word).exists() for word in words if word.startswith("tests/"))


def test_options_in_the_prose_exist() -> None:
    told = [words for page in PAGES for words in inline(page)]
    assert len(told) > 100
    assert [words for words in told for x in words if x.startswith("-") and x not in _options(words)] == []


def test_examples_of_the_help_can_be_parsed(parse: Any) -> None:
    for words in inline(ROOT / "docs" / "cli.md"):
        assert parse(words) == 0, words


@pytest.mark.parametrize("line", ["generate --prompts x", "eval --method kivvi", "generat", "fit --setting klt=1"])
def test_a_wrong_option_or_method_is_found(line: str, parse: Any) -> None:
    (words,) = commands(Block("", "console", f"$ kvcli {line} # it's wrong"))
    assert invoke(*words[1:]).exit_code == 2


def test_every_page_with_blocks_is_run_or_it_is_said_why_not() -> None:
    assert {block.page for block in BLOCKS} == {*RUN, *NOT_RUN}
    assert {block.language for block in BLOCKS} == {"console", "bash", "python"}


@pytest.mark.parametrize("page", RUN)
def test_a_page_is_run_from_its_beginning_to_its_end(page: str, chatty: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = load(make_model("llama", vocab_size=300, eos_token_id=2, max_position_embeddings=4096))
    chatty = replace(made, tokenizer=chatty.tokenizer)
    monkeypatch.setattr(models, "load_model", lambda name="tiny", **_: replace(chatty, name=name))
    config_of = memory.model_config  # but for the hub
    shape = {"meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b"}
    monkeypatch.setattr(memory, "model_config", lambda name, *rest: config_of(shape.get(name, name), *rest))
    Path("OWNER/NAME").mkdir(parents=True)  # as good as a repository
    for name in ("book", "other", "licence", "handbook-1", "handbook-2", "question"):
        Path(f"{name}.txt").write_text("".join(f"{i}. It was the best of times. " for i in range(40)) + name)
    ids, text = torch.tensor([[1, *range(3, 80)]]), Path("book.txt").read_text()
    names = {"kvcli": kvcli, "torch": torch, "model": chatty.model, "tokenizer": chatty.tokenizer, "input_ids": ids}
    names |= {"inputs": {"input_ids": ids}, "question_ids": ids[:, :9], "ids": ids, "text": text}
    monkeypatch.setattr(kvcli, "load_model", models.load_model)
    for block in BLOCKS:
        if block.page != page:
            continue
        if block.language == "python":
            exec(compile(block.text.replace(" cache=", f" {CACHE_ARGUMENT}="), page, "exec"), names)
            continue
        for words in commands(block):
            small = SMALL.get(words[1], ()) if words[0] == "kvcli" else None
            if words[-2:] == ["--method", "klt"] or "--fit" in words:  # test_fit_option.py
                small = None
            if small is not None:
                result(*words[1:], *small, stdin="Who is it?\n/exit\n")
