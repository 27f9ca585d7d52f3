"""Atomic file writes, checksums, locks, run folders that resume, and JSON lines."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows: folders are not locked there
    fcntl = None  # type: ignore[assignment]

SEAL = "sha256"
"""Field of a sealed JSON object: the sha256 of all its other fields."""

_MAX_JSON_BYTES = 256 * 2**20
_WRITE_ERRORS = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO)
_SHOWN_DIFFERENCES = 3
_SHOWN_CHARACTERS = 60
_MISSING = "nothing"


@contextmanager
def replacing(path: Path, suffix: str = ".tmp") -> Iterator[Path]:
    """Yields a temporary path to write to, which takes the name `path` when the block ends without an error.

    The content is on the disk before the name is, so that no power loss leaves an empty file under the name.

    Args:
        path: the file.
        suffix: what is added to its name; processes that write the same file at once need different ones.

    Raises:
        OSError: the disk is full and the like; it names the file.
    """
    temporary = temporary_path(path, suffix)
    try:
        try:
            yield temporary
            flush_to_disk(temporary)
        except Exception as error:
            if (named := _write_error(error, path)) is None:
                raise
            raise named from error
        temporary.chmod(0o644)  # some writers leave files that only their owner may read
        temporary.replace(path)
        with suppress(OSError):  # not every system lets a folder be opened
            flush_to_disk(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def temporary_path(path: Path, suffix: str = ".tmp") -> Path:
    """What a file is called until it is complete."""
    return path.with_name(path.name + suffix)


def flush_to_disk(path: Path) -> None:
    """Returns when a file's content, or a folder's names, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_error(error: Exception, path: Path) -> OSError | None:
    """The same failure with the file's name, where an error is a failed write without one."""
    if isinstance(error, OSError):
        return OSError(error.errno, error.strerror, str(path)) if error.errno and error.filename is None else None
    if type(error).__name__ == "SafetensorError":  # its text is all it has
        code = next((code for code in _WRITE_ERRORS if os.strerror(code) in str(error)), None)
        return None if code is None else OSError(code, os.strerror(code), str(path))
    return None


