"""Ctrl-C, SIGTERM and SIGHUP as exceptions, which wait while a library is imported."""

import os
import signal
import sys
import threading
from types import FrameType

from kvcli.errors import Terminated

_NUMBERS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class _State:
    """What has arrived."""

    raised: int | None = None  # the signal that was raised as an exception
    waiting: int | None = None  # the signal that is sent again and again until an import has ended
    sent_again = False  # whether the next signal is one of these, and not another one
    reported = False  # whether the user was told


def catch_signals() -> None:
    """From now on a signal raises `KeyboardInterrupt` or `Terminated`; a second one ends the process at once."""
    for number in _NUMBERS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, _stop)
    sys.unraisablehook = _send_again


def release_signals() -> None:
    """From now on a signal ends the process, without a message."""
    for number in _NUMBERS:
        signal.signal(number, signal.SIG_DFL)


def stop_reason() -> KeyboardInterrupt | None:
    """The exception of the signal that arrived, for the first who asks, who reports it."""
    number = _State.raised if _State.raised is not None else _State.waiting
    if number is None or _State.reported:
        return None
    _State.reported = True
    return _exception(number)


def _exception(number: int) -> KeyboardInterrupt:
    return KeyboardInterrupt() if number == signal.SIGINT else Terminated()


def _stop(number: int, frame: FrameType | None) -> None:
    again, _State.sent_again = _State.sent_again, False
    if _State.raised is not None or (_State.waiting is not None and not again):
        os._exit(130 if number == signal.SIGINT else Terminated.exit_code)
    if _in_import(frame):
        _State.waiting = number
        _send_later(number)
        return
    _State.waiting, _State.raised = None, number
    raise _exception(number)


def _in_import(frame: FrameType | None) -> bool:
    """Whether a module is being executed: an exception makes PyTorch's C++ code abort then; others drop it."""
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def _send_later(number: int) -> None:
    def send() -> None:
        if not _State.reported:
            _State.sent_again = True
            os.kill(os.getpid(), number)

    timer = threading.Timer(0.05, send)
    timer.daemon = True
    timer.start()


def _send_again(dropped: "sys.UnraisableHookArgs") -> None:
    """Sends a signal again whose exception Python cannot raise, as in destructors and callbacks of C code."""
    number = _State.raised
    if number is None or not isinstance(dropped.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(dropped)
        return
    _State.raised, _State.waiting = None, number
    _send_later(number)
