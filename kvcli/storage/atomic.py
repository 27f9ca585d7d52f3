"""Files that appear under their name only when they are complete, their checksums, and records as lines of JSON."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_WRITE_ERRORS = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write to, which takes the name `path` when the block ends without an error.

    The content is on the disk before the name is, so that no power loss leaves an empty file under the name. An OSError
    names the file, also where a device or a folder has the name.
    """
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "Not a regular file", str(path))
    temporary = temporary_path(path)
    try:
        with _write_errors_name(path):
            yield temporary
            flush_to_disk(temporary)
        temporary.chmod(0o644)  # some writers leave files that only their owner may read
        temporary.replace(path)
        with suppress(OSError):  # not every system lets a folder be opened
            flush_to_disk(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def temporary_path(path: Path) -> Path:
    """The name of a file until it is complete."""
    return path.with_name(path.name + ".tmp")


@contextmanager
def _write_errors_name(path: Path) -> Iterator[None]:
    """Failed writes in the block raise an OSError that names the file, also those that safetensors reports as text."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    except Exception as error:
        for code in _WRITE_ERRORS if type(error).__name__ == "SafetensorError" else ():
            if os.strerror(code) in str(error):
                raise OSError(code, os.strerror(code), str(path)) from error
        raise


def flush_to_disk(path: Path) -> None:
    """Returns when a file's content, or a folder's names, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def link_or_copy(source: Path, target: Path) -> None:
    """Gives a file a second name, in place of what has that name; copies it where the file system has no links."""
    if target.exists() and target.samefile(source):
        return
    temporary = temporary_path(target)
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:
        with replacing(target) as temporary:
            shutil.copyfile(source, temporary)
    else:
        temporary.replace(target)


def file_record(path: Path) -> dict[str, Any]:
    """Size and checksum of a file: `bytes` and `sha256`; OSError: no regular file, or one that cannot be read."""
    if not path.is_file():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    with path.open("rb") as handle:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(handle, "sha256").hexdigest()}


def is_intact(path: Path, record: Any) -> bool:
    """Whether a file has the size and checksum that `file_record` gave when it was written."""
    if not isinstance(record, Mapping) or not path.is_file() or path.stat().st_size != record.get("bytes"):
        return False
    return file_record(path)["sha256"] == record.get("sha256")


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Adds one JSON line to a file, on a line of its own also after a write that was cut off."""
    torn = False
    if path.is_file() and path.stat().st_size:
        with path.open("rb") as handle:
            handle.seek(-1, os.SEEK_END)
            torn = handle.read(1) != b"\n"
    with _write_errors_name(path), path.open("a") as handle:
        handle.write(("\n" if torn else "") + to_json(record) + "\n")


def read_records(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file that `append_record` wrote; lines that a kill cut off are skipped."""
    records = []
    if path.is_file():
        with path.open(encoding="utf-8-sig", errors="replace") as handle:
            for line in handle:
                with suppress(ValueError, RecursionError):
                    records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]


def to_json(value: Any) -> str:
    """JSON that every parser reads: NaN and infinities, which JSON does not have, are null."""
    return json.dumps(json.loads(json.dumps(value), parse_constant=lambda _: None))
