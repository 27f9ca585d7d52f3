"""One writer at a time for a file that `files.replacing` writes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvcli.files import temporary_path

try:
    import fcntl
except ImportError:  # Windows: files are not locked there
    fcntl = None  # type: ignore[assignment]


@contextmanager
def sole_writer(path: Path, error: type[Exception]) -> Iterator[None]:
    """Keeps other processes from writing a file with `replacing`; the lock ends with its process.

    Args:
        path: the file; the lock is on the temporary one.
        error: what to raise.

    Raises:
        Exception: `error`, if another process writes the file.
    """
    if fcntl is None:
        yield
        return
    handle = _locked_file(temporary_path(path))
    if handle is None:
        raise error(f"another kvcli process writes {path}; wait until it has ended")
    try:
        yield
    finally:
        os.close(handle)


def _locked_file(path: Path) -> int | None:
    """A handle of a file with a lock, which is made; None if another process has the lock."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        except OSError:  # a file system without locks
            return handle
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), path.stat()):
                return handle
        os.close(handle)  # who had the lock has renamed or removed the file meanwhile
