"""Atomic file writes, run folders that resume, and JSON lines."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_SHOWN_DIFFERENCES = 3
_SHOWN_CHARACTERS = 60
_MISSING = "nothing"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write to, which takes the name `path` when the block ends without an error."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
        temporary.chmod(0o644)  # some writers leave files that only their owner may read
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes one JSON object; it appears under its name only when complete."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2) + "\n")


def open_run(
    folder: Path,
    manifest_name: str,
    description: Mapping[str, Any],
    *,
    kind: str,
    stale: Sequence[str],
    error: type[Exception],
    overwrite: bool = False,
) -> None:
    """Makes a run folder, or checks that the run in it is the same one, which then resumes.

    Args:
        folder: the run folder.
        manifest_name: file in it that describes the run.
        description: what the run is bound to, plain JSON values; the manifest may say more.
        kind: what the run is called in messages.
        stale: glob patterns of the run's files, which are deleted when another run is overwritten.
        error: what to raise.
        overwrite: discard another run that is in the folder.

    Raises:
        Exception: `error`, if the folder holds another run and `overwrite` is off; it names what differs.
    """
    path = folder / manifest_name
    folder.mkdir(parents=True, exist_ok=True)
    wanted = json.loads(json.dumps(description))
    try:
        manifest = json.loads(path.read_text()) if path.is_file() else None
    except ValueError:
        manifest = {}
    if isinstance(manifest, dict) and {name: manifest.get(name) for name in wanted} == wanted:
        return
    files = [file for pattern in stale for file in folder.glob(pattern)]
    if (manifest is not None or files) and not overwrite:
        if isinstance(manifest, dict) and manifest:
            reason = f"differs in {_differences(manifest, wanted)}"
        else:
            reason = f"its {manifest_name} is {'missing' if manifest is None else 'damaged'}"
        raise error(f"{folder} holds another {kind} ({reason}); choose another --out or discard it with --overwrite")
    for file in files:
        file.unlink()
    write_json(path, wanted)


def _differences(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """The first settings that differ, each with both values."""
    pairs = list(_unequal("", {name: stored.get(name, _MISSING) for name in wanted}, wanted))
    shown = [f"{name}: {_short(theirs)} there, {_short(ours)} here" for name, theirs, ours in pairs]
    more = len(shown) - _SHOWN_DIFFERENCES
    return "; ".join([*shown[:_SHOWN_DIFFERENCES], *([f"and {more} more"] if more > 0 else [])])


def _unequal(prefix: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Names of values that differ, also inside of mappings, with the two values."""
    for name in {**first, **second}:
        a, b = first.get(name, _MISSING), second.get(name, _MISSING)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from _unequal(f"{prefix}{name}.", a, b)
        elif a != b:
            yield f"{prefix}{name}", a, b


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."


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


def to_json(value: Any) -> str:
    """JSON that every parser reads: NaN and infinities, which JSON does not have, are null."""
    return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
