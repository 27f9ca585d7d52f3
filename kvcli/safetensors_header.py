"""The header of a safetensors file, for readers that bring its bytes into memory themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_METADATA = "__metadata__"
_MAX_BYTES = 100 * 2**20
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Entry:
    """A tensor of a file.

    Attributes:
        dtype: of its numbers.
        shape: of it.
        start: of its first byte, counted from the end of the header.
        stop: after its last one.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Entry:
        """The record as the header has it.

        Raises:
            ValueError, TypeError, KeyError: it is none.
        """
        start, stop = values["data_offsets"]
        entry = cls(_DTYPES[values["dtype"]], tuple(values["shape"]), start, stop)
        if not all(type(number) is int and number >= 0 for number in (*entry.shape, start, stop)):
            raise ValueError("sizes of a tensor that are none")
        if stop - start != prod(entry.shape) * entry.dtype.itemsize:
            raise ValueError("a tensor of another size than its shape")
        return entry

    def view(self, data: Tensor) -> Tensor:
        """The tensor in what follows the header, uint8 [bytes].

        Raises:
            RuntimeError: it does not begin where a number of its dtype can.
        """
        return data[self.start : self.stop].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Header:
    """What a safetensors file says of itself.

    Attributes:
        nbytes: of the header; the tensors follow it.
        metadata: texts by name.
        entries: tensors by name, in the order of their bytes, which they fill without a gap.
    """

    nbytes: int
    metadata: Mapping[str, str]
    entries: Mapping[str, Entry]

    @property
    def data_bytes(self) -> int:
        """Bytes of all tensors."""
        return max((entry.stop for entry in self.entries.values()), default=0)

    @classmethod
    def read(cls, path: Path) -> Header:
        """Reads the header of a file, and compares the file's size with it.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is no safetensors file, or it is truncated or too long.
        """
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not length <= min(size - 8, _MAX_BYTES):
                raise ValueError("it has no header of safetensors")
            header = cls.parse(file.read(length))
        if size != header.nbytes + header.data_bytes:
            raise ValueError("its size differs from what its header says")
        return header

    @classmethod
    def parse(cls, text: bytes) -> Header:
        """From the JSON object after the first 8 bytes of a file.

        Raises:
            ValueError: it is no header.
        """
        try:
            values = json.loads(text)
            metadata = values.pop(_METADATA, {})
            entries = {name: Entry.from_dict(entry) for name, entry in values.items()}
            if not all(isinstance(value, str) for value in metadata.values()):
                raise ValueError("metadata that are no texts")
        except (TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"its header is damaged ({' '.join(str(error).split())})") from error
        entries = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)))
        borders = [(0, 0), *((entry.start, entry.stop) for entry in entries.values())]
        if any(stop != start for (_, stop), (start, _) in pairwise(borders)):
            raise ValueError("its tensors leave gaps or overlap")
        return cls(8 + len(text), metadata, entries)

    def views(self, data: Tensor) -> dict[str, Tensor]:
        """The tensors in what follows the header, uint8 [bytes].

        Raises:
            ValueError: one does not begin where a number of its dtype can.
        """
        try:
            return {name: entry.view(data) for name, entry in self.entries.items()}
        except RuntimeError as error:
            raise ValueError(f"its header is damaged ({' '.join(str(error).split())})") from error
