"""Ctrl-C, SIGTERM and SIGHUP as exceptions, which wait while a library is imported."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader, ModuleSpec, PathFinder, SourceFileLoader
from types import FrameType, ModuleType
from typing import Any

from kvcli.errors import Terminated

_NUMBERS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class _State:
    """What has arrived.

    Attributes:
        stopped_by: the signal that was raised as an exception.
        waiting: a signal that is raised when the import has ended.
        imports: modules that are being executed, one in the other.
        reported: whether the user was told.
    """

    stopped_by: int | None = None
    waiting: int | None = None
    imports = 0
    reported = False


def catch_signals() -> None:
    """From now on a signal raises `KeyboardInterrupt` or `Terminated`; a second one ends the process at once."""
    for number in _NUMBERS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, _stop)
    sys.meta_path.insert(0, _Imports())
    sys.unraisablehook = _send_again


def release_signals() -> None:
    """From now on a signal ends the process, without a message."""
    for number in _NUMBERS:
        signal.signal(number, signal.SIG_DFL)


def stop_reason() -> KeyboardInterrupt | None:
    """The exception of the signal that arrived, for the one who reports it."""
    _State.reported = _State.stopped_by is not None
    return _exception()


def unreported_stop() -> KeyboardInterrupt | None:
    """The exception of a signal that arrived and was not reported."""
    return None if _State.reported else _exception()


def _exception() -> KeyboardInterrupt | None:
    if _State.stopped_by is None:
        return None
    return KeyboardInterrupt() if _State.stopped_by == signal.SIGINT else Terminated()


def _stop(number: int, frame: FrameType | None) -> None:
    if _State.stopped_by is not None or _State.waiting is not None:
        os._exit(130 if number == signal.SIGINT else Terminated.exit_code)
    if _State.imports:
        _State.waiting = number
        return
    _State.stopped_by = number
    raise _exception() or KeyboardInterrupt


def _send_again(dropped: sys.UnraisableHookArgs) -> None:
    """Sends a signal again whose exception Python cannot raise, as in destructors and callbacks of C code."""
    number = _State.stopped_by
    if number is None or not isinstance(dropped.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(dropped)
        return
    _State.stopped_by = None
    timer = threading.Timer(0.05, os.kill, (os.getpid(), number))
    timer.daemon = True
    timer.start()


class _Imports:
    """Lets signals wait while a library is imported: an exception makes PyTorch's C++ code abort; others drop it."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Finds modules as Python does, except that signals wait while they are executed."""
        spec = None if name.startswith("kvcli") else PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, (SourceFileLoader, ExtensionFileLoader)):
            spec.loader.exec_module = _uninterrupted(spec.loader.exec_module)  # type: ignore[assignment,method-assign]
        return spec


def _uninterrupted(execute: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def execute_first(module: ModuleType) -> None:
        _State.imports += 1
        try:
            execute(module)
        finally:
            _State.imports -= 1
            if _State.waiting is not None and not _State.imports:
                number, _State.waiting = _State.waiting, None
                signal.raise_signal(number)  # in the main thread, whichever this is

    return execute_first
