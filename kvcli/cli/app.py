"""The `kvcli` program: its commands, each in a file of its own."""

from __future__ import annotations

import typer

from kvcli._version import __version__
from kvcli.cli import calibrate, demo, env, evaluate, export, fit_subspace, generate, methods, train_codebook

app = typer.Typer(
    name="kvcli",
    help="Compress the KV cache of language models to 1-4 bits: calibrate, train, export, generate, measure.",
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


for module in (demo, calibrate, train_codebook, fit_subspace, export, generate, evaluate, methods, env):
    module.register(app)


def main() -> None:
    """Entry point of the console script."""
    app()
