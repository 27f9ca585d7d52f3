"""`python -m research`: suites that the package does not have, the papers' tables again, fits of one kind of text, and
other packages."""

from __future__ import annotations

import sys

import typer

from kvcli.cli import suites
from kvcli.cli.groups import group
from kvcli.cli.inspect import REPORT
from research import domains, reproduce
from research.rivals import driver as rivals
from research.suites import add


def make_app() -> typer.Typer:
    """The program; `eval`, `bench` and `report` know the suites of the registry."""
    others = {x.name: x.typer() for x in (REPORT, domains.COMMAND, reproduce.COMMAND, rivals.COMMAND)}
    commands = {"eval": suites.EVAL, "bench": suites.BENCH, **others}
    return group("research", commands, lambda command: command, no_args_is_help=True)


if __name__ == "__main__":
    add()
    sys.exit(make_app()())
