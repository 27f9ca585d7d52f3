"""The command line: full and closed outputs, signals, narrow terminals, long documents, options that do nothing."""

import io
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from console import invoke, refused, result
from rich.console import Console

from kvcli.calibrate.corpus import CorpusConfig, documents, token_sequences
from kvcli.cli import start
from kvcli.errors import CorpusError
from kvcli.eval import kl
from kvcli.registry import get_method


def run(*command: str, **options: Any) -> Any:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, **options)


def heeding(number: int, program: str) -> str:
    """A program that gets a signal: a parent such as nohup may ignore signals, and children inherit that."""
    return f"import os, signal, sys, time\nsignal.signal({int(number)}, signal.default_int_handler)\n{program}"


@pytest.mark.parametrize("arguments", ["--help", "--version", "methods", "nonsense --json"])
@pytest.mark.parametrize(
    ("target", "said"),
    [
        pytest.param(
            "/dev/full",
            "No space left on device",
            marks=pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full"),
        ),
        ("&-", "it is closed"),
    ],
)
def test_a_full_or_closed_standard_output_is_one_line(target: str, said: str, arguments: str) -> None:
    done = run("sh", "-c", f'exec "$@" >{target}', "sh", sys.executable, "-m", "kvcli", *arguments.split())
    assert (done.returncode, done.stderr) == (1, f"error: cannot write to standard output: {said}\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 4), (signal.SIGHUP, 4)])
@pytest.mark.parametrize("seconds", [0.0, 0.5])
def test_a_signal_is_one_line_also_during_imports(number: int, code: int, seconds: float) -> None:
    # the program says that it has started, and goes on importing
    start = "from kvcli.cli import start; start._open_streams = lambda: print(flush=True); start.main()"
    command = [sys.executable, "-c", heeding(number, start), "generate", "--prompt", "-"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, text=True, **pipes) as process:  # type: ignore[call-overload]
        process.stdout.readline()
        time.sleep(seconds)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == code
    assert said.startswith("error: terminated" if code == 4 else "error: interrupted")
    assert said.count("\n") == 1


TORCH = """
import os, time
try:
    os.kill(os.getpid(), {number})
    time.sleep(0.3)
except BaseException:
    os.abort()
"""
DROPPING = """
class Dropping:
    def __del__(self):
        signal.raise_signal({number})
"""
CATCHING = """
from kvcli.cli import signals
signals.catch_signals()
try:
    {work}
    time.sleep(9)
except BaseException as error:
    signals.stop_reason()
    print(type(error).__name__)
"""


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, "KeyboardInterrupt"), (signal.SIGTERM, "Terminated")])
@pytest.mark.parametrize("work", ["import torch", "Dropping()"])
def test_a_signal_waits_for_the_import_of_pytorch_and_is_sent_again_after_a_destructor_that_drops_it(
    tmp_path: Path, work: str, number: int, raised: str
) -> None:
    """PyTorch's C++ code aborts the process at an exception."""
    (tmp_path / "torch.py").write_text(TORCH.format(number=int(number)))
    program = DROPPING.format(number=int(number)) + CATCHING.format(work=work)
    done = run(sys.executable, "-c", heeding(number, program), cwd=tmp_path)
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
    work = "(__import__('drops'), __import__('time').sleep(90))"
    program = f"from kvcli.cli import start; start._open_streams = lambda: {work}; start.main()"
    done = run(sys.executable, "-c", heeding(number, program), "methods", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, "cleaned\n")
    assert done.stderr == f"error: {'interrupted' if code == 130 else 'terminated'}\n"


def test_resuming_is_promised_by_commands_that_resume_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvcli.cli.command._run", stop)
    assert "to resume" in invoke("calibrate").stderr
    assert "start over" in invoke("generate").stderr


@pytest.mark.parametrize("width", [30, 80, 120])
def test_tables_never_cut_a_cell(width: int) -> None:
    memory = {"key_bits": 2.167, "value_bits": 2.083, "true_bits": 2.125, "ratio": 4.7}
    row = {"memory": memory, "kl_mean": 0.0133, "kl_p99": 0.2, "flips": 0.055, "perplexity": 21.86}
    rows = [{**row, "label": f"commvq-{bits}bit", "num_tokens": 1, "reference_perplexity": 2.0} for bits in (1, 2)]
    shown = io.StringIO()
    Console(file=shown, width=width).print(kl.quality_table(rows, kl.KLOptions()).fitted(width))
    assert max(map(len, shown.getvalue().splitlines())) <= width
    assert "…" not in shown.getvalue()
    assert all(text in shown.getvalue() for text in ("commvq-1bit", "commvq-2bit", "2.167", "0.0133"))


