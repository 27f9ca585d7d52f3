"""Records as lines of JSON, added one by one."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvcli.storage.atomic import write_errors_name


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Adds one JSON line to a file, on a line of its own also after a write that was cut off."""
    torn = False
    if path.is_file() and path.stat().st_size:
        with path.open("rb") as handle:
            handle.seek(-1, os.SEEK_END)
            torn = handle.read(1) != b"\n"
    with write_errors_name(path), path.open("a") as handle:
        handle.write(("\n" if torn else "") + to_json(record) + "\n")


def read_records(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file that `append_record` wrote; lines that a kill cut off are skipped."""
    records = []
    if path.is_file():
        with path.open(errors="replace") as handle:
            for line in handle:
                with suppress(ValueError, RecursionError):
                    records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]


def to_json(value: Any) -> str:
    """JSON that every parser reads: NaN and infinities, which JSON does not have, are null."""
    return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value
