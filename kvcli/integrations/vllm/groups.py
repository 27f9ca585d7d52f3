"""Chunks of a group of layers as bytes and back: as codes, or as they are."""

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvcli.contexts.chunks import Chunk
from kvcli.errors import ChunkError
from kvcli.integrations.chunks.codec import ChunkCodec
from kvcli.integrations.chunks.format import ChunkLayout
from kvcli.integrations.chunks.served import Served
from kvcli.integrations.chunks.stored import encode_each
from kvcli.integrations.vllm.slots import Group, Slots
from kvcli.progress import Say

_DIGEST_BYTES = 32


class GroupChunks:
    """Chunks of a group of full-attention layers, as codes. Slots are rows uint8 [chunks, slot bytes] on `device`.

    `config` is vLLM's OffloadingConfig; `name` gives a key of vLLM a name that no chunk has whose bytes mean something
    else. ChunkError: chunks that are no whole groups of tokens.
    """

    def __init__(self, served: Served, slots: Slots, group: Group, config: Any) -> None:
        self.tokens, self.plain_bytes = slots.chunk_tokens(group), slots.plain_bytes(group)
        self.device = served.device
        self._codec, self._slots, self._group = ChunkCodec(served, group.layers), slots, group
        layers, spec = group.layers or (), slots.spec
        self._layout = ChunkLayout(len(layers), self.tokens, spec.num_kv_heads, spec.head_dim, slots.dtype)
        self._codec.stored_bytes(self._layout)  # refuses what cannot be stored
        self._kind = f"{config.model.name} {served.label}"
        self.name = served.namer(layers=group.names, **_tokens(self.tokens, config))

    def encode(self, rows: Tensor, starts: Sequence[int] | None, names: Sequence[str], say: Say) -> list[Chunk]:
        layer = partial(self._slots.read, rows, self._group)
        return encode_each(self._codec, self._layout, layer, starts, names, self._kind, say)

    def check(self, data: Tensor) -> None:
        """ChunkError: bytes of a chunk, uint8, that are damaged."""
        self._codec.check(data, self._layout)

    def decode(self, data: Sequence[Tensor]) -> Tensor:
        """Slots of chunks that were checked."""
        rows = torch.zeros(len(data), self._slots.slot_bytes, dtype=torch.uint8, device=self.device)
        for layer_idx, (keys, values) in enumerate(self._codec.decode(data, self._layout)):
            self._slots.write(rows, self._group, layer_idx, keys, values)
        return rows


class OpaqueChunks:
    """Chunks of states and windows as they are, with a checksum; their bytes depend on vLLM's ranks and layout."""

    device = torch.device("cpu")

    def __init__(self, served: Served, slots: Slots, group: Group, config: Any) -> None:
        self.tokens, self.plain_bytes = slots.chunk_tokens(group), slots.plain_bytes(group)
        self._slots, self._group = slots, group
        self._kind = f"{config.model.name} states and windows"
        layout = {"ranks": slots.ranks, "page": slots.page_bytes, "layout": config.kv_cache_layout}
        self.name = served.namer(layers=group.names, **_tokens(self.tokens, config), **layout)

    def encode(self, rows: Tensor, starts: Sequence[int] | None, names: Sequence[str], say: Say) -> list[Chunk]:
        data = [x.numpy().tobytes() for x in self._slots.raw(rows, self._group).flatten(1)]
        sealed = [x + hashlib.sha256(x).digest() for x in data]
        return [Chunk(name, x, self._kind, self.plain_bytes) for name, x in zip(names, sealed, strict=True)]

    def check(self, data: Tensor) -> None:
        content: Any = data.numpy()
        digest = hashlib.sha256(content[:-_DIGEST_BYTES]).digest()
        if len(content) != self.plain_bytes + _DIGEST_BYTES or digest != content[-_DIGEST_BYTES:].tobytes():
            raise ChunkError("the stored chunk is damaged: its checksum does not match")

    def decode(self, data: Sequence[Tensor]) -> Tensor:
        rows = torch.zeros(len(data), self._slots.slot_bytes, dtype=torch.uint8)
        target = self._slots.raw(rows, self._group)
        target.copy_(torch.stack([x[:-_DIGEST_BYTES] for x in data]).view(target.shape))
        return rows


def _tokens(chunk: int, config: Any) -> dict[str, Any]:
    """What names of chunks depend on, beside their layers."""
    return {"tokens": [config.cache.tokens_per_hash, chunk], "dtype": config.model.dtype}
