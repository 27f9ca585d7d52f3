"""Writing files so that a name never stands for half a file, and records a line each."""

from __future__ import annotations

import json
import math
import os
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
    """Adds one JSON line to a file, on a line of its own also after a write that was cut off."""
    with path.open("a+b") as handle:
        if handle.seekable() and handle.seek(0, os.SEEK_END):
            handle.seek(-1, os.SEEK_END)
            if handle.read(1) != b"\n":
                handle.write(b"\n")
        handle.write((to_json(record) + "\n").encode())


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON that every parser reads: NaN and infinities, which it does not have, are null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
