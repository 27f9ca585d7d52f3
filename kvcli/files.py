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
    with path.open("a") as handle:
        handle.write(("\n" if _is_torn(path) else "") + to_json(record) + "\n")


def _is_torn(path: Path) -> bool:
    """Whether a file's last line has no end; a pipe has none."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as handle:
        handle.seek(-1, os.SEEK_END)
        return handle.read(1) != b"\n"


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
