"""`python -m research`: suites that the package does not have, the papers' tables again, fits of one kind of text, and
other packages."""

from __future__ import annotations

import sys

import typer

from kvcli.cli import report, suites
from kvcli.cli.groups import group
from research import domains, reproduce
from research.rivals import driver as rivals
from research.suites import add


def make_app() -> typer.Typer:
    """The program; `eval`, `bench` and `report` know the suites of the registry."""
    others = {module.COMMAND.name: module.COMMAND.typer() for module in (report, domains, reproduce, rivals)}
    commands = {"eval": suites.EVAL, "bench": suites.BENCH, **others}
    return group("research", commands, lambda command: command, no_args_is_help=True)


if __name__ == "__main__":
    add()
    sys.exit(make_app()())
