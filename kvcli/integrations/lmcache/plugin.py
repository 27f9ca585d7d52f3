"""The module that an adapter of LMCache's server names: importing it registers the serde `kvcli`.

    {"type": "plugin", "module_path": "kvcli.integrations.lmcache.plugin", "class_name": "FileSystemAdapter",
     "adapter_params": {"base_path": "/data/chunks"},
     "serde": {"type": "kvcli", "model": "/models/llama", "method": "kivi-2"}}

LMCache looks for no serde by entry point; an adapter of type `plugin` is what makes the server import a module.
"""

from __future__ import annotations

from typing import Any

import torch
from lmcache.v1.distributed import serde
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2Adapter, FSL2AdapterConfig
from lmcache.v1.memory_management import MemoryObj
from torch import Tensor

from kvcli.errors import ChunkError
from kvcli.integrations.chunks.codec import ChunkCodec
from kvcli.integrations.chunks.served import ChunkSettings, Served
from kvcli.integrations.lmcache.layout import chunk_layout, decode_chunk, encode_chunk


class ChunkSerializer(serde.Serializer):
    """Stores a chunk as codes."""

    def __init__(self, codec: ChunkCodec) -> None:
        self._codec = codec

    def serialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey | None = None) -> int:
        """Encodes a chunk to uint8 of `estimate_serialized_size` bytes or more, and returns that number.

        LMCache logs a ChunkError, of a chunk that cannot be stored, and counts the store as failed.
        """
        stored = encode_chunk(self._codec, _tensor(src))
        target = _tensor(dst).flatten()
        if target.dtype != torch.uint8 or target.numel() < stored.numel():
            raise ChunkError(f"a buffer of {target.numel()} {target.dtype} cannot take {stored.numel()} bytes of codes")
        target[: stored.numel()].copy_(stored)
        return stored.numel()

    def estimate_serialized_size(self, layout_desc: MemoryLayoutDesc) -> int:
        """Bytes of every chunk of a layout, exactly; ChunkError names a layout that cannot be stored."""
        return self._codec.stored_bytes(chunk_layout(layout_desc.shapes, layout_desc.dtypes, self._codec.served.spec))


class ChunkDeserializer(serde.Deserializer):
    """Decodes stored codes into a chunk."""

    def __init__(self, codec: ChunkCodec) -> None:
        self._codec = codec

    def deserialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey | None = None) -> None:
        """Decodes stored bytes into a chunk of the layout in which it was encoded.

        LMCache logs a ChunkError, as of `ChunkCodec.decode`, and counts the load as failed, so that the engine computes
        the chunk.
        """
        decode_chunk(self._codec, _tensor(src).flatten().cpu(), _tensor(dst))


class FileSystemAdapter(FSL2Adapter):
    """LMCache's own adapter of type `fs`; it does not use the server's memory, `l1_memory_desc`."""

    config_class_name = "FSL2AdapterConfig"

    def __init__(self, config: FSL2AdapterConfig, l1_memory_desc: Any = None) -> None:
        super().__init__(config)


def create_serde(values: dict[str, Any]) -> serde.SerdeProcessor:
    """The serde of an adapter, from the fields of its `serde` except `type`; errors as those of `Served.load`."""
    settings = ChunkSettings.read(values)
    codec = ChunkCodec(Served.load(settings))
    return serde.AsyncSerdeProcessor(ChunkSerializer(codec), ChunkDeserializer(codec), max_workers=settings.max_workers)


def _tensor(memory: MemoryObj) -> Tensor:
    if len(memory.get_shapes()) != 1:
        raise ChunkError(f"a chunk of {len(memory.get_shapes())} kinds of layers cannot be stored as codes")
    tensor: Tensor | None = memory.tensor
    if tensor is None:
        raise ChunkError("LMCache passed a chunk without memory")
    return tensor


serde.register_serde_factory("kvcli", create_serde)
