"""The command line: full and closed outputs, signals, narrow terminals, long documents, options that do nothing."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvcli.calibrate.corpus import CorpusConfig, documents, token_sequences
from kvcli.cli.app import app
from kvcli.errors import CorpusError
from kvcli.eval import kl
from kvcli.tables import DataTable

KVCLI = [sys.executable, "-m", "kvcli"]


def invoke(*arguments: str, stdin: Any = None) -> Any:
    return CliRunner().invoke(app, list(arguments), input=stdin)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", ["--help", "--version", "methods", "methods --json", "nonsense --json"])
def test_a_full_standard_output_is_one_line(arguments: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*KVCLI, *arguments.split()], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "error: cannot write to standard output: No space left on device\n"


@pytest.mark.parametrize("arguments", ["--help", "methods --json"])
def test_a_closed_standard_output_is_one_line(arguments: str) -> None:
    command = ["sh", "-c", 'exec "$@" >&-', "sh", *KVCLI, *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "error: cannot write to standard output: it is closed\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 4), (signal.SIGHUP, 4)])
@pytest.mark.parametrize("seconds", [0.0, 0.5])
def test_a_signal_is_one_line_also_during_imports(number: int, code: int, seconds: float) -> None:
    # the program says that it has started, and goes on importing
    start = "from kvcli.cli import start; start._open_streams = lambda: print(flush=True); start.main()"
    # a parent such as nohup may ignore signals, and children inherit that
    start = f"import signal; signal.signal({int(number)}, signal.default_int_handler); {start}"
    command = [sys.executable, "-c", start, "generate", "--prompt", "-"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(seconds)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == code
    assert said.startswith("error: terminated" if code == 4 else "error: interrupted")
    assert said.count("\n") == 1


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, "KeyboardInterrupt"), (signal.SIGTERM, "Terminated")])
def test_a_signal_waits_for_the_import_of_pytorch(tmp_path: Path, number: int, raised: str) -> None:
    """Its C++ code aborts the process at an exception."""
    (tmp_path / "torch.py").write_text(f"""
import os, time
try:
    os.kill(os.getpid(), {int(number)})
    time.sleep(0.3)
except BaseException:
    os.abort()
""")
    program = f"""
import signal, sys, time
signal.signal({int(number)}, signal.default_int_handler)
from kvcli.cli import signals
signals.catch_signals()
sys.path.insert(0, {str(tmp_path)!r})
try:
    import torch
    time.sleep(9)
except BaseException as error:
    signals.stop_reason()
    print(type(error).__name__)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, raised + "\n"), done.stderr


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, "KeyboardInterrupt"), (signal.SIGTERM, "Terminated")])
def test_a_signal_is_sent_again_after_a_destructor_that_drops_its_exception(number: int, raised: str) -> None:
    program = f"""
import signal, time
signal.signal({int(number)}, signal.default_int_handler)
from kvcli.cli import signals

class Dropping:
    def __del__(self):
        signal.raise_signal({int(number)})

signals.catch_signals()
try:
    Dropping()
    time.sleep(9)
except BaseException as error:
    signals.stop_reason()
    print(type(error).__name__)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, raised + "\n", "")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 4)])
def test_a_signal_that_an_import_drops_is_raised_again(tmp_path: Path, number: int, code: int) -> None:
    drops = f"""
import os, time
try:
    os.kill(os.getpid(), {int(number)})
except BaseException:
    pass
try:  # a cleanup of 0.3 s is not interrupted
    raise KeyboardInterrupt
except KeyboardInterrupt:
    time.sleep(0.3)
    print("cleaned")
