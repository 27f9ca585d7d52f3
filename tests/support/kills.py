"""Kills a call at a chosen moment, in a process of its own."""

import os
import signal
import sqlite3
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MOMENTS = 20
FILE_EVENTS = ("open", "os.rename", "os.remove", "os.link", "os.mkdir", "os.rmdir", "os.chmod")


def run_and_kill(work: Callable[[], Any], folder: Path, moment: int) -> int:
    """Runs a call in a forked process that is killed before the operation number `moment`: a file operation in a
    folder or a statement of SQL, sometimes with a file half written. Returns how many were done.
    """
    counter = folder.parent / "counter"
    counter.write_bytes(b"")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on: a fork of a process with threads
        child = os.fork()
    if not child:
        count = 0
        log = os.open(counter, os.O_WRONLY | os.O_APPEND)

        def count_and_kill(event: str, arguments: tuple[Any, ...]) -> None:
            if event in FILE_EVENTS and str(arguments[0]).startswith(str(folder)):
                next_one()

        def next_one(*_: Any) -> None:
            nonlocal count
            count += 1
            if count == moment:
                for half in folder.rglob("*.tmp") if moment % 2 else ():
                    os.truncate(half, half.stat().st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            os.write(log, b".")

        def connect(*arguments: Any, **options: Any) -> sqlite3.Connection:
            db = connected(*arguments, **options)
            db.set_trace_callback(next_one)
            return db

        connected, sqlite3.connect = sqlite3.connect, connect
        sys.addaudithook(count_and_kill)
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL)
    return counter.stat().st_size


def killed(
    work: Callable[[Path], Any], folder: Path, prepare: Callable[[Path], Any] = lambda path: None
) -> Iterator[Path]:
    """Folders in which a call was killed, at moments that are spread over all of its file operations; `prepare` makes
    each of them, and in `counted` the call is completed.
    """
    prepare(folder / "counted")
    count = run_and_kill(lambda: work(folder / "counted"), folder / "counted", -1)
    assert count > MOMENTS
    for moment in sorted({1 + i * (count - 1) // (MOMENTS - 1) for i in range(MOMENTS)}):
        path = folder / f"killed-{moment}"
        prepare(path)
        run_and_kill(lambda path=path: work(path), path, moment)
        yield path
