"""The shapes of a chunk, and the record of fixed size before its codes."""

import struct
import zlib
from dataclasses import dataclass
from typing import Self

import torch

from kvcli.errors import ChunkError

NO_START = -1
"""`start` of a method that needs no positions."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Of keys and values that can be stored."""

_MAGIC = b"KVCLICHK"
_VERSION = 1
_FIELDS = struct.Struct("<8sHxB24s16sIIIIiQ")
"""Magic, version, dtype, method, identity, layers, tokens, heads, head_dim, start, bytes of the payload."""
_CHECKSUM = struct.Struct("<I")
SIZE = _FIELDS.size + _CHECKSUM.size


@dataclass(frozen=True)
class ChunkLayout:
    """The shapes of a chunk's keys, which are those of its values."""

    num_layers: int
    num_tokens: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def plain_bytes(self) -> int:
        """Bytes of keys and values in their own dtype."""
        return 2 * self.num_layers * self.num_kv_heads * self.num_tokens * self.head_dim * self.dtype.itemsize


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
        kind = _MAGIC, _VERSION, DTYPES.index(x.dtype), self.method.encode(), self.identity
        shape = x.num_layers, x.num_tokens, x.num_kv_heads, x.head_dim
        fields = _FIELDS.pack(*kind, *shape, self.start, self.payload_bytes)
        return fields + _CHECKSUM.pack(zlib.crc32(payload, zlib.crc32(fields)))

    @classmethod
    def read(cls, data: memoryview) -> Self:
        """The header of a stored chunk; ChunkError for bytes of another version, or truncated."""
        if len(data) < SIZE or bytes(data[: len(_MAGIC)]) != _MAGIC:
            raise ChunkError("the stored bytes are no chunk of kvcli: another program wrote them")
        _, version, dtype, method, identity, *shape, start, size = _FIELDS.unpack_from(data)
        if version != _VERSION:
            raise ChunkError(f"the stored chunk has format version {version}; this kvcli reads {_VERSION}")
        if len(data) < SIZE + size:
            raise ChunkError(f"the stored chunk is truncated: {len(data)} of {SIZE + size} bytes")
        if dtype >= len(DTYPES):
            raise ChunkError("the stored chunk is damaged: its dtype is unknown")
        layers, tokens, heads, head_dim = shape
        layout = ChunkLayout(layers, tokens, heads, head_dim, DTYPES[dtype])
        return cls(method.rstrip(b"\0").decode(errors="replace"), identity, layout, start, size)

    @classmethod
    def unpack(cls, data: memoryview) -> Self:
        """The header of a stored chunk, verified; ChunkError as of `read`, or for damaged bytes."""
        header = cls.read(data)
        payload = data[SIZE : SIZE + header.payload_bytes]
        if _CHECKSUM.unpack_from(data, _FIELDS.size)[0] != zlib.crc32(payload, zlib.crc32(data[: _FIELDS.size])):
            raise ChunkError("the stored chunk is damaged: its checksum does not match")
        return header
