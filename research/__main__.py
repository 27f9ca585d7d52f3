"""`python -m research`: suites that the package does not have, the papers' tables again, fits of one kind of text."""

from __future__ import annotations

import sys

import typer

from kvcli.cli import report, suites
from research import domains, reproduce
from research.suites import add


def make_app() -> typer.Typer:
    """The program; `eval`, `bench` and `report` know the suites of the registry."""
    app = typer.Typer(name="research", no_args_is_help=True, pretty_exceptions_enable=False)
    suites.register(app)
    for module in (report, domains, reproduce):
        module.COMMAND.register(app)
    return app


if __name__ == "__main__":
    add()
    sys.exit(make_app()())
