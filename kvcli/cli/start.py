"""Where the program starts: signals and standard streams are put in order before anything heavy is imported."""

from __future__ import annotations

import logging
import os
import signal
import sys
from types import FrameType, TracebackType
from typing import Any

from kvcli.errors import OutputError, Terminated

_LONG = ("calibrate", "demo", "fit", "train")
"""How commands begin that compute for minutes, in operations with much to do on one thread between them."""

_SPINS = "1000"
"""Turns for which a thread of theirs spins: some tens of microseconds."""

_LARGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""PyTorch's switch for tensors in pages of 2 MiB on Linux."""

_stopped_by: int | None = None
_reported = False


def main() -> None:
    """Entry point of the console script."""
    try:
        _catch_signals()
        _open_streams()
        _quiet_imports()
        _prepare_long(sys.argv[1:])
        from kvcli.cli.app import main as run

        code = run()
        sys.stdout.flush()
        if _stopped_by is not None and not _reported:  # typer turned it into an exit code
            raise _exception()
    except BaseException as error:
        code = _last_resort(error)
    stop_reason()  # no reminder of a signal comes after this
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # what was asked for is done
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    sys.exit(code)


def stop_reason() -> KeyboardInterrupt | None:
    """What a signal that arrived asks for, for the one who reports it: it is not raised again after this call."""
    global _reported  # noqa: PLW0603
    if _stopped_by is None:
        return None
    _reported = True
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, 0)
    return _exception()


def _exception() -> KeyboardInterrupt:
    return KeyboardInterrupt() if _stopped_by == signal.SIGINT else Terminated()


def _catch_signals() -> None:
    """Ctrl-C, SIGTERM and SIGHUP raise an exception, the second of them ends the process at once."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, _stop)
    if hasattr(signal, "SIGALRM"):
        signal.signal(signal.SIGALRM, _stop_again)
        sys.unraisablehook = _unraisable


def _stop(number: int, frame: FrameType | None) -> None:
    global _stopped_by  # noqa: PLW0603
    if _stopped_by is not None:
        os._exit(130 if number == signal.SIGINT else Terminated.exit_code)
    _stopped_by = number
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
        if _imports_torch():
            return  # the timer raises it
    raise _exception()


def _imports_torch() -> bool:
    """Whether PyTorch is being imported: its C++ code aborts the process at an exception."""
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


def _stop_again(number: int, frame: FrameType | None) -> None:
    """Raises a stop again that a library caught and dropped, as modules do while they are imported."""
    if _imports_torch():
        return
    handled = sys.exc_info()[1]
    while handled is not None:  # somebody's except or finally is at work on it
        if isinstance(handled, KeyboardInterrupt):
            return
        handled = handled.__context__
    raise _exception()


def _unraisable(hook: Any) -> None:
    """Drops a stop that fell into a callback, in silence: the timer raises it again."""
    if not isinstance(hook.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(hook)


def _open_streams() -> None:
    """Replaces standard streams that are closed, and makes standard output take every character.

    Raises:
        OutputError: standard output is closed.
    """
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: PTH123, SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115
    if sys.stdout is None:
        raise OutputError("cannot write to standard output: it is closed")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _quiet_imports() -> None:
    """Silences what torchao, which transformers imports where it is installed, logs about its kernels for GPUs."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _prepare_long(arguments: list[str]) -> None:
    """Sets PyTorch up for commands that compute for minutes: large pages, and threads that sleep soon.

    The system zeroes each page of a large tensor anew, and by default pages have 4 KiB. By default, too, threads that
    wait for the next operation spin for milliseconds. Where two cores are threads of one, that slows what they wait
    for. Decoding has more to lose from waking them than to gain.
    """
    if not arguments or not arguments[0].startswith(_LONG):
        return
    os.environ.setdefault(_LARGE_PAGES, "1")
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)


def _last_resort(error: BaseException) -> int:
    """Says an error in one line that no command has reported; returns the exit code."""
    error = stop_reason() or error
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, BrokenPipeError):
        _drop_output()
        return 1
    if isinstance(error, KeyboardInterrupt):
        _say("terminated" if isinstance(error, Terminated) else "interrupted")
        return getattr(error, "exit_code", 130)
    if isinstance(error, OutputError):
        _say(str(error))
    elif isinstance(error, OSError):  # commands report their own errors: this one is of standard output
        _say(f"cannot write to standard output: {error.strerror}")
        _drop_output()
    else:
        traceback: TracebackType | None = error.__traceback__
        sys.excepthook(type(error), error, traceback)
    return 1


def _say(line: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(f"error: {line}\n")


def _drop_output() -> None:
    """Leaves nothing to be flushed into a standard output that takes nothing."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
