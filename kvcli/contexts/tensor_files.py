"""Safetensors files that are named by the sha256 of their bytes: what is equal is stored once.

A file with the right name and a wrong content is damaged, and is written again when the same tensors are added.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from kvcli.errors import ContextError
from kvcli.files import is_intact, replacing

_SUFFIX = ".safetensors"
_DIGEST = re.compile(rb"[0-9a-f]{64}")
_MAX_THREADS = 8


@dataclass(frozen=True)
class TensorFile:
    """A file of a folder of `TensorFiles`.

    Attributes:
        sha256: of its bytes, and its name.
        bytes: its size.
    """

    sha256: str
    bytes: int

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TensorFile:
        """The record as JSON has it.

        Raises:
            ValueError: it is none.
        """
        sha256, size = values.get("sha256"), values.get("bytes")
        if not isinstance(sha256, str) or not _DIGEST.fullmatch(sha256.encode()) or not isinstance(size, int):
            raise ValueError("a file without sha256 or size")
        return cls(sha256, size)

    def to_dict(self) -> dict[str, Any]:
        """The record as plain JSON values."""
        return asdict(self)


def digests_in(text: bytes) -> set[str]:
    """Everything in a text that could be the name of a file."""
    return {found.decode() for found in _DIGEST.findall(text)}


class TensorFiles:
    """The files of one folder.

    Args:
        folder: made by the first `add`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, file: TensorFile) -> Path:
        """Where a file is."""
        return self.folder / f"{file.sha256}{_SUFFIX}"

    def add(self, tensors: Mapping[str, Tensor]) -> tuple[TensorFile, bool]:
        """Writes tensors, unless they are there.

        Args:
            tensors: by name, on any device.

        Returns:
            Their file, and whether it was written now.
        """
        data = save({name: x.detach().to("cpu", copy=True).contiguous() for name, x in tensors.items()})
        file = TensorFile(hashlib.sha256(data).hexdigest(), len(data))
        if is_intact(self.path(file), file.to_dict()):
            return file, False
        self.folder.mkdir(parents=True, exist_ok=True)
        # a name of its own: another process may be writing the same file
        with replacing(self.path(file), f".{os.getpid()}-{secrets.token_hex(4)}.tmp") as temporary:
            temporary.write_bytes(data)
        return file, True

    def read(self, files: Sequence[TensorFile], device: torch.device | str = "cpu") -> list[dict[str, Tensor]]:
        """Reads files that were verified; they are mapped, and copied from there to the device.

        Returns:
            The tensors of each file. On the CPU they are the mapped file itself: copy them before they are kept.

        Raises:
            ContextError: a file is missing, truncated or damaged.
        """
        self.verify(files)
        return [self._read(file, str(device)) for file in files]

    def verify(self, files: Sequence[TensorFile]) -> None:
        """Compares size and sha256 of files, several at once.

        Raises:
            ContextError: the first that is missing, truncated or damaged.
        """
        with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as threads:
            damages = list(threads.map(self.damage, files))
        for file, damage in zip(files, damages, strict=True):
            if damage is not None:
                raise ContextError(f"{self.path(file)} is {damage}")

    def damage(self, file: TensorFile) -> str | None:
        """What is wrong with a file: `missing`, or `truncated or damaged (its size differs)`; None if it is whole."""
        path = self.path(file)
        if not path.is_file():
            return "missing"
        if path.stat().st_size != file.bytes:
            return "truncated or damaged (its size differs)"
        return None if is_intact(path, file.to_dict()) else "damaged (its sha256 differs)"

    def held(self) -> dict[str, int]:
        """Names (sha256) and bytes of the files that are there."""
        found = {}
        for path in self.folder.glob(f"*{_SUFFIX}"):
            if _DIGEST.fullmatch(path.stem.encode()):
                found[path.stem] = path.stat().st_size
        return found

    def remove(self, names: set[str]) -> int:
        """Removes files by sha256; returns the bytes that they took."""
        freed = 0
        for name in sorted(names):
            path = self.folder / f"{name}{_SUFFIX}"
            freed += path.stat().st_size
            path.unlink()
        return freed

    def _read(self, file: TensorFile, device: str) -> dict[str, Tensor]:
        try:
            with safe_open(self.path(file), framework="pt", device=device) as handle:
                return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
            reason = " ".join(str(error).split())
            raise ContextError(f"{self.path(file)} cannot be read ({reason})") from error
