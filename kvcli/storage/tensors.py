"""The header of a safetensors file, for readers that bring its bytes into memory themselves."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Annotated, Self

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, NonNegativeInt, ValidationError, model_validator
from torch import Tensor

from kvcli.errors import error_text, explain

_MAX_BYTES = 100 * 2**20
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class TensorEntry(BaseModel):
    """A tensor of a file: dtype, shape, and where its bytes start and stop after the header."""

    model_config = ConfigDict(strict=True, frozen=True, arbitrary_types_allowed=True)

    dtype: Annotated[torch.dtype, BeforeValidator(lambda name: _DTYPES.get(str(name)))]
    shape: tuple[NonNegativeInt, ...]
    data_offsets: tuple[NonNegativeInt, NonNegativeInt]

    @model_validator(mode="after")
    def _has_the_size_of_its_shape(self) -> Self:
        start, stop = self.data_offsets
        if stop - start != prod(self.shape) * self.dtype.itemsize:
            raise ValueError("a tensor of another size than its shape")
        return self


class _Fields(BaseModel):
    """The JSON object of a header: a tensor for each name, and texts under one reserved name."""

    model_config = ConfigDict(strict=True, extra="allow")

    metadata: dict[str, str] = Field({}, alias="__metadata__")
    __pydantic_extra__: dict[str, TensorEntry]


@dataclass(frozen=True)
class SafetensorsHeader:
    """The header of a safetensors file: its length, texts, and tensors in the order of their bytes, without gaps."""

    nbytes: int
    metadata: Mapping[str, str]
    entries: Mapping[str, TensorEntry]

    @property
    def data_bytes(self) -> int:
        """Bytes of all tensors."""
        return max((entry.data_offsets[1] for entry in self.entries.values()), default=0)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads a file's header; OSError and ValueError say why not, also of a file that is truncated or too long."""
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
    def parse(cls, text: bytes) -> Self:
        """Checks the JSON object after the first 8 bytes of a file; a ValueError says why it is no header."""
        try:
            fields = _Fields.model_validate_json(text)
        except ValidationError as error:
            raise ValueError(f"its header is damaged ({' '.join(explain(error, ()).split())})") from error
        entries = dict(sorted(fields.__pydantic_extra__.items(), key=lambda item: item[1].data_offsets))
        borders = [(0, 0), *(entry.data_offsets for entry in entries.values())]
        if any(stop != start for (_, stop), (start, _) in pairwise(borders)):
            raise ValueError("its tensors leave gaps or overlap")
        return cls(8 + len(text), fields.metadata, entries)

    def views(self, data: Tensor) -> dict[str, Tensor]:
        """The tensors in what follows the header, uint8 [bytes]; ValueError if one begins where its dtype cannot."""
        try:
            views = {name: data[slice(*x.data_offsets)].view(x.dtype) for name, x in self.entries.items()}
            return {name: x.view(self.entries[name].shape) for name, x in views.items()}
        except RuntimeError as error:
            raise ValueError(f"its header is damaged ({error_text(error)})") from error
