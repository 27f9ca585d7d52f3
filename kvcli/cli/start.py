"""Where the program starts: signals and standard streams are put in order before anything heavy is imported."""

import os
import sys
from pathlib import Path

from kvcli.cli.signals import catch_signals, release_signals, stop_reason
from kvcli.errors import OutputError, Terminated

_LONG = ("calibrate", "demo", "fit", "train")
"""How commands begin that compute for minutes, in operations with much to do on one thread between them."""

_LOAD = Path("/proc/loadavg")


def main() -> None:
    """Entry point of the console script."""
    try:
        catch_signals()
        _open_streams()
        _prepare_libraries(sys.argv[1:])
        from kvcli.cli.app import run_command_line

        code = run_command_line()
        sys.stdout.flush()
        if stopped := stop_reason():  # typer turned it into an exit code
            raise stopped
    except BaseException as error:
        code = _last_resort(error)
    release_signals()
    sys.exit(code)


def _open_streams() -> None:
    """Replaces closed streams; input refuses what is no text, output takes all; OutputError: output is closed."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: PTH123, SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115
    if sys.stdout is None:
        raise OutputError("cannot write to standard output: it is closed")
    for stream, errors in ((sys.stdin, "strict"), (sys.stdout, "replace"), (sys.stderr, "replace")):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=errors)


def _prepare_libraries(arguments: list[str]) -> None:
    """Sets PyTorch and Triton up before they are imported: threads that sleep while they wait, or soon, large pages.

    Threads that spin take the processor from other programs, and from those that they wait for where two cores are
    threads of one; where nothing else runs, those that sleep at once decode at two thirds of the speed. Long commands
    wake them too often to let them sleep at once; the system zeroes each page of their large tensors anew.
    """
    # whether no other thread of the machine runs just now, which Linux tells
    alone = arguments[:1] != ["serve"] and _LOAD.is_file() and _LOAD.read_text().split()[3].startswith("1/")
    waiting = {"GOMP_SPINCOUNT": "10000"} if alone else {"OMP_WAIT_POLICY": "PASSIVE"}
    if arguments and arguments[0].startswith(_LONG):
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # pages of 2 MiB on Linux
        waiting = {"GOMP_SPINCOUNT": "1000"}  # some tens of microseconds
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ.update(waiting)
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as up to Triton 3.9, which warns of another default


def _last_resort(error: BaseException) -> int:
    """Says an error in one line that no command has reported; returns the exit code."""
    error = stop_reason() or error
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, KeyboardInterrupt):
        sys.stderr.write(f"error: {'terminated' if isinstance(error, Terminated) else 'interrupted'}\n")
        return getattr(error, "exit_code", 130)
    if isinstance(error, OutputError):
        sys.stderr.write(f"error: {error}\n")
    elif isinstance(error, OSError):  # commands report their own errors: this one is of standard output
        if not isinstance(error, BrokenPipeError):
            sys.stderr.write(f"error: cannot write to standard output: {error.strerror}\n")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # leaves nothing to be flushed into it
    else:
        sys.excepthook(type(error), error, error.__traceback__)
    return 1
