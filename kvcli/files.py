"""Writing files so that a name never stands for half a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a temporary path to write to, which takes the name `path` when the block ends without an error."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
        temporary.chmod(0o644)  # some writers leave files that only their owner may read
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
