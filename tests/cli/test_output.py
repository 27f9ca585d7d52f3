"""Output discipline: one line an error, JSON, progress, units, the next command; what is set before heavy imports."""

import os
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from console import invoke, result
from rich.console import Console
from typer.main import get_command

from kvcli.cli import start
from kvcli.cli.app import app
from kvcli.cli.command import describe_error, model_argument, try_method
from kvcli.cli.output import Output, duration
from kvcli.cli.suites import last_method
from kvcli.commands.sizes import share, size
from kvcli.commands.tables import DataTable
from kvcli.errors import KvcliError, UsageError


def test_errors_are_json_too_and_debug_shows_the_traceback() -> None:
    assert result("export", "--json", exit_code=1)["exit_code"] == 1
    assert isinstance(invoke("export", "--debug").exception, KvcliError)


class OutOfMemoryError(RuntimeError):
    """Named as torch names it."""


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KvcliError("a\n b"), 1, "a b"),
        (UsageError("x"), 2, "x"),
        (KeyboardInterrupt(), 130, "resume"),
        (OSError(28, "No space left on device", "f"), 1, "disk is full (f)"),
        (PermissionError(13, "Permission denied", "/root/x"), 1, "cannot write to /root/x"),
        (OutOfMemoryError("CUDA out of memory"), 1, "out of memory; "),
        (ZeroDivisionError("division by zero"), 1, "--debug"),
    ],
)
def test_error_table(error: BaseException, code: int, said: str) -> None:
    actual, line = describe_error(error)
    assert (actual, said in line, "\n" in line) == (code, True, False)


def test_what_others_wrote_does_not_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    text, output = "a\x1b[1mb\x07\x9b1mc\u202ed\te\n[/f]", Output(verbose=True)
    for say in (output.say, output.warn, output.detail, output.error, output.write):
        say(text)
    output.settings({"prompt": text})
    output.result({}, [text, DataTable(text, ("", "x"), [[text, text]])])
    out, err = capsys.readouterr()
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & {*out, *err}
    assert "a [1mb  1mc d\te\n[/f]" in out


def test_prose_is_broken_to_80_columns_in_a_pipe_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output()
    output.result({}, DataTable("", ("what", "detail"), [["a", "many words " * 40]], 2, prose=("detail",)))
    assert max(map(len, capsys.readouterr().out.splitlines())) == 80
    output.result({}, DataTable("", ("what", "detail"), [["a", "one" * 40]], optional=("detail",)))
    assert "one" * 40 in capsys.readouterr().out


def test_columns_beyond_80_are_in_further_tables_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    """Each has the columns that tell its rows apart; a terminal of any width leaves columns out instead."""
    rows = [["a", "x", *["1" * 30] * 3], ["a", "y", *["2" * 30] * 3]]
    table = DataTable("what", ("name", "of", "first", "second", "third"), rows, text_columns=2, optional=("first",))
    Output().result({}, table)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= 80
    assert lines[0] == "what"
    headings = [[x.strip() for x in line.strip("┃").split("┃")] for line in lines if line.startswith("┃")]
    assert headings == [["name", "of", "first", "second"], ["name", "of", "third"]]
    assert [line.count("2" * 30) for line in lines if line.startswith("│ a    │ y  │")] == [2, 1]


@pytest.mark.parametrize(("width", "tables"), [(82, 1), (81, 2), (62, 2), (49, 2), (48, 0)])
def test_columns_that_no_terminal_leaves_out_are_in_further_tables_there_too(width: int, tables: int) -> None:
    """One line per cell where even two of them do not fit."""
    table = DataTable("what", ("name", "first", "second"), [["a", "1" * 30, "2" * 38]], optional=())
    console = Console(file=(shown := StringIO()), width=width)
    console.print(table.fitted(width))
    assert max(map(len, shown.getvalue().splitlines())) <= width
    assert (shown.getvalue().count("┏"), "2" * 38 in shown.getvalue()) == (tables, True)
    words = replace(table, prose=("first", "second"))  # a path or a digest may be broken
    with console.capture() as capture:
        console.print(words.fitted(width))
    assert capture.get().count("┏") == (tables if width < 62 else 1)
    assert capture.get().count("2") == 38


def test_progress_talks_plainly_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Output().progress("work", 4, "steps") as advance:
        for _ in range(4):
            advance(1)
    with Output().progress("download", 4_000_000, "B") as advance:
        advance(4_000_000)
    out, (work, download) = (x.splitlines() for x in capsys.readouterr())
    assert not out
    assert "work: 4/4 steps" in work
    assert re.fullmatch(r"download: 4\.0 MB of 4\.0 MB, .*B/s, eta 0:00.*", download)


def test_units() -> None:
    texts = {0: "0 B", 1023: "1023 B", 1536: "1.50 KiB", 3 * 2**20: "3.00 MiB", 5 * 2**30: "5.00 GiB"}
    assert {x: size(x) for x in texts} == texts
    assert [share(4), share(1), share(0.5), share(2.34, 1), share(None)] == ["1/4.00", "1/1.00", "2.00", "1/2.3", "-"]
    assert duration(61.4) == "1:01"


def test_the_next_command() -> None:
    """A method is tried, or the artifact that it needs is made; the default model is not named."""
    assert try_method("kivi-2", "eval", ["m"]) == ["kvcli", "eval", "m", "--method", "kivi-2"]
    assert try_method("commvq-1", "eval", ["m"]) == ["kvcli", "calibrate", "m"]
    assert last_method([{"method": "fp16"}, {"method": "kivi-2"}, {"method": "fp16"}]) == "kivi-2"
    assert last_method([{"method": "fp16"}]) == "fp8"
    assert (model_argument("m"), model_argument("smollm2-135m")) == (["m"], [])


LARGE = {"THP_MEM_ALLOC_ENABLE": "1"}


@pytest.mark.parametrize(
    ("command", "running", "environment", "added"),
    [
        ("fit", 1, {}, {**LARGE, "GOMP_SPINCOUNT": "1000"}),
        ("demo", 1, {"GOMP_SPINCOUNT": "7"}, LARGE),
        ("calibrate", 1, {"OMP_WAIT_POLICY": "active"}, LARGE),
        ("generate", 1, {}, {"GOMP_SPINCOUNT": "10000"}),
        ("generate", 11, {}, {"OMP_WAIT_POLICY": "PASSIVE"}),
        ("generate", None, {}, {"OMP_WAIT_POLICY": "PASSIVE"}),  # not Linux
        ("serve", 1, {}, {"OMP_WAIT_POLICY": "PASSIVE"}),  # others may come
        ("generate", 1, {"OMP_WAIT_POLICY": "active"}, {}),
        ("ask", 1, {"GOMP_SPINCOUNT": "7"}, {}),
    ],
)
def test_threads(monkeypatch: Any, tmp_path: Path, command: str, running: Any, environment: Any, added: Any) -> None:
    changed = dict(environment)
    monkeypatch.setattr(os, "environ", changed)
    monkeypatch.setattr(start, "_LOAD", tmp_path / "loadavg")
    if running is not None:
        start._LOAD.write_text(f"0.10 0.20 0.30 {running}/123 456\n")
    start._prepare_libraries([command, "--seed", "1"])
    assert changed == {**environment, **added, "TRITON_DEFAULT_FP_FUSION": "1"}


def test_long_commands_exist() -> None:
    group: Any = get_command(app)
    assert all(any(name.startswith(prefix) for name in group.commands) for prefix in start._LONG)
