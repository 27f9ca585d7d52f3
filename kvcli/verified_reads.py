"""Files brought into memory while the checksums of their parts are computed, several parts at a time.

Every thread reads into a buffer of its own, which is page-locked where the memory is a GPU's: the device copies a piece
from there while its checksum is computed. On the host a file is mapped for its content to be in memory once, but read
for its checksum, so that a disk that fails is an error. This module does not know what the bytes mean.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO

import torch
from torch import Tensor

PIECE_BYTES = 4 * 2**20
"""Bytes that are read and copied at once."""

_MAX_THREADS = 16


@dataclass(frozen=True)
class Part:
    """Bytes of a file.

    Attributes:
        path: of the file.
        start: of the first byte in the file.
        memory: uint8 [bytes], these bytes of what `memory_for` gave.
    """

    path: Path
    start: int
    memory: Tensor


@torch.inference_mode(False)  # a tensor made in inference mode could not be written to by other threads
def memory_for(path: Path, nbytes: int, device: torch.device) -> Tensor:
    """Memory for a file, uint8 [nbytes]: on the host the file itself, mapped; on a GPU to be filled by `read_parts`.

    Raises:
        OSError: the file cannot be mapped, or it is shorter.
    """
    if device.type != "cpu":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    try:
        return torch.from_file(str(path), shared=False, size=nbytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(" ".join(str(error).split())) from error


def read_parts(parts: Sequence[Part]) -> list[str]:
    """Reads parts of files to where they belong; nothing there may be used before the checksums were compared.

    Args:
        parts: all on one device.

    Returns:
        sha256 of each part.

    Raises:
        OSError: a file cannot be read, or it ends before a part does.
    """
    if not parts:
        return []
    count, longest = min(_MAX_THREADS, os.cpu_count() or 1, len(parts)), max(len(part.memory) for part in parts)
    readers: SimpleQueue[_Reader] = SimpleQueue()
    for _ in range(count):
        readers.put(_reader(parts[0].memory.device, min(longest, PIECE_BYTES)))

    def read(part: Part) -> str:
        reader = readers.get()
        try:
            return reader.read(part)
        finally:
            readers.put(reader)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(read, parts))


def _reader(device: torch.device, nbytes: int) -> _Reader:
    """A reader for a device, of pieces of `nbytes` at most."""
    return _Reader(nbytes) if device.type == "cpu" else _GpuReader(nbytes, device)


class _Reader:
    """Reads parts of files for their checksums; where they belong they are already, because the files are mapped.

    Args:
        nbytes: of the longest piece.
        pinned: read into page-locked memory.
    """

    def __init__(self, nbytes: int, pinned: bool = False) -> None:
        self.buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)

    def read(self, part: Part) -> str:
        """Reads a part; returns its sha256."""
        digest = hashlib.sha256()
        with part.path.open("rb", buffering=0) as file:
            file.seek(part.start)
            for piece in part.memory.split(PIECE_BYTES):
                read = self.buffer[: len(piece)]
                _fill(file, _bytes(read))
                with self._copied(read, piece):
                    digest.update(_bytes(read))
        return digest.hexdigest()

    def _copied(self, read: Tensor, piece: Tensor) -> AbstractContextManager[None]:
        """Copies what was read while the block runs; the buffer is free when it ends."""
        return nullcontext()


class _GpuReader(_Reader):
    """Reads parts of files into memory of a GPU.

    Args:
        nbytes: of the longest piece.
        device: the GPU.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        super().__init__(nbytes, pinned=True)
        self.stream = torch.cuda.Stream(device)
        # kernels that used this memory before may not have run yet
        self.stream.wait_stream(torch.cuda.current_stream(device))

    @contextmanager
    def _copied(self, read: Tensor, piece: Tensor) -> Iterator[None]:
        with torch.cuda.stream(self.stream):
            piece.copy_(read, non_blocking=True)
        try:
            yield
        finally:
            self.stream.synchronize()


def _fill(file: BinaryIO, rest: memoryview) -> None:
    """Reads as many bytes as there is room for."""
    while rest:
        count = file.readinto(rest)  # type: ignore[attr-defined]
        if not count:
            raise OSError(f"{file.name} is truncated")
        rest = rest[count:]


def _bytes(x: Tensor) -> memoryview:
    """The memory of a tensor on the host."""
    memory: memoryview = x.numpy().data
    return memory
