"""Processes that share the work of a suite measure what one process measures, to the last bit."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import byte_tokenizer
from factories import make_model
from ranked import ranks_of

from kvcli.cli.app import run_command_line
from kvcli.eval import kl
from kvcli.storage.ranks import Ranks

METHODS = ("--method", "kivi-2", "--setting", "group_size=8", "--residual-length", "8")
TEXT = ("--corpus", "text.txt")
TOKENS = ("--num-sequences", "3", "--seq-len", "48", "--batch-size", "2", "--chunk", "16", *TEXT)
PROMPTS = ("--num-prompts", "3", *TEXT)
COMPOSE = ("--method", "fp16", *PROMPTS, "--num-documents", "2", "--document-tokens", "120", "--repair", "0")
SUITES = {
    "layers": (*TOKENS, "--layers", "1-1"),
    "long": ("--num-sequences", "3", "--batch-size", "1", "--prompt-tokens", "16", "--max-new-tokens", "24", *TEXT),
    "drift": (*PROMPTS, "--prompt-tokens", "40", "--max-new-tokens", "12"),
    "needle": ("--contexts", "300", "--no-chat", *TEXT),
}
_TIMES = ("first_token_s", "seconds")


def measured(path: Path) -> list[Any]:
    """What records say, but for where they are and how fast they were made."""

    def kept(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: kept(x) for name, x in value.items() if name not in _TIMES}
        return [kept(x) for x in value] if isinstance(value, list) else value

    rows = [kept(json.loads(line)) for line in path.read_text().splitlines()]
    for row in rows:
        row.get("options", {}).pop("out", None)
    return rows


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("\n\n".join(f"Sentence {i} of {i * i} is here." for i in range(400)))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(("suite", "options"), [("kl", (*METHODS, *TOKENS)), ("compose", COMPOSE)])
def test_two_ranks_measure_what_one_process_does(suite: str, options: tuple[str, ...], folder: Path) -> None:
    """A rank has the short batch; what is kept from row to row, such as the model's own states, is each rank's own."""
    command = ("eval", suite, *options)
    for count in (1, 2):
        ranks = ranks_of(folder, (*command, "--out", f"{count}.jsonl"), count)
        assert [code for code, _, _ in ranks] == [0] * count, ranks
        assert all(out == err == "" for _, out, err in ranks[1:])
    shared, alone = (measured(folder / f"{count}.jsonl") for count in (2, 1))
    assert shared == alone
    assert len(alone) == len({row["label"] for row in alone}) == {"kl": 1, "compose": 3}[suite]


@pytest.mark.slow
def test_two_ranks_tune_as_one_process_does(folder: Path) -> None:
    """Rank 0 alone writes; what one process measured is not measured again by two."""
    command = ("tune", "--method", "rtn", "--max-bits", "5", "--context", "400", "--search-sequences", "2", *TOKENS)
    for out, count in (("1.yaml", 1), ("2.yaml", 2)):
        ranks = ranks_of(folder, (*command, "--residual-length", "8", "--out", out), count)
        assert [code for code, _, _ in ranks] == [0] * count, ranks
    assert measured(folder / "2.jsonl") == measured(folder / "1.jsonl")
    assert (folder / "2.yaml").read_text() == (folder / "1.yaml").read_text()
    kept = (folder / "1.jsonl").read_text()
    (folder / "1.yaml").unlink()
    ranks = ranks_of(folder, (*command, "--residual-length", "8", "--out", "1.yaml"), 2)
    assert [code for code, _, _ in ranks] == [0, 0], ranks
    assert (folder / "1.jsonl").read_text() == kept
    assert (folder / "1.yaml").read_text() == (folder / "2.yaml").read_text()


class Permuted(Ranks):
    """Works on items in the order in which three ranks do, one after another, in one process."""

    def each(self, items: Sequence[Any], work: Callable[[Any], Any]) -> list[Any]:
        order = [i for rank in range(3) for i in range(rank, len(items), 3)]
        made = {i: work(items[i]) for i in order}
        return [made[i] for i in range(len(items))]


@pytest.mark.parametrize("suite", SUITES)
def test_the_order_of_the_work_changes_nothing(suite: str, folder: Path, command_model: Any, monkeypatch: Any) -> None:
    """Each of these suites hands its prompts or batches to `Ranks.each`, and nothing passes from one to the next."""
    calls = []

    def ranks() -> Ranks:
        calls.append(suite)
        return Permuted()

    monkeypatch.chdir(folder)
    for out, replaced in (("alone.jsonl", False), ("shared.jsonl", True)):
        for module in ("kl", "quality", "greedy", "long") if replaced else ():
            monkeypatch.setattr(f"kvcli.eval.{module}.joined_ranks", ranks)
        words = ["kvcli", "eval", suite, *METHODS, *SUITES[suite], "--out", out]
        monkeypatch.setattr(sys, "argv", words)
        assert run_command_line() == 0
    assert calls
    assert measured(folder / "shared.jsonl") == measured(folder / "alone.jsonl")


def started(folder: Path, *arguments: str) -> Any:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path), "HOME": str(folder)}
    environment["TMPDIR"] = str(folder / "tmp")
    (folder / "tmp").mkdir()
    command = (sys.executable, "-m", "kvcli", *arguments)
    options: Any = {"cwd": folder, "env": {**environment, "OMP_NUM_THREADS": "1"}, "capture_output": True, "text": True}
    return subprocess.run(command, check=False, timeout=300, **options)


@pytest.mark.slow
def test_devices_start_the_processes_and_their_exit_code_is_the_commands(folder: Path) -> None:
    """A quality gate that is missed is exit code 3, said once; a rank's error too."""
    make_model("llama", vocab_size=260).save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    command = ("eval", "kl", "model", *METHODS, *TOKENS, "--device", "cpu", "--json", "--devices", "2")
    shared = started(folder, *command, "--max-kld", "0")
    assert shared.returncode == 3, shared.stderr
    (row,) = json.loads(shared.stdout)["rows"]
    assert row["num_tokens"] == 3 * 48
    (said,) = (line for line in shared.stderr.splitlines() if "error" in line)
    assert said.startswith("error: quality gate missed")
    assert "torch/distributed" not in shared.stderr
    assert not [*(folder / "tmp").glob("torchelastic*")]


def test_devices_can_be_a_number_in_a_file_of_options() -> None:
    assert (kl.KLOptions(devices=2).devices, kl.KLOptions().devices) == ("2", None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        (("0",), "a number of processes, or 'all' for the GPUs of this machine"),
        (("two",), "a number of processes, or 'all'"),
        (
            ("all", "--device", "cpu"),
            "--devices all: no GPU is used here; say how many processes are to share the work",
        ),
        (("2", "--device", "cuda"), "--devices 2: no GPU is used here"),
        (("2", "--corpus", "-"), "standard input can be read by one process only"),
        (("2", "--device", "cuda:1"), "--devices 2 gives each process a GPU of its own; leave out --device cuda:1"),
    ],
)
def test_devices_that_make_no_sense_are_refused(
    devices: tuple[str, ...], said: str, folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["kvcli", "eval", "--method", "rtn", *TEXT, "--devices", *devices])
    assert run_command_line() != 0
    assert said in capsys.readouterr().err
