"""Callbacks for progress: lines, and counts of finished work. The library prints nothing; the command line does."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

Say = Callable[[str], None]
"""Takes one line for the user."""

Advance = Callable[[int], None]
"""Takes the units of work that were done since the last call."""

Progress = Callable[[str, int, str], AbstractContextManager[Advance]]
"""Begins a piece of work: label, total and unit (`B` for bytes); what it yields counts the units done."""


class Reporter(Protocol):
    """What a command shows, as `kvcli.cli.output.Output` does."""

    def say(self, line: str) -> None:
        """Shows a line, unless the user wants results only."""

    def warn(self, line: str) -> None:
        """Shows a line in any case."""

    def progress(self, label: str, total: int, unit: str) -> AbstractContextManager[Advance]:
        """A `Progress`."""


def say_nothing(line: str) -> None:
    """A `Say` for callers that show nothing."""


@contextmanager
def no_progress(label: str, total: int, unit: str) -> Iterator[Advance]:
    """A `Progress` for callers that show nothing."""
    yield lambda count: None
