"""`python -m research` inside a test: the registry has its suites in a block."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from kvcli.registry import BENCH_SUITES, EVAL_SUITES
from research.__main__ import make_app
from research.suites import BENCH, EVAL


@contextmanager
def research() -> Iterator[typer.Typer]:
    """The program, whose suites are registered inside the block."""
    with pytest.MonkeyPatch.context() as patch:
        for registry, suites in ((EVAL_SUITES, EVAL), (BENCH_SUITES, BENCH)):
            for name, path in suites.items():
                patch.setitem(registry, name, path)
        yield make_app()


def run_research(*arguments: str) -> Any:
    """What a command line of `python -m research` prints and how it ends."""
    with research() as app:
        return CliRunner().invoke(app, list(arguments))
