"""Locks on folders and files against other processes of kvcli; they end with their process, also if it is killed."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: nothing is locked there
    fcntl = None  # type: ignore[assignment]

_POLL_SECONDS = 0.02


@contextmanager
def lock(
    path: Path,
    busy: Exception,
    *,
    make_file: bool = False,
    wait_s: float = 0.0,
    on_wait: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Locks a folder or file inside the block, which may rename or remove it; some file systems have no locks.

    `busy` is raised if other processes or threads have the lock for `wait_s` seconds, before which `on_wait` is called;
    with `make_file`, an empty file is made if there is none.
    """
    if fcntl is None:
        yield
        return
    until, waits = time.monotonic() + wait_s, False
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT if make_file else os.O_RDONLY, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            if time.monotonic() >= until:
                raise busy from None
            if not waits:
                on_wait()
            waits = True
            time.sleep(_POLL_SECONDS)
            continue
        except OSError:
            break  # a file system without locks
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), path.stat()):
                break
        os.close(handle)  # who had the lock has renamed or removed it meanwhile
    try:
        yield
    finally:
        os.close(handle)


@contextmanager
def locked(folder: Path, error: type[Exception]) -> Iterator[None]:
    """Makes a folder and keeps other kvcli processes from writing to it; raises `error` if one does."""
    folder.mkdir(parents=True, exist_ok=True)
    busy = error(f"another kvcli process writes to {folder}; wait until it has ended or choose another --out")
    with lock(folder, busy):
        yield