"""
    (tmp_path / "drops.py").write_text(drops)
    work = "(__import__('drops'), __import__('time').sleep(10))"
    program = f"from kvcli.cli import start; start._open_streams = lambda: {work}; start.main()"
    program = f"import signal; signal.signal({int(number)}, signal.default_int_handler); {program}"
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program, "methods"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (code, "cleaned\n")
    assert done.stderr == f"error: {'interrupted' if code == 130 else 'terminated'}\n"
    assert time.monotonic() - begun < 5


def test_resuming_is_promised_by_commands_that_resume_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvcli.cli.command._run", stop)
    assert "to resume" in invoke("calibrate").stderr
    assert "start over" in invoke("generate").stderr


def rendered(table: DataTable, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(table.fitted(width))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [30, 80, 120])
def test_tables_never_cut_a_cell(width: int) -> None:
    memory = {"key_bits": 2.167, "value_bits": 2.083, "true_bits": 2.125, "ratio": 4.7}
    row = {"memory": memory, "kl_mean": 0.0133, "kl_p99": 0.2, "flips": 0.055, "perplexity": 21.86}
    rows = [{**row, "label": f"commvq-{bits}bit", "num_tokens": 1, "reference_perplexity": 2.0} for bits in (1, 2)]
    lines = rendered(kl.quality_table(rows, kl.KLOptions()), width)
    assert all(len(line) <= width for line in lines)
    assert not any("…" in line for line in lines)
    for text in ("commvq-1bit", "commvq-2bit", "2.167", "0.0133"):
        assert any(text in line for line in lines)


def test_methods_lists_every_setting_of_one() -> None:
    from kvcli.registry import get_method

    settings = json.loads(invoke("methods", "commvq-1", "--json").stdout)["settings"]
    assert {setting["name"] for setting in settings} == set(get_method("commvq").config_cls.model_fields)
    by_name = {setting["name"]: setting for setting in settings}
    assert (by_name["bits"]["default"], by_name["bits"]["range"]) == (1, "from 0.25 to 4")
    assert by_name["codebook_size"]["range"] == "from 2 to 256"
    assert all(setting["meaning"] for setting in settings)


@pytest.mark.parametrize("arguments", ["bench --methods kivi-2 --method rtn-4", "train-codebook --codebook-size 17 x"])
def test_wrong_options_are_one_short_line(arguments: str) -> None:
    result = invoke(*arguments.split())
    assert result.exit_code == 2
    assert len(result.stderr) < 120


@pytest.mark.parametrize("name", ["generate", "calibrate", "bench", "env"])
def test_every_command_has_short_help_quiet_and_verbose(name: str) -> None:
    shown = invoke(name, *(["attention"] if name == "bench" else []), "-h").stdout
    assert "--quiet" in shown
    assert "--verbose" in shown
    assert "--methods" not in shown


def test_the_next_command_is_said_to_people_alone() -> None:
    assert invoke("env").stderr == "next: kvcli demo\n"
    assert invoke("env", "--quiet").stderr == ""
    assert invoke("env", "--json").stderr == ""


def test_output_paths_are_expanded_and_empty_ones_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert kl.KLOptions(out=Path("~/x"), artifact=["~/y"]).out == tmp_path / "x"  # type: ignore[list-item]
    result = invoke("fit", "--out", "")
    assert result.exit_code == 2
    assert "--out" in result.stderr


def test_deep_yaml_is_refused(tmp_path: Path) -> None:
    (tmp_path / "deep.yaml").write_text("[" * 20000)
    result = invoke("calibrate", "--config", str(tmp_path / "deep.yaml"))
    assert result.exit_code == 2
    assert "nested too deeply" in result.stderr


class Characters:
    """A tokenizer whose tokens are characters; it notes how many it was given."""

    eos_token_id = None

    def __init__(self) -> None:
        self.read: list[int] = []

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        self.read.append(len(text))
        return {"input_ids": [ord(c) for c in text]}


def test_of_a_long_document_only_what_is_needed_is_tokenized() -> None:
    tokenizer, text = Characters(), "word " * 1_000_000
    tokens = token_sequences([text], tokenizer, 1, 512)  # type: ignore[arg-type]
    assert "".join(map(chr, tokens[0].tolist())) == text[:512]
    assert sum(tokenizer.read) <= 65536


@pytest.mark.parametrize("text", ["word " * 40_000, "x" * 200_000, "line\n" * 40_000])
def test_pieces_of_a_document_make_up_the_document(text: str) -> None:
    tokens = token_sequences([text], Characters(), 1, len(text))  # type: ignore[arg-type]
    assert "".join(map(chr, tokens[0].tolist())) == text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"revision": "main"}, "no revision 'main'"),
        ({"name": "sample"}, "no configuration 'sample'"),
        ({"split": "test"}, "no split 'test'"),
    ],
)
def test_options_of_hub_datasets_are_refused_for_local_text(tmp_path: Path, options: Any, said: str) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(CorpusError, match=said):
        list(documents(CorpusConfig(str(tmp_path), **options)))


def test_a_folder_of_several_formats_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"text": "x"}')
    (tmp_path / "b.TXT").write_text("text")
    with pytest.raises(CorpusError, match=r"holds .* and .* files"):
        list(documents(CorpusConfig(str(tmp_path))))


def test_splits_that_the_built_in_text_lacks_are_not_looked_for_on_the_hub() -> None:
    with pytest.raises(CorpusError, match="calibration and heldout"):
        list(documents(CorpusConfig(split="nosuch")))


def test_binary_standard_input_is_refused() -> None:
    stream = io.TextIOWrapper(io.BytesIO(b"\xff\xfe\x00"), encoding="utf-8")
    with pytest.raises(CorpusError, match="not UTF-8"):
        list(documents(CorpusConfig("-"), stream))
    assert "not UTF-8" in invoke("generate", "--prompt", "-", stdin=b"\xff\xfe\x00").stderr


def test_an_interrupted_bench_shows_what_it_has_and_ends_with_its_own_code(tmp_path: Path) -> None:
    # the reminder of a signal would fall into the table, or end the process while it exits
    """Fault (inputs): `bench` stopped by a signal. Result: the rows measured so far, and exit code 130 or 4."""
    program = f"""
import atexit, os, signal, sys, time
signal.signal({int(signal.SIGINT)}, signal.default_int_handler)
from kvcli.bench import suite
from kvcli.cli import start
from kvcli.tables import DataTable

def records(self, reporter):
    self.machine = {{}}
    yield {{"method": "fp16", "status": "ok", "weights": "random"}}
    os.kill(os.getpid(), {int(signal.SIGINT)})
    time.sleep(5)

def table(self, records):
    time.sleep(0.4)
    return DataTable("table", ["method"], [["fp16"]])

suite.BenchRun.records, suite.BenchRun.table = records, table
atexit.register(time.sleep, 0.4)
sys.argv = ["kvcli", "bench", "--device", "cpu"]
start.main()
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, "fp16" in done.stdout) == (130, True), done.stderr
    assert "stopped after 1 row\n" in done.stderr
    assert "error: interrupted; run the same command again to start over\n" in done.stderr
