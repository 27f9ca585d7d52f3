"""What the user sees: data on standard output, messages and progress on standard error, one line per error."""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO
from typing import Any

from rich import progress as bars
from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from kvcli.commands.tables import DataTable
from kvcli.errors import OutputError
from kvcli.progress import Advance
from kvcli.storage.atomic import to_json
from kvcli.storage.ranks import ALONE, Ranks

_PLAIN_SECONDS = 10.0
"""Between two lines of progress, where there is no terminal."""

_BLANKS = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160), *range(8234, 8239), *range(8294, 8298)), " ")
"""Characters that a terminal obeys, but for tabs and ends of lines, are blanks: texts of models and of others."""


class Output:
    """The sink of one command: human-readable, or one JSON object with --json."""

    def __init__(self, as_json: bool = False, quiet: bool = False, verbose: bool = False) -> None:
        self.as_json, self.quiet, self.verbose = as_json, quiet, verbose
        self.ranks = ALONE  # of the processes that share a run; all but the first print their errors only
        self.console = Console(stderr=True, highlight=False)
        self.record: Mapping[str, Any] | None = None  # the result, once there is one
        self.following: Sequence[Any] = ()  # words of the next command line, if the result has one

    def set_ranks(self, ranks: Ranks) -> None:
        self.ranks = ranks
        if ranks.rank:
            self.quiet, self.verbose = True, False

    def say(self, line: str) -> None:
        if not self.quiet:
            self.warn(line)

    def warn(self, line: str) -> None:
        if not self.ranks.rank:
            self._line(line)

    def error(self, line: str) -> None:
        """Writes to stderr directly: rich's console may hold its lock when Ctrl-C arrives."""
        if sys.stderr is not None:
            rank = f"rank {self.ranks.rank}: " if self.ranks.rank else ""
            sys.stderr.write(f"{rank}error: {line.translate(_BLANKS)}\n")
            sys.stderr.flush()

    def detail(self, line: str) -> None:
        if self.verbose:
            self._line(line, "dim")

    def settings(self, values: Mapping[str, Any]) -> None:
        """The settings in effect, on one line."""
        if not self.quiet:
            texts = {name: str(value) for name, value in values.items() if value is not None}
            shown = ", ".join(f"{name}={x if x.isprintable() else repr(x)}" for name, x in texts.items())
            self._line(f"settings: {shown}", "dim")

    def _line(self, line: str, style: str = "") -> None:
        self.console.print(line.translate(_BLANKS), style=style, markup=False, soft_wrap=True)

    def write(self, text: str) -> None:
        """A piece of streamed data; OutputError: standard output cannot be written."""
        if not self.as_json and not self.ranks.rank:
            write_stdout(text.translate(_BLANKS))

    def result(
        self,
        record: Mapping[str, Any],
        human: str | DataTable | list[str | DataTable] | None = None,
        following: Sequence[Any] = (),
    ) -> None:
        """Prints the command's result: `record` with --json, else `human`, or each of a list.

        A table is no wider than the terminal; in a pipe, what is beyond 80 columns is in further tables. `following`
        are words of the next command line, said when the command has ended. OutputError: the result cannot be written.
        """
        self.record, self.following = record, following
        if self.ranks.rank:
            return
        if self.as_json:
            write_stdout(to_json(record) + "\n")
        else:
            for part in human if isinstance(human, list) else [human]:
                self._print(part)

    def _print(self, human: str | DataTable | None) -> None:
        if isinstance(human, str):
            write_stdout(human.translate(_BLANKS) + "\n")
        elif human is not None:
            shown = StringIO()
            console = Console(file=shown, highlight=False, force_terminal=sys.stdout.isatty() or None)
            rows = [[cell.translate(_BLANKS) for cell in row] for row in human.rows]
            human = replace(human, title=human.title.translate(_BLANKS), rows=rows)
            for part in [human] if console.is_terminal else human.parts(width := max(80, console.width)):
                if not console.is_terminal:
                    console.width = max(width, part.least(part.columns))
                console.print(part.fitted(console.width))
            write_stdout(shown.getvalue())

    @contextmanager
    def progress(self, label: str, total: int, unit: str) -> Iterator[Advance]:
        """A bar with rate and time left on a terminal, a plain line every ten seconds elsewhere.

        Work beyond the total is not shown: ranks count as if all of them had as much to do as the first.
        """
        if self.quiet:
            yield lambda count: None
        elif self.console.is_terminal:
            columns = (
                bars.SpinnerColumn(),
                bars.TextColumn("{task.description}"),
                bars.BarColumn(bar_width=None),
                bars.DownloadColumn() if unit == "B" else bars.MofNCompleteColumn(),
                _Average(unit),
                bars.TimeElapsedColumn(),
                bars.TextColumn("eta"),
                _Average(None),
            )
            with bars.Progress(*columns, console=self.console, expand=True) as bar:
                task = bar.add_task(label, total=total)
                yield lambda count: bar.update(task, completed=min(total, bar.tasks[0].completed + count))
                bar.update(task, visible=bool(bar.tasks[0].completed))
        else:
            started = said = time.monotonic()
            done = 0

            def advance(count: int) -> None:
                nonlocal done, said
                if done >= total:
                    return
                done, now = min(total, done + count), time.monotonic()
                if now - said < _PLAIN_SECONDS and done < total:
                    return
                said = now
                rate = done / max(now - started, 1e-9)
                eta = (total - done) / rate if rate else 0.0
                shown = f"{decimal(int(done))} of {decimal(total)}" if unit == "B" else f"{done:.0f}/{total} {unit}"
                self.say(f"{label}: {shown}, {_rate(rate, unit)}, eta {duration(eta)}")

            yield advance


class Stage(Output):
    """The sink of a command that another one runs: its messages, and neither settings nor result."""

    def settings(self, values: Mapping[str, Any]) -> None:
        pass

    def result(self, record: Any, human: Any = None, following: Any = ()) -> None:
        pass


class _Average(bars.ProgressColumn):
    """Units per second, or without a unit the time left, averaged over the whole task: known after one step."""

    def __init__(self, unit: str | None) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: bars.Task) -> Text:
        done, seconds = task.completed, task.elapsed or 0
        if self.unit is not None:
            return Text(_rate(done / seconds if seconds else 0.0, self.unit))
        eta = duration(((task.total or 0) - done) * seconds / done) if done else "-:--"
        return Text(eta, style="progress.remaining")


def _rate(rate: float, unit: str) -> str:
    if unit == "B":
        return f"{decimal(int(rate))}/s"
    return f"{rate:,.0f} {unit}/s" if rate >= 10 else f"{rate:.2f} {unit}/s"


def duration(seconds: float) -> str:
    """Seconds as m:ss."""
    return f"{round(seconds) // 60}:{round(seconds) % 60:02d}"


def write_stdout(text: str) -> None:
    """Writes to standard output; BrokenPipeError: the reader left; OutputError: it is closed or full."""
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
