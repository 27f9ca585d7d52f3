"""`python -m research`: the papers' tables again, and fits of one kind of text measured on others."""

from __future__ import annotations

import sys

import typer

from research import domains, reproduce

app = typer.Typer(name="research", no_args_is_help=True, pretty_exceptions_enable=False)
for module in (domains, reproduce):
    module.COMMAND.register(app)

if __name__ == "__main__":
    sys.exit(app())
