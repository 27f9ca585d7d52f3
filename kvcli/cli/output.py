"""What the user sees: data on standard output, messages on standard error, one line per error."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from io import StringIO
from typing import Any

from rich.console import Console, RenderableType

from kvcli.cli.bars import show_progress
from kvcli.errors import OutputError
from kvcli.progress import Advance
from kvcli.ranks import ALONE, Ranks
from kvcli.storage.atomic import to_json
from kvcli.tables import DataTable


class Output:
    """The sink of one command: human-readable, or one JSON object with --json.

    Args:
        as_json: print the result as one JSON object and nothing else on standard output.
        quiet: print results, warnings and errors only.
        verbose: also print details.

    Attributes:
        ranks: which of the processes that share a run this is; all but the first print their errors only.
        record: the result, once there is one.
        following: words of the next command line, if the result has one.
    """

    def __init__(self, as_json: bool = False, quiet: bool = False, verbose: bool = False) -> None:
        self.as_json, self.quiet, self.verbose = as_json, quiet, verbose
        self.ranks = ALONE
        self.console = Console(stderr=True, highlight=False)
        self.record: Mapping[str, Any] | None = None
        self.following: Sequence[Any] = ()

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
        """Writes to stderr directly: rich's console may hold its lock when Ctrl-C arrives."""
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
            texts = {name: str(value) for name, value in values.items() if value is not None}
            shown = ", ".join(f"{name}={x if x.isprintable() else repr(x)}" for name, x in texts.items())
            self.console.print(f"settings: {shown}", style="dim", markup=False, soft_wrap=True)

    def write(self, text: str) -> None:
        """A piece of streamed data.

        Raises:
            OutputError: standard output cannot be written.
        """
        if not self.as_json and not self.ranks.rank:
            write_stdout(text)

    def result(
        self,
        record: Mapping[str, Any],
        human: str | DataTable | RenderableType | None = None,
        following: Sequence[Any] = (),
    ) -> None:
        """The command's result.

        Args:
            record: what is printed with --json.
            human: what is printed without it.
            following: words of the command line to type next, which is said when the command has ended.

        Raises:
            OutputError: standard output cannot be written.
        """
        self.record, self.following = record, following
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

    def progress(self, label: str, total: int, unit: str) -> AbstractContextManager[Advance]:
        """A bar with rate and time left on a terminal, a plain line every ten seconds elsewhere."""
        if self.quiet:
            return nullcontext(lambda count: None)
        return show_progress(self.console, self.say, label, total, unit)


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
