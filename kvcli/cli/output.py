"""What the user sees: data on standard output, messages on standard error, one line per error."""

from __future__ import annotations

import errno
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import StringIO
from typing import Any

from rich.console import Console, RenderableType
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from kvcli.cli.tables import DataTable
from kvcli.errors import KvcliError, OutputError, Terminated, UsageError
from kvcli.progress import Advance
from kvcli.ranks import ALONE, Ranks
from kvcli.storage.records import to_json

_PLAIN_SECONDS = 10.0


class Output:
    """The sink of one command: human-readable, or one JSON object with --json.

    Args:
        as_json: print the result as one JSON object and nothing else on standard output.
        quiet: print results, warnings and errors only.
        verbose: also print details.

    Attributes:
        ranks: which of the processes that share a run this is; all but the first print their errors only.
        record: the result, once there is one.
    """

    def __init__(self, as_json: bool = False, quiet: bool = False, verbose: bool = False) -> None:
        self.as_json, self.quiet, self.verbose = as_json, quiet, verbose
        self.ranks = ALONE
        self.console = Console(stderr=True, highlight=False)
        self.record: Mapping[str, Any] | None = None

    def set_ranks(self, ranks: Ranks) -> None:
        """Says which process this is."""
        self.ranks = ranks
        if ranks.rank:
            self.quiet, self.verbose = True, False

    def say(self, line: str) -> None:
        """Prints a message, unless --quiet was given."""
        if not self.quiet:
            self.warn(line)

    def warn(self, line: str) -> None:
        """Prints a warning."""
        if self.ranks.rank:
            return
        self.console.print(line, markup=False, soft_wrap=True)

    def error(self, line: str) -> None:
        """Prints what ended the command, past the console: an interrupt may have come while that was printing."""
        stream = sys.stderr
        if stream is not None:
            stream.write(f"{f'rank {self.ranks.rank}: ' if self.ranks.rank else ''}error: {line}\n")
            stream.flush()

    def detail(self, line: str) -> None:
        """Prints a message if --verbose was given."""
        if self.verbose:
            self.console.print(line, style="dim", markup=False, soft_wrap=True)

    def settings(self, values: Mapping[str, Any]) -> None:
        """The settings in effect, on one line."""
        if not self.quiet:
            shown = ", ".join(f"{name}={_one_line(value)}" for name, value in values.items() if value is not None)
            self.console.print(f"settings: {shown}", style="dim", markup=False, soft_wrap=True)

    def write(self, text: str) -> None:
        """A piece of streamed data.

        Raises:
            OutputError: standard output cannot be written.
        """
        if not self.as_json and not self.ranks.rank:
            write_stdout(text)

    def result(self, record: Mapping[str, Any], human: str | DataTable | RenderableType | None = None) -> None:
        """The command's result: the record with --json, else the human form.

        Raises:
            OutputError: standard output cannot be written.
        """
        self.record = record
        if self.ranks.rank:
            return
        if self.as_json:
            write_stdout(to_json(record) + "\n")
        elif isinstance(human, str):
            write_stdout(human + "\n")
        elif human is not None:
            self._print(human)

    def _print(self, human: DataTable | RenderableType) -> None:
        """Prints a table, no wider than the terminal; a pipe has no width of its own, and cells are never cut there."""
        screen = Console(highlight=False)
        natural = human.width if isinstance(human, DataTable) else 0
        width = screen.width if screen.is_terminal else max(200, natural)
        text = StringIO()
        console = Console(file=text, highlight=False, width=width, force_terminal=screen.is_terminal)
        console.print(human.fitted(width) if isinstance(human, DataTable) else human)
        write_stdout(text.getvalue())

    @contextmanager
    def progress(self, label: str, total: int, unit: str) -> Iterator[Advance]:
        """A bar with rate and time left on a terminal, a plain line every ten seconds elsewhere."""
        if self.quiet:
            yield lambda count: None
            return
        if not self.console.is_terminal:
            yield _plain_progress(self.say, label, total, unit)
            return
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            DownloadColumn() if unit == "B" else MofNCompleteColumn(),
            _Rate(unit),
            TimeElapsedColumn(),
            TextColumn("eta"),
            _TimeLeft(),
        )
        with Progress(*columns, console=self.console, expand=True) as bar:
            task = bar.add_task(label, total=total)
            yield lambda count: bar.advance(task, count)


