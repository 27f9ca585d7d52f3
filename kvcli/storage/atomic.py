"""Files that appear under their name only when they are complete, and their checksums."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_WRITE_ERRORS = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO)


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
        with write_errors_name(path):
            yield temporary
            flush_to_disk(temporary)
        temporary.chmod(0o644)  # some writers leave files that only their owner may read
        temporary.replace(path)
        with suppress(OSError):  # not every system lets a folder be opened
            flush_to_disk(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def temporary_path(path: Path, suffix: str = ".tmp") -> Path:
    """What a file is called until it is complete."""
    return path.with_name(path.name + suffix)


@contextmanager
def write_errors_name(path: Path) -> Iterator[None]:
    """Failed writes in the block raise an OSError that names the file, also those that safetensors reports as text."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    except Exception as error:
        by_text = type(error).__name__ == "SafetensorError"
        for code in _WRITE_ERRORS:
            if by_text and os.strerror(code) in str(error):
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
    return file_record(path)["sha256"] == record.get("sha256")
