"""Progress of what takes long: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
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

from kvcli.progress import Advance

_PLAIN_SECONDS = 10.0


@contextmanager
def show_progress(console: Console, say: Callable[[str], None], label: str, total: int, unit: str) -> Iterator[Advance]:
    """Shows how far something is, until the block ends.

    Args:
        console: where the bar is drawn, if it is a terminal.
        say: prints a line, elsewhere.
        label: what is done.
        total: units in all.
        unit: such as `tokens`; `B` for bytes.

    Yields:
        A function to be called with the number of units that were done.
    """
    if not console.is_terminal:
        yield _plain_progress(say, label, total, unit)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        DownloadColumn() if unit == "B" else MofNCompleteColumn(),
        _Average(unit),
        TimeElapsedColumn(),
        TextColumn("eta"),
        _Average(None),
    )
    with Progress(*columns, console=console, expand=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda count: bar.advance(task, count)


class _Average(ProgressColumn):
    """Units per second, or without a unit the time left, averaged over the whole task: known after one step."""

    def __init__(self, unit: str | None) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        done, seconds = task.completed, task.elapsed or 0
        if self.unit is not None:
            return Text(_rate(done / seconds if seconds else 0.0, self.unit))
        left = duration(((task.total or 0) - done) * seconds / done) if done else "-:--"
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
        shown = f"{state['done']:.0f}/{total} {unit}"
        if unit == "B":
            shown = f"{decimal(int(state['done']))} of {decimal(total)}"
        say(f"{label}: {shown}, {_rate(rate, unit)}, eta {duration(left)}")

    return advance


def _rate(rate: float, unit: str) -> str:
    if unit == "B":
        return f"{decimal(int(rate))}/s"
    return f"{rate:,.0f} {unit}/s" if rate >= 10 else f"{rate:.2f} {unit}/s"


def duration(seconds: float) -> str:
    """Seconds as m:ss."""
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02d}"
