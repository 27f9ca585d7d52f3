"""What the user sees: data on standard output, messages on standard error, one line per error."""

from __future__ import annotations

import errno
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from kvcli.errors import KvcliError, UsageError
from kvcli.files import to_json

_PLAIN_SECONDS = 10.0

Advance = Callable[[int], None]


class Output:
    """The sink of one command: human-readable, or one JSON object with --json.

    Args:
        as_json: print the result as one JSON object and nothing else on standard output.
    """

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json
        self.console = Console(stderr=True, highlight=False)
        self._data = Console(highlight=False)

    def say(self, line: str) -> None:
        """Prints a message."""
        self.console.print(line, markup=False, soft_wrap=True)

    def settings(self, values: Mapping[str, Any]) -> None:
        """The settings in effect, on one line."""
        shown = ", ".join(f"{name}={value}" for name, value in values.items() if value is not None)
        self.console.print(f"settings: {shown}", style="dim", markup=False, soft_wrap=True)

    def write(self, text: str) -> None:
        """A piece of streamed data."""
        if not self.as_json:
            sys.stdout.write(text)
            sys.stdout.flush()

    def result(self, record: Mapping[str, Any], human: str | Table | None = None) -> None:
        """The command's result: the record with --json, else the human form."""
        if self.as_json:
            sys.stdout.write(to_json(record) + "\n")
        elif isinstance(human, Table):
            # a pipe has no width of its own: cells must not be cut there
            console = self._data if self._data.is_terminal else Console(highlight=False, width=200)
            console.print(human)
        elif human is not None:
            sys.stdout.write(human + "\n")
        sys.stdout.flush()

    @contextmanager
    def progress(self, label: str, total: int, unit: str) -> Iterator[Advance]:
        """A bar with rate and time left on a terminal, a plain line every ten seconds elsewhere."""
        if not self.console.is_terminal:
            yield _plain_progress(self.say, label, total, unit)
            return
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            _Rate(unit),
            TimeElapsedColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console) as bar:
            task = bar.add_task(label, total=total)
            yield lambda count: bar.advance(task, count)


class _Rate(ProgressColumn):
    """Units per second, averaged over the whole task."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        rate = task.completed / task.elapsed if task.elapsed else 0.0
        return Text(f"{_rate(rate)} {self.unit}/s")


def _plain_progress(say: Callable[[str], None], label: str, total: int, unit: str) -> Advance:
    started = time.monotonic()
    state = {"done": 0, "said": started}

    def advance(count: int) -> None:
        state["done"] += count
        now = time.monotonic()
        if now - state["said"] < _PLAIN_SECONDS and state["done"] < total:
            return
        state["said"] = now
        rate = state["done"] / max(now - started, 1e-9)
        left = (total - state["done"]) / rate if rate else 0.0
        say(f"{label}: {state['done']:.0f}/{total} {unit}, {_rate(rate)} {unit}/s, eta {duration(left)}")

    return advance


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2f}"


def duration(seconds: float) -> str:
    """Seconds as m:ss."""
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02d}"


def size(count: float) -> str:
    """Bytes with a binary unit and two decimals, which `pydantic.ByteSize` does not give."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def parse_size(text: str | None) -> int | None:
    """Bytes from a number with a unit, such as 24GiB, 500 MB or 1000.

    `pydantic.ByteSize` ignores what follows a valid beginning: it reads 1,5GiB as one byte.

    Raises:
        UsageError: anything else.
    """
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT]?)(i?)B)?\s*", text, re.IGNORECASE)
    if match is None or not float(match[1]):
        raise UsageError(f"'{text}' is not a size; write it like 24GiB")
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index((prefix or " ").upper()))


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> Table:
    """A table whose first columns are text, aligned to the left, and whose others are aligned to the right."""
    shown = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        shown.add_column(column, justify="left" if index < text_columns else "right")
    for row in rows:
        shown.add_row(*row)
    return shown


def describe_error(error: BaseException) -> tuple[int, str]:
    """The exit code and the message of an error, one line."""
    text = " ".join(str(error).split())
    if isinstance(error, KvcliError):
        return error.exit_code, text
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted; run the same command again to resume"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        where = f" ({error.filename})" if error.filename else ""
        return 1, f"the disk is full{where}; what was finished is kept: free some space and run the same command again"
    if isinstance(error, PermissionError) or (isinstance(error, OSError) and error.errno == errno.EROFS):
        return 1, f"cannot write to {error.filename}: permission denied; choose another --out"
    if isinstance(error, OSError):
        return 1, f"{error.strerror or text}: {error.filename}; choose another path" if error.filename else text
    if type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError):
        return 1, "out of memory; lower --batch-size or --seq-len, or choose --device cpu"
    if type(error).__name__ == "SafetensorError":
        if "No space left" in text:
            return 1, "the disk is full; what was finished is kept: free some space and run the same command again"
        return 1, text
    return 1, f"unexpected {type(error).__name__}: {text} (run again with --debug for the traceback, and report it)"