@contextmanager
def locked(folder: Path, error: type[Exception]) -> Iterator[None]:
    """Makes a folder and keeps other kvcli processes out of it; the lock ends with its process, also if that is killed.

    Args:
        folder: the folder.
        error: what to raise.

    Raises:
        Exception: `error`, if another process holds the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise error(
                f"another kvcli process writes to {folder}; wait until it has ended or choose another --out"
            ) from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(handle)


def file_record(path: Path) -> dict[str, Any]:
    """Size and checksum of a file: `bytes` and `sha256`.

    Raises:
        OSError: no regular file, or one that cannot be read.
    """
    if not path.is_file():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    with path.open("rb") as handle:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(handle, "sha256").hexdigest()}


def is_intact(path: Path, record: Any) -> bool:
    """Whether a file is there with the size and checksum that `file_record` gave when it was written."""
    if not isinstance(record, Mapping) or not path.is_file() or path.stat().st_size != record.get("bytes"):
        return False
    return file_record(path) == {name: record.get(name) for name in ("bytes", "sha256")}


def json_sha256(values: Mapping[str, Any]) -> str:
    """sha256 of plain JSON values, whatever the order of their names."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def write_sealed(path: Path, values: Mapping[str, Any]) -> None:
    """Writes one JSON object with the sha256 of its fields; it appears under its name only when complete."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps({**values, SEAL: json_sha256(values)}, indent=2) + "\n")


def read_sealed(path: Path, version: int, remedy: str, error: type[Exception]) -> dict[str, Any]:
    """Reads what `write_sealed` wrote.

    Args:
        path: the file.
        version: the `format_version` it must have.
        remedy: what to do about a file that cannot be used, an end of a sentence.
        error: what to raise.

    Returns:
        The fields without the checksum.

    Raises:
        Exception: `error`, if the file is damaged, has another format version or was changed after it was written.
    """
    try:
        values = _read_object(path)
    except (OSError, ValueError, RecursionError) as reason:
        raise error(f"{path} is damaged ({_short(' '.join(str(reason).split()))}); {remedy}") from reason
    if (theirs := values.get("format_version", 1)) != version:
        raise error(f"{path} has format version {_short(theirs)}; this kvcli reads version {version}; {remedy}")
    if not _is_sealed(values):
        raise error(f"{path} is damaged: it was changed after it was written (its sha256 differs); {remedy}")
    del values[SEAL]
    return values


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError("no such file")
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise ValueError(f"larger than {_MAX_JSON_BYTES // 2**20} MiB")
    values = json.loads(path.read_text())
    if not isinstance(values, dict):
        raise ValueError("not a JSON object")
    return values


def _is_sealed(values: Mapping[str, Any]) -> bool:
    try:
        return bool(values.get(SEAL) == json_sha256({name: value for name, value in values.items() if name != SEAL}))
    except RecursionError:  # lists in lists, as deep as the parser just bears
        return False


def open_run(
    folder: Path,
    manifest_name: str,
    description: Mapping[str, Any],
    *,
    kind: str,
    stale: Sequence[str],
    error: type[Exception],
    overwrite: bool = False,
) -> dict[str, Any]:
    """Makes a run folder, or checks that the run in it is the same one, which then resumes.

    What a killed process left half written is removed. Files of other names stay.

    Args:
        folder: the run folder.
        manifest_name: file in it that describes the run.
        description: what the run is bound to, plain JSON values; the manifest may say more.
        kind: what the run is called in messages.
        stale: glob patterns of the run's files, which are deleted when a run is overwritten.
        error: what to raise.
        overwrite: discard a run that is in the folder, also the same one.

    Returns:
        The manifest without its checksum: the description, and what a finished run added to it.

    Raises:
        Exception: `error`, if the folder holds another run and `overwrite` is off; it names what differs.
    """
    path = folder / manifest_name
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in (*stale, manifest_name):
        for temporary in folder.glob(pattern + ".tmp"):
            temporary.unlink(missing_ok=True)
    wanted = json.loads(json.dumps(description))
    try:
        manifest = _read_object(path) if path.exists() else None
    except (OSError, ValueError, RecursionError):
        manifest = {}
    if manifest and not overwrite and _is_sealed(manifest):
        del manifest[SEAL]
        if {name: manifest.get(name) for name in wanted} == wanted:
            return manifest
    files = [file for pattern in stale for file in folder.glob(pattern)]
    if (manifest is not None or files) and not overwrite:
        reason = _refusal(manifest, wanted, manifest_name)
        raise error(f"{folder} holds another {kind} ({reason}); choose another --out or discard it with --overwrite")
    for file in files:  # the manifest last: what a kill leaves can be resumed as the run that it was
        file.unlink(missing_ok=True)
    write_sealed(path, wanted)
    return dict(wanted)


def _refusal(manifest: Mapping[str, Any] | None, wanted: Mapping[str, Any], name: str) -> str:
    """Why a folder with this manifest is not the wanted run's."""
    if not manifest:
        return f"its {name} is {'missing' if manifest is None else 'damaged'}"
    differences = _differences(manifest, wanted)
    return f"differs in {differences}" if differences else f"its {name} is damaged: it was changed after it was written"


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
    try:
        text = value if isinstance(value, str) else json.dumps(value)
    except RecursionError:
        text = "..."
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Adds one JSON line to a file, on a line of its own also after a write that was cut off."""
    try:
        with path.open("a") as handle:
            handle.write(("\n" if _is_torn(path) else "") + to_json(record) + "\n")
    except OSError as error:
        raise _write_error(error, path) or error from error


def read_records(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file that `append_record` wrote; lines that a kill cut off are skipped."""
    records = []
    if path.is_file():
        with path.open(errors="replace") as handle:
            for line in handle:
                with suppress(ValueError, RecursionError):
                    records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]


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
