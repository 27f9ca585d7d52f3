"""`kvcli methods`."""

from __future__ import annotations

import typer

from kvcli.cli.options import Options, command
from kvcli.cli.output import Output, table


class MethodsOptions(Options):
    """Options of `kvcli methods`."""


def run(options: MethodsOptions, output: Output) -> None:
    """List the compression methods."""
    from kvcli.registry import METHODS, get_method

    records = []
    for name in METHODS:
        method = get_method(name)
        records.append(
            {
                "name": name,
                "bits": method.bits,
                "paper": method.paper,
                "calibration": "needs an artifact" if method.fit else "none",
                "summary": method.summary,
            }
        )
    columns = ("name", "bits", "paper", "calibration", "summary")
    shown = table("methods", columns, [[record[column] for column in columns] for record in records])
    output.result({"methods": records}, shown)


def register(app: typer.Typer) -> None:
    """Adds the command."""
    command(app, "methods", MethodsOptions, "kvcli methods --json")(run)
