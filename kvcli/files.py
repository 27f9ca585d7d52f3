"""Writing files so that a name never stands for half a file, and records a line each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


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


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Adds one JSON line to a file."""
    with path.open("a") as handle:
        handle.write(json.dumps(record) + "\n")
