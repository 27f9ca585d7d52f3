"""The tensor of a chunk, and the record of fixed size before its codes.

LMCache's server has a chunk in one of two forms, told by their shapes and the model's:

    split   [2, layers, tokens, heads * head_dim]           keys, then values
    fused   [1, layers, tokens, heads * 2 * head_dim]       each head's keys and values side by side; also without the
            [layers, tokens, heads * 2 * head_dim]          first axis

A rank of tensor parallelism has some of the heads, one of pipeline parallelism some of the layers.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from kvcli.errors import ChunkError
from kvcli.spec import ModelSpec

Form = Literal["split", "fused"]

NO_START = -1
"""`start` of a method that needs no positions."""

_MAGIC = b"KVCLICHK"
_VERSION = 1
_FORMS: tuple[Form, ...] = get_args(Form)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_FIELDS = struct.Struct("<8sHBB24s16sIIIIiQ")
"""Magic, version, form, dtype, method, identity, layers, tokens, heads, head_dim, start, bytes of the payload."""
_CHECKSUM = struct.Struct("<I")
SIZE = _FIELDS.size + _CHECKSUM.size


@dataclass(frozen=True)
class ChunkLayout:
    """The form and the shapes of a chunk."""

    form: Form
    num_layers: int
    num_tokens: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def read(cls, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], spec: ModelSpec) -> ChunkLayout:
        """The layout of a chunk of a model, from shapes and dtypes of its tensors, one for each kind of layers.

        Raises:
            ChunkError: several kinds, another dtype, or a shape that is neither form; the message names it.
        """
        named = "; ".join(f"{list(shape)} {dtype}" for shape, dtype in zip(shapes, dtypes, strict=True))
        refused = f"chunks of the layout {named} cannot be stored as codes:"
        if len(shapes) != 1:
            raise ChunkError(f"{refused} the layers are of {len(shapes)} kinds, and kvcli knows models of one")
        if dtypes[0] not in _DTYPES:
            raise ChunkError(f"{refused} keys and values are float16, bfloat16 or float32")
        planes, num_layers, num_tokens, width = (1, *shapes[0])[-4:] if len(shapes[0]) in (3, 4) else (0, 0, 0, 0)
        per_head = {1: 2 * spec.head_dim, 2: spec.head_dim}.get(planes, 0)
        heads, rest = divmod(width, per_head) if per_head else (0, 0)
        if rest or not heads or spec.num_kv_heads % heads or not 0 < num_layers <= spec.num_layers or not num_tokens:
            raise ChunkError(
                f"{refused} with {spec.num_layers} layers and {spec.num_kv_heads} kv heads of {spec.head_dim} "
                f"channels they are [2, layers, tokens, heads * {spec.head_dim}] or "
                f"[1, layers, tokens, heads * {2 * spec.head_dim}]"
            )
        return cls("split" if planes == 2 else "fused", num_layers, num_tokens, heads, spec.head_dim, dtypes[0])

    def keys_and_values(self, chunk: Tensor) -> tuple[Tensor, Tensor]:
        """Views of a chunk's tensor, [layers, num_kv_heads, tokens, head_dim] each; writing to them writes to it."""
        heads = (self.num_kv_heads, self.head_dim)
        if self.form == "split":
            keys, values = chunk.view(2, self.num_layers, self.num_tokens, *heads).unbind(0)
        else:
            keys, values = chunk.view(self.num_layers, self.num_tokens, heads[0], 2, heads[1]).unbind(3)
        return keys.transpose(1, 2), values.transpose(1, 2)


@dataclass(frozen=True)
class ChunkHeader:
    """The record before the codes of a chunk: a method's name of 24 bytes at most, and `Served.identity`, 16 bytes.

    `start` is the position of the chunk's first token in its context, or `NO_START`.
    """

    method: str
    identity: bytes
    layout: ChunkLayout
    start: int
    payload_bytes: int

    def pack(self, payload: memoryview) -> bytes:
        """The header of a payload, `SIZE` bytes; its last four are the CRC-32 of the rest and the payload."""
        x = self.layout
        kind = _MAGIC, _VERSION, _FORMS.index(x.form), _DTYPES.index(x.dtype), self.method.encode(), self.identity
        shape = x.num_layers, x.num_tokens, x.num_kv_heads, x.head_dim
        fields = _FIELDS.pack(*kind, *shape, self.start, self.payload_bytes)
        return fields + _CHECKSUM.pack(zlib.crc32(payload, zlib.crc32(fields)))

    @classmethod
    def unpack(cls, data: memoryview) -> ChunkHeader:
        """The header of a stored chunk; ChunkError for bytes of another version, truncated or damaged."""
        if len(data) < SIZE or bytes(data[: len(_MAGIC)]) != _MAGIC:
            raise ChunkError("the stored bytes are no chunk of kvcli: another serde, or none, wrote them")
        _, version, form, dtype, method, identity, *shape, start, size = _FIELDS.unpack_from(data)
        if version != _VERSION:
            raise ChunkError(f"the stored chunk has format version {version}; this kvcli reads {_VERSION}")
        if len(data) < SIZE + size:
            raise ChunkError(f"the stored chunk is truncated: {len(data)} of {SIZE + size} bytes")
        expected = zlib.crc32(data[SIZE : SIZE + size], zlib.crc32(data[: _FIELDS.size]))
        if _CHECKSUM.unpack_from(data, _FIELDS.size)[0] != expected:
            raise ChunkError("the stored chunk is damaged: its checksum does not match")
        layers, tokens, heads, head_dim = shape
        layout = ChunkLayout(_FORMS[form], layers, tokens, heads, head_dim, _DTYPES[dtype])
        return cls(method.rstrip(b"\0").decode(), identity, layout, start, size)