def test_methods_lists_every_setting_of_one() -> None:
    settings = {setting.pop("name"): setting for setting in result("methods", "commvq-1", "--json")["settings"]}
    assert settings.keys() == get_method("commvq").config_cls.model_fields.keys()
    assert (settings["bits"]["default"], settings["bits"]["range"]) == (1, "from 0.25 to 4")
    assert settings["codebook_size"]["range"] == "from 2 to 256"
    assert all(setting["meaning"] for setting in settings.values())


def test_short_help_is_the_help() -> None:
    for name in ("generate", "bench attention", "env"):
        shown = invoke(*name.split(), "-h").stdout
        assert shown == invoke(*name.split(), "--help").stdout


def test_the_next_command_is_said_to_people_alone() -> None:
    said = {options: invoke("env", *options).stderr for options in ((), ("--quiet",), ("--json",))}
    assert said == {(): "next: kvcli demo\n", ("--quiet",): "", ("--json",): ""}


def test_output_paths_are_expanded_and_empty_ones_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert kl.KLOptions(out=Path("~/x"), artifact=["~/y"]).out == tmp_path / "x"  # type: ignore[list-item]
    assert "--out" in refused("fit", "--out", "")


class Characters:
    """A tokenizer whose tokens are characters; it notes how many it was given."""

    eos_token_id = None

    def __init__(self) -> None:
        self.read: list[int] = []

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        self.read.append(len(text))
        return {"input_ids": [ord(c) for c in text]}


@pytest.mark.parametrize("text", ["word " * 40_000, "x" * 200_000, "line\n" * 40_000])
def test_pieces_of_a_document_make_up_the_document_and_those_not_needed_are_not_tokenized(text: str) -> None:
    for length, most in ((len(text), len(text)), (512, 65536)):
        tokenizer: Any = Characters()
        tokens = token_sequences([text], tokenizer, 1, length)
        assert "".join(map(chr, tokens[0].tolist())) == text[:length]
        assert sum(tokenizer.read) <= most + 8  # and letters, to see how the tokenizer begins a text and pieces


def test_binary_standard_input_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, data in (("stdin", b"\xff"), ("stdout", b""), ("stderr", b"")):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BytesIO(data), "utf-8", "surrogateescape"))
    start._open_streams()  # Python's streams in the locale C take all bytes
    assert sys.stdin.errors == "strict"
    stream = io.TextIOWrapper(io.BytesIO(b"\xff\xfe\x00"), encoding="utf-8")
    with pytest.raises(CorpusError, match="not UTF-8"):
        list(documents(CorpusConfig("-"), stream))
    assert "not UTF-8" in invoke("generate", "--prompt", "-", stdin=b"\xff\xfe\x00").stderr


def test_an_interrupted_bench_shows_what_it_has_and_ends_with_its_own_code(tmp_path: Path) -> None:
    # the reminder of a signal would fall into the table, or end the process while it exits
    """Fault: `bench` stopped by a signal. Result: the rows measured so far, and exit code 130 or 4."""
    program = f"""
import atexit
from kvcli.bench import attention, suite
from kvcli.cli import start
from kvcli.commands.tables import DataTable

def records(self, reporter):
    self.machine = {{}}
    yield {{"method": "fp16", "status": "ok", "weights": "random"}}
    os.kill(os.getpid(), {int(signal.SIGINT)})
    time.sleep(5)

def table(records, options):
    time.sleep(0.4)
    return DataTable("table", ["method"], [["fp16"]])

suite.BenchRun.records = records
object.__setattr__(attention.SUITE, "tabulate", table)
atexit.register(time.sleep, 0.4)
sys.argv = ["kvcli", "bench", "--device", "cpu"]
start.main()
"""
    done = run(sys.executable, "-c", heeding(signal.SIGINT, program), cwd=tmp_path)
    assert (done.returncode, "fp16" in done.stdout) == (130, True), done.stderr
    assert "stopped after 1 row\n" in done.stderr
    assert "error: interrupted; run the same command again to start over\n" in done.stderr
