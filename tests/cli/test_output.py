"""Output discipline: one line an error, JSON, progress, units."""

from __future__ import annotations

import json

import pytest
from console import invoke

from kvcli.cli.command import describe_error
from kvcli.cli.output import Output, duration
from kvcli.errors import KvcliError, UsageError
from kvcli.sizes import size


def test_errors_are_json_too() -> None:
    result = invoke("export", "--json")
    assert json.loads(result.stdout)["exit_code"] == result.exit_code == 1


def test_debug_shows_the_traceback() -> None:
    result = invoke("export", "--debug")
    assert isinstance(result.exception, KvcliError)


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
    assert actual == code
    assert said in line
    assert "\n" not in line


def test_progress_talks_plainly_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Output().progress("work", 4, "steps") as advance:
        for _ in range(4):
            advance(1)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "work: 4/4 steps" in captured.err


def test_progress_in_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    with Output().progress("download", 4_000_000, "B") as advance:
        advance(4_000_000)
    shown = capsys.readouterr().err
    assert shown.startswith("download: 4.0 MB of 4.0 MB, ")
    assert "B/s, eta 0:00" in shown


def test_units() -> None:
    assert [size(x) for x in (0, 1023, 1536, 3 * 2**20, 5 * 2**30)] == [
        "0 B",
        "1023 B",
        "1.50 KiB",
        "3.00 MiB",
        "5.00 GiB",
    ]
    assert duration(61.4) == "1:01"
