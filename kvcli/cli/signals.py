"""Ctrl-C, SIGTERM and SIGHUP as exceptions, which wait while a library is imported."""

from __future__ import annotations

import os
import signal
import sys
import threading
from importlib.machinery import ExtensionFileLoader, ModuleSpec, PathFinder, SourceFileLoader
from types import FrameType, ModuleType
from typing import Any

from kvcli.errors import Terminated

_NUMBERS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class _State:
    """What has arrived."""

    raised: int | None = None  # the signal that was raised as an exception
    waiting: int | None = None  # a signal that is raised when the import has ended
    imports = 0  # modules that are being executed, one in the other
    reported = False  # whether the user was told


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
    """The exception of the signal that arrived, for the first who asks, who reports it."""
    if _State.raised is None or _State.reported:
        return None
    _State.reported = True
    return _exception(_State.raised)


def _exception(number: int) -> KeyboardInterrupt:
    return KeyboardInterrupt() if number == signal.SIGINT else Terminated()


def _stop(number: int, frame: FrameType | None) -> None:
    if _State.raised is not None or _State.waiting is not None:
        os._exit(130 if number == signal.SIGINT else Terminated.exit_code)
    if _State.imports:
        _State.waiting = number
        return
    _State.raised = number
    raise _exception(number)


def _send_again(dropped: sys.UnraisableHookArgs) -> None:
    """Sends a signal again whose exception Python cannot raise, as in destructors and callbacks of C code."""
    number = _State.raised
    if number is None or not isinstance(dropped.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(dropped)
        return
    _State.raised = None
    timer = threading.Timer(0.05, os.kill, (os.getpid(), number))
    timer.daemon = True
    timer.start()


class _Imports:
    """Lets signals wait while a library is imported: an exception makes PyTorch's C++ code abort; others drop it."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Finds modules as Python does, except that signals wait while they are executed."""
        spec = None if name.startswith("kvcli") else PathFinder.find_spec(name, path, target)
        if spec is None or not isinstance(spec.loader, (SourceFileLoader, ExtensionFileLoader)):
            return spec
        execute = spec.loader.exec_module

        def execute_first(module: ModuleType) -> None:
            _State.imports += 1
            try:
                execute(module)
            finally:
                _State.imports -= 1
                if _State.waiting is not None and not _State.imports:
                    number, _State.waiting = _State.waiting, None
                    signal.raise_signal(number)  # in the main thread, whichever this is

        spec.loader.exec_module = execute_first  # type: ignore[method-assign]
        return spec
