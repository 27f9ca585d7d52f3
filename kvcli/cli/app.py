"""The `kvcli` program: its commands, each in a file of its own."""

from __future__ import annotations

import json
import sys

import typer

from kvcli._version import __version__
from kvcli.cli import bench, calibrate, demo, env, evaluate, export, fit, generate, methods

app = typer.Typer(
    name="kvcli",
    help="Compress the KV cache of language models to 1-4 bits: calibrate, fit, export, generate, measure.",
    epilog="Start with: kvcli demo",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
    rich_markup_mode="rich",
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"kvcli {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="print the version"),
) -> None:
    pass


for module in (demo, calibrate, fit, export, generate, evaluate, bench, methods, env):
    module.register(app)


def main() -> None:
    """Entry point of the console script; a misused flag is one line, like every other error."""
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except Exception as error:
        describe = getattr(error, "format_message", None)
        if describe is None:
            raise
        line = " ".join(describe().split())
        if not line:  # called without arguments: the help was printed
            sys.exit(2)
        if "--json" in sys.argv:
            sys.stdout.write(json.dumps({"error": line, "exit_code": 2}) + "\n")
        sys.stderr.write(f"error: {line} (see --help)\n")
        sys.exit(2)
