"""Safetensors files that are named by the BLAKE3 of their bytes: what is equal is stored once.

A file with the right name and a wrong content is damaged, and is written again when the same tensors are added.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors.torch import save
from torch import Tensor

from kvcli.errors import ContextError
from kvcli.storage.atomic import replacing
from kvcli.storage.reads import Part, memory_for, read_parts
from kvcli.storage.tensors import SafetensorsHeader

_SUFFIX = ".safetensors"
_DIGEST = re.compile(rb"[0-9a-f]{64}")


@dataclass(frozen=True)
class TensorFile:
    """A file of a folder of `TensorFiles`.

    Attributes:
        digest: BLAKE3 of its bytes, and its name.
        bytes: its size.
    """

    digest: str
    bytes: int

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TensorFile:
        """The record as JSON has it.

        Raises:
            ValueError: it is none.
        """
        digest, size = values.get("digest"), values.get("bytes")
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest.encode()) or not isinstance(size, int):
            raise ValueError("a file without digest or size")
        return cls(digest, size)

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
        return self.folder / f"{file.digest}{_SUFFIX}"

    def add(self, tensors: Mapping[str, Tensor]) -> tuple[TensorFile, bool]:
        """Writes tensors, unless they are there.

        Args:
            tensors: by name, on any device.

        Returns:
            Their file, and whether it was written now.
        """
        data = save({name: x.detach().to("cpu", copy=True).contiguous() for name, x in tensors.items()})
        file = TensorFile(blake3(data).hexdigest(), len(data))
        if self._is_intact(file):
            return file, False
        self.folder.mkdir(parents=True, exist_ok=True)
        # a name of its own: another process may be writing the same file
        with replacing(self.path(file), f".{os.getpid()}-{secrets.token_hex(4)}.tmp") as temporary:
            temporary.write_bytes(data)
        return file, True

    def _is_intact(self, file: TensorFile) -> bool:
        try:
            self.verify([file])
        except ContextError:
            return False
        return True

    def read(self, files: Sequence[TensorFile], device: torch.device | str = "cpu") -> list[dict[str, Tensor]]:
        """Reads and verifies files, several at once.

        Args:
            files: to read.
            device: of the tensors.

        Returns:
            The tensors of each file. On the CPU they are the mapped file itself: copy them before they are kept.

        Raises:
            ContextError: a file is missing, truncated or damaged.
        """
        memory = self._verified(files, torch.device(device))
        try:
            return [_tensors_in(data) for data in memory]
        except ValueError as error:
            raise ContextError(f"a file in {self.folder} is none of tensors ({error})") from error

    def verify(self, files: Sequence[TensorFile]) -> None:
        """Compares size and BLAKE3 of files, several at once.

        Raises:
            ContextError: the first that is missing, truncated or damaged.
        """
        self._verified(files, torch.device("cpu"))

    def _verified(self, files: Sequence[TensorFile], device: torch.device) -> list[Tensor]:
        """The bytes of files, uint8 [bytes] each.

        Raises:
            ContextError: the first that is missing, truncated or damaged.
        """
        for file in files:
            if (damage := self._damage(file)) is not None:
                raise ContextError(f"{self.path(file)} is {damage}")
        try:
            memory = [memory_for(self.path(file), file.bytes, device) for file in files]
            digests = read_parts([Part(self.path(file), 0, data) for file, data in zip(files, memory, strict=True)])
        except OSError as error:
            raise ContextError(f"a file in {self.folder} cannot be read ({' '.join(str(error).split())})") from error
        for file, digest in zip(files, digests, strict=True):
            if digest != file.digest:
                raise ContextError(f"{self.path(file)} is damaged (its BLAKE3 differs)")
        return memory

    def _damage(self, file: TensorFile) -> str | None:
        """What can be seen without reading a file: `missing`, or that it has another size; None if nothing is wrong."""
        path = self.path(file)
        if not path.is_file():
            return "missing"
        same = path.stat().st_size == file.bytes > 0
        return None if same else "truncated or damaged (its size differs)"

    def held(self) -> dict[str, int]:
        """Names (BLAKE3) and bytes of the files that are there."""
        paths = (path for path in self.folder.glob(f"*{_SUFFIX}") if _DIGEST.fullmatch(path.stem.encode()))
        return {path.stem: path.stat().st_size for path in paths if path.is_file()}

    def unfinished(self) -> list[Path]:
        """Files that a killed process was writing."""
        names = re.compile(rb"%b%b\.\d+-[0-9a-f]+\.tmp" % (_DIGEST.pattern, re.escape(_SUFFIX.encode())))
        return [path for path in self.folder.glob("*.tmp") if names.fullmatch(path.name.encode()) and path.is_file()]

    def remove(self, names: set[str]) -> int:
        """Removes files by name; returns the bytes that they took."""
        freed = 0
        for name in sorted(names):
            path = self.folder / f"{name}{_SUFFIX}"
            freed += path.stat().st_size
            path.unlink()
        return freed


def _tensors_in(data: Tensor) -> dict[str, Tensor]:
    """The tensors of a safetensors file, as views of its bytes, uint8 [bytes] on any device.

    Raises:
        ValueError: it is none.
    """
    length = int.from_bytes(bytes(data[:8].tolist()), "little")
    header = SafetensorsHeader.parse(bytes(data[8 : 8 + min(length, len(data))].cpu().numpy()))
    rest = data[header.nbytes :]
    if len(rest) != header.data_bytes:
        raise ValueError("its size differs from what its header says")
    return header.views(rest)
