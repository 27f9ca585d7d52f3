"""The `kvcli` program: its commands, each in a file of its own."""

from __future__ import annotations

import json
import sys
from typing import Any

import typer

from kvcli._version import __version__
from kvcli.cli import (
    ask,
    calibrate,
    chat,
    compress,
    contexts,
    demo,
    doctor,
    fit,
    generate,
    inspect,
    methods,
    plan,
    recommend,
    report,
    serve,
    share,
    suites,
    tune,
    warmup,
)
from kvcli.cli.output import write_stdout

app = typer.Typer(
    name="kvcli",
    help="Compress the KV cache of language models to 1-4 bits: calibrate, fit, export, generate, measure.",
    epilog="Start with: kvcli demo",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        write_stdout(f"kvcli {__version__}\n")
        raise typer.Exit


@app.callback()
def _main(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="print the version"),
) -> None:
    pass


COMMANDS: tuple[Any, ...] = (
    *(demo.COMMAND, recommend.COMMAND, plan.COMMAND, calibrate.CALIBRATE, calibrate.MERGE, *fit.COMMANDS, fit.EXPORT),
    *(ask.COMMAND, generate.COMMAND, compress.COMMAND, contexts, chat.COMMAND, serve.COMMAND, suites, tune.COMMAND),
    *(methods.COMMAND, report.COMMAND, inspect.INSPECT, inspect.DIFF, share.PUSH, share.PULL),
    *(warmup.COMMAND, doctor.DOCTOR, doctor.ENV),
)
"""In the order of the help."""

for command in COMMANDS:
    command.register(app)


def run_command_line() -> int:
    """The exit code of a command line; a misused flag is one line, like every other error.

    OSError: standard output cannot be written; KeyboardInterrupt: stopped outside of a command.
    """
    try:
        return int(app(standalone_mode=False) or 0)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except Exception as error:
        describe = getattr(error, "format_message", None)  # click's errors, of which typer has its own copy
        if describe is None:
            raise
        line = " ".join(describe().split())
        if not line:  # called without arguments: the help was printed
            return 2
        if getattr(error, "option_name", None) == "--bits":
            line = "there is no option --bits: the bits are part of the method's name, --method NAME-2"
        if "--json" in sys.argv:
            write_stdout(json.dumps({"error": line, "exit_code": 2}) + "\n")
        sys.stderr.write(f"error: {line} (see --help)\n")
        return 2
