"""The `kvcli` program: its commands, each in a file of its own."""

import json
import sys
from pkgutil import resolve_name

import typer

from kvcli._version import __version__
from kvcli.cli.groups import group
from kvcli.cli.output import write_stdout
from kvcli.registry import FIT_NAMES

COMMANDS = {
    **{"demo": "demo:COMMAND", "recommend": "plan:RECOMMEND", "plan": "plan:PLAN"},
    **{"calibrate": "calibrate:CALIBRATE", "merge": "calibrate:MERGE", "fit": "fit:FIT"},
    **{name: f"fit:OTHER_NAMES.{name.replace('-', '_')}" for name in FIT_NAMES},
    **{"export": "fit:EXPORT", "ask": "ask:COMMAND", "generate": "generate:COMMAND", "compress": "compress:COMMAND"},
    **{"contexts": "contexts:COMMANDS", "library": "library:COMMANDS", "chat": "chat:COMMAND"},
    **{"serve": "serve:COMMAND", "eval": "suites:EVAL", "bench": "suites:BENCH", "tune": "tune:COMMAND"},
    **{"methods": "methods:COMMAND", "report": "inspect:REPORT", "inspect": "inspect:INSPECT", "diff": "inspect:DIFF"},
    **{"push": "share:PUSH", "pull": "share:PULL", "warmup": "warmup:COMMAND"},
    **{"doctor": "doctor:DOCTOR", "env": "doctor:ENV"},
}
"""Command name to `module:attribute` in this package, in the order of the help."""


def _imported(path: str) -> typer.Typer:
    found = resolve_name(f"kvcli.cli.{path}")
    return found if isinstance(found, typer.Typer) else found.typer()


app = group(
    "kvcli",
    COMMANDS,
    _imported,
    help="Compress the KV cache of language models to 1-4 bits: calibrate, fit, export, generate, measure.",
    epilog="Start with: kvcli demo",
    no_args_is_help=True,
    add_completion=True,
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