class _Rate(ProgressColumn):
    """Units per second, averaged over the whole task."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        rate = task.completed / task.elapsed if task.elapsed else 0.0
        return Text(_rate(rate, self.unit))


class _TimeLeft(ProgressColumn):
    """Time left at the average rate; unlike rich's, it has an estimate after one step."""

    def render(self, task: Task) -> Text:
        done, total = task.completed, task.total or 0
        left = duration((total - done) * (task.elapsed or 0) / done) if done else "-:--"
        return Text(left, style="progress.remaining")


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
        say(f"{label}: {_done(state['done'], total, unit)}, {_rate(rate, unit)}, eta {duration(left)}")

    return advance


def _done(done: float, total: int, unit: str) -> str:
    return f"{decimal(int(done))} of {decimal(total)}" if unit == "B" else f"{done:.0f}/{total} {unit}"


def _rate(rate: float, unit: str) -> str:
    if unit == "B":
        return f"{decimal(int(rate))}/s"
    return f"{rate:,.0f} {unit}/s" if rate >= 10 else f"{rate:.2f} {unit}/s"


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


def write_stdout(text: str) -> None:
    """Writes to standard output.

    Raises:
        BrokenPipeError: the reader left.
        OutputError: standard output is closed or full.
    """
    try:
        if sys.stdout is None:
            raise OutputError("cannot write to standard output: it is closed")
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a closed file
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise OutputError(f"cannot write to standard output: {reason}") from error


def _one_line(value: Any) -> str:
    """A value as text, with line breaks and other control characters escaped."""
    text = str(value)
    return text if text.isprintable() else repr(text)


def describe_error(
    error: BaseException, resumes: bool = True, saves_memory: str = "", ranks: bool = False
) -> tuple[int, str]:
    """The exit code and the message of an error, one line.

    Args:
        error: any error.
        resumes: whether the command keeps what was finished when it is interrupted.
        saves_memory: what to do when memory does not suffice.
        ranks: whether several processes share the run.
    """
    text = " ".join(str(error).split())
    if isinstance(error, KvcliError):
        return error.exit_code, text
    if isinstance(error, KeyboardInterrupt):
        what = "terminated" if isinstance(error, Terminated) else "interrupted"
        advice = "run the same command again to resume" if resumes else "run the same command again to start over"
        shared = (
            ", as torchrun does with all ranks when one has ended" if isinstance(error, Terminated) and ranks else ""
        )
        return getattr(error, "exit_code", 130), f"{what}{shared}; {advice}"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        where = f" ({error.filename})" if error.filename else ""
        return 1, f"the disk is full{where}; what was finished is kept: free some space and run the same command again"
    if isinstance(error, PermissionError) or (isinstance(error, OSError) and error.errno == errno.EROFS):
        return (
            1,
            f"cannot write to {error.filename}: permission denied, or it is read-only; choose another place",
        )
    if isinstance(error, OSError):
        return 1, f"{error.strerror or text}: {error.filename}; choose another path" if error.filename else text
    if _out_of_memory(error):
        return 1, f"out of memory; {saves_memory or 'end other programs, or use a machine with more'}"
    if type(error).__name__ == "SafetensorError":
        if "No space left" in text:
            return 1, "the disk is full; what was finished is kept: free some space and run the same command again"
        return 1, text
    return 1, f"unexpected {type(error).__name__}: {text} (run again with --debug for the traceback, and report it)"


def _out_of_memory(error: BaseException) -> bool:
    """Whether memory of a GPU or of the machine did not suffice; torch has no class of its own for the latter."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))
    )
