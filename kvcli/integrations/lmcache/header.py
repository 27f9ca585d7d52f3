"""The fixed record before the codes of a chunk: what they are, and a checksum of it all."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import get_args

from kvcli.errors import ChunkError
from kvcli.integrations.lmcache.layout import DTYPES, ChunkLayout, Form

MAGIC = b"KVCLICHK"
VERSION = 1
NO_START = -1
"""`start` of a method that needs no positions."""

_FORMS: tuple[Form, ...] = get_args(Form)
_FIELDS = struct.Struct("<8sHBB24s16sIIIIiQ")
"""Magic, version, form, dtype, method, identity, layers, tokens, heads, head_dim, start, bytes of the payload."""
_CHECKSUM = struct.Struct("<I")
SIZE = _FIELDS.size + _CHECKSUM.size


@dataclass(frozen=True)
class ChunkHeader:
    """What the codes of a chunk are.

    Attributes:
        method: its name, 24 bytes at most.
        identity: 16 bytes, a digest of everything that the codes depend on (`Served.identity`).
        layout: of the chunk that was encoded.
        start: position of the chunk's first token in its context, or `NO_START`.
        payload_bytes: bytes after the header.
    """

    method: str
    identity: bytes
    layout: ChunkLayout
    start: int
    payload_bytes: int

    def pack(self, payload: memoryview) -> bytes:
        """The header of a payload, `SIZE` bytes; its last four are the CRC-32 of the rest and the payload."""
        layout = self.layout
        fields = _FIELDS.pack(
            MAGIC,
            VERSION,
            _FORMS.index(layout.form),
            DTYPES.index(layout.dtype),
            self.method.encode(),
            self.identity,
            layout.num_layers,
            layout.num_tokens,
            layout.num_kv_heads,
            layout.head_dim,
            self.start,
            self.payload_bytes,
        )
        return fields + _CHECKSUM.pack(zlib.crc32(payload, zlib.crc32(fields)))

    @classmethod
    def unpack(cls, data: memoryview) -> ChunkHeader:
        """The header of stored bytes, whose checksum is verified.

        Args:
            data: all bytes of a stored chunk, and possibly more after them.

        Raises:
            ChunkError: bytes that are no chunk of this version, truncated or damaged.
        """
        if len(data) < SIZE or bytes(data[: len(MAGIC)]) != MAGIC:
            raise ChunkError("the stored bytes are no chunk of kvcli: another serde, or none, wrote them")
        _, version, form, dtype, method, identity, layers, tokens, heads, head_dim, start, size = _FIELDS.unpack_from(
            data
        )
        if version != VERSION:
            raise ChunkError(f"the stored chunk has format version {version}; this kvcli reads {VERSION}")
        if len(data) < SIZE + size:
            raise ChunkError(f"the stored chunk is truncated: {len(data)} of {SIZE + size} bytes")
        expected = zlib.crc32(data[SIZE : SIZE + size], zlib.crc32(data[: _FIELDS.size]))
        if _CHECKSUM.unpack_from(data, _FIELDS.size)[0] != expected:
            raise ChunkError("the stored chunk is damaged: its checksum does not match")
        layout = ChunkLayout(_FORMS[form], layers, tokens, heads, head_dim, DTYPES[dtype])
        return cls(method.rstrip(b"\0").decode(), identity, layout, start, size)
