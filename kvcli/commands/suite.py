"""What a suite of `kvcli eval` or `kvcli bench` is: its options, its records and its table, in one object.

Modules that define suites import torch in functions only: the command line reads all of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from kvcli.commands.options import ModelOptions
from kvcli.commands.tables import DataTable
from kvcli.errors import KvcliError
from kvcli.progress import Reporter

Records = Sequence[Mapping[str, Any]]
"""Records as plain JSON values."""


@dataclass(frozen=True)
class Summary:
    """What a suite says after its records: `fields` of the JSON object, `notes` after the table, a `failure`."""

    fields: dict[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    failure: KvcliError | None = None


class SuiteOptions(ModelOptions):
    """Options of every suite."""

    def check(self) -> None:
        """Raises UsageError or ConfigError for options that exclude each other, before torch is imported."""


class Run(ABC):
    """One run of a suite; making it checks what can be checked before torch is imported."""

    out: Path | None
    """File to which every record is appended as it is measured."""

    def __init__(self, suite: Any, options: Any) -> None:
        self.suite, self.options = suite, options
        options.check()

    @abstractmethod
    def records(self, reporter: Reporter) -> Iterator[dict[str, Any]]:
        """Measures; yields each record as plain JSON values."""

    @abstractmethod
    def summary(self, records: Records) -> Summary:
        """What is said after the records, also of a run that broke off."""


class Bars(NamedTuple):
    """A chart of a figure, of percentiles the median, over `scale` in a unit."""

    figure: str
    title: str
    unit: str
    scale: float = 1


@dataclass(frozen=True)
class SideBySide:
    """How a report puts rows of a method side by side: by a field, with columns of `each` and those of the last."""

    field: str
    each: tuple[str, ...]
    of_last: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A suite with the class of its runs."""

    run: ClassVar[type[Run]]

    name: str
    help: str
    options: type[SuiteOptions]  # of which `model` is the argument
    example: str  # a runnable command line
    tabulate: Callable[[Records, Any], DataTable]  # makes the table of records and options
    saves_memory: str = ""  # what to do when memory does not suffice
    side_by_side: SideBySide | None = None
    chart: str = "figures"  # what a report draws, of `kvcli.report.page.CHARTS`
    bars: Sequence[Bars] = ()

    def open(self, options: Any) -> Run:
        """A run; KvcliError: a method, setting, model's name, artifact or baseline that cannot be used."""
        return self.run(self, options)
