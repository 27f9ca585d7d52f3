"""A lock on a folder that several processes hold together, or one alone; it ends with its process, also if killed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvcli.errors import ContextError

try:
    import fcntl
except ImportError:  # Windows: folders are not locked there
    fcntl = None  # type: ignore[assignment]

_POLL_SECONDS = 0.02
_MAX_SECONDS = 600.0


@contextmanager
def lock(folder: Path, *, alone: bool, max_seconds: float = _MAX_SECONDS) -> Iterator[None]:
    """Holds a folder inside the block; waits for processes and threads that hold it otherwise.

    File systems without locks are not locked.

    Args:
        folder: exists.
        alone: keep all others out; otherwise, only those that want it alone.
        max_seconds: how long to wait.

    Raises:
        ContextError: others held the folder for that long.
    """
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        until = time.monotonic() + max_seconds
        while not _taken(handle, fcntl.LOCK_EX if alone else fcntl.LOCK_SH):
            if time.monotonic() > until:
                raise ContextError(f"other kvcli processes use {folder}; wait until they have ended")
            time.sleep(_POLL_SECONDS)
        yield
    finally:
        os.close(handle)


def _taken(handle: int, mode: int) -> bool:
    try:
        fcntl.flock(handle, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks
    return True
