"""Files brought into memory while the checksums of their parts are computed, several parts at a time.

Every thread reads into a buffer of its own, which is page-locked where the memory is a GPU's: the device copies a piece
from there while its checksum is computed. On the host a file is mapped for its content to be in memory once, but read
for its checksum, so that a disk that fails is an error. This module does not know what the bytes mean.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from queue import SimpleQueue

import torch
from blake3 import blake3
from torch import Tensor

from kvcli.errors import error_text

READ_BYTES = 8 * 2**20
"""Bytes that are read and copied at once."""

_MAX_THREADS = 12
"""More wait for each other; measured on hosts of an H100 and an H200."""


@dataclass(frozen=True)
class FilePart:
    """Bytes of a file from `start` on, and where they belong: a part of what `memory_for` gave, uint8 [bytes]."""

    path: Path
    start: int
    memory: Tensor


@torch.inference_mode(False)  # a tensor made in inference mode could not be written to by other threads
def memory_for(path: Path, nbytes: int, device: torch.device) -> Tensor:
    """Memory for a file, uint8 [nbytes]: on the host the file itself, mapped; on a GPU to be filled by `read_parts`.

    A file that cannot be mapped, or is shorter, is an OSError.
    """
    if device.type != "cpu":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    try:
        return torch.from_file(str(path), shared=False, size=nbytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(error_text(error)) from error


def read_parts(parts: Sequence[FilePart]) -> list[str]:
    """Reads parts of files, all on one device, to where they belong, and returns their BLAKE3.

    Nothing there may be used before these were compared. Parts that follow each other in a file and in memory are read
    together in this order. A file that cannot be read, or ends before a part does, is an OSError.
    """
    if not parts:
        return []
    groups = _neighbours(parts)
    count = min(_MAX_THREADS, os.cpu_count() or 1, len(groups))
    longest = max(sum(len(part.memory) for part in group) for group in groups)
    readers: SimpleQueue[_Reader] = SimpleQueue()
    for _ in range(count):
        readers.put(_Reader(parts[0].memory.device, min(longest, READ_BYTES)))

    def read(group: list[FilePart]) -> list[str]:
        reader = readers.get()
        try:
            return reader.read(group)
        finally:
            readers.put(reader)

    with ThreadPoolExecutor(count) as threads:
        return list(chain.from_iterable(threads.map(read, groups)))


def _neighbours(parts: Sequence[FilePart]) -> list[list[FilePart]]:
    """The parts in groups of those that follow each other in a file and in memory, up to `READ_BYTES` together."""
    groups: list[list[FilePart]] = []
    end: tuple[object, ...] = ()
    total = 0
    for part in parts:
        size, offset = len(part.memory), int(part.memory.storage_offset())
        file = part.path, part.memory.untyped_storage().data_ptr()
        if end == (*file, part.start, offset) and total + size <= READ_BYTES:
            groups[-1].append(part)
            total += size
        else:
            groups.append([part])
            total = size
        end = *file, part.start + size, offset + size
    return groups


class _Reader:
    """Reads parts of files for their checksums, in pieces of at most `nbytes`, and copies them to a GPU."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        on_gpu = device.type != "cpu"
        self.buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=on_gpu)
        self.stream = torch.cuda.Stream(device) if on_gpu else None
        if self.stream is not None:  # kernels that used this memory before may not have run yet
            self.stream.wait_stream(torch.cuda.current_stream(device))

    def read(self, group: Sequence[FilePart]) -> list[str]:
        """Reads neighbouring parts; returns the BLAKE3 of each."""
        digests, lengths = [blake3() for _ in group], [len(part.memory) for part in group]
        memory = group[0].memory.as_strided((sum(lengths),), (1,))
        with group[0].path.open("rb") as file:
            file.seek(group[0].start)
            for piece in memory.split(READ_BYTES):
                read = self.buffer[: len(piece)]
                if file.readinto(_bytes(read)) < len(piece):
                    raise OSError(f"{file.name} is truncated")
                if self.stream is not None:
                    with torch.cuda.stream(self.stream):
                        piece.copy_(read, non_blocking=True)
                try:
                    contents = [read] if len(group) == 1 else read.split(lengths)
                    for digest, content in zip(digests, contents, strict=True):
                        digest.update(_bytes(content))
                finally:
                    if self.stream is not None:
                        self.stream.synchronize()
        return [digest.hexdigest() for digest in digests]


def _bytes(x: Tensor) -> memoryview:
    memory: memoryview = x.numpy().data
    return memory
