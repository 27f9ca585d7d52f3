"""Which part of a chunk's tensor is which layer's keys and values.

LMCache's server has a chunk in one of two forms, told by their shapes and the model's:

    split   [2, layers, tokens, heads * head_dim]           keys, then values
    fused   [1, layers, tokens, heads * 2 * head_dim]       each head's keys and values side by side; also without the
            [layers, tokens, heads * 2 * head_dim]          first axis

A rank of tensor parallelism has some of the heads, one of pipeline parallelism some of the layers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcli.errors import ChunkError
from kvcli.integrations.chunks.codec import ChunkCodec
from kvcli.integrations.chunks.format import DTYPES, ChunkHeader, ChunkLayout
from kvcli.spec import ModelSpec


def chunk_layout(shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], spec: ModelSpec) -> ChunkLayout:
    """The layout of a chunk of a model, from shapes and dtypes of its tensors, one for each kind of layers.

    ChunkError: several kinds, another dtype, or a shape that is neither form; the message names it.
    """
    named = "; ".join(f"{list(shape)} {dtype}" for shape, dtype in zip(shapes, dtypes, strict=True))
    refused = f"chunks of the layout {named} cannot be stored as codes:"
    if len(shapes) != 1:
        raise ChunkError(f"{refused} the layers are of {len(shapes)} kinds, and kvcli knows models of one")
    if dtypes[0] not in DTYPES:
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
    return ChunkLayout(num_layers, num_tokens, heads, spec.head_dim, dtypes[0])


def keys_and_values(chunk: Tensor, spec: ModelSpec) -> tuple[ChunkLayout, Tensor, Tensor]:
    """Layout and views of a chunk's tensor, [layers, num_kv_heads, tokens, head_dim]; writing to them writes to it.

    ChunkError: as of `chunk_layout`.
    """
    x = chunk_layout([chunk.shape], [chunk.dtype], spec)
    heads = (x.num_kv_heads, x.head_dim)
    if chunk.ndim == 4 and chunk.shape[0] == 2:
        keys, values = chunk.view(2, x.num_layers, x.num_tokens, *heads).unbind(0)
    else:
        keys, values = chunk.view(x.num_layers, x.num_tokens, heads[0], 2, heads[1]).unbind(3)
    return x, keys.transpose(1, 2), values.transpose(1, 2)


def encode_chunk(codec: ChunkCodec, chunk: Tensor) -> Tensor:
    """The bytes of a chunk, uint8 on the CPU; ChunkError as of `chunk_layout` and of `ChunkCodec.encode`."""
    layout, keys, values = keys_and_values(chunk, codec.served.spec)
    return codec.encode(layout, lambda i: (keys[i : i + 1], values[i : i + 1])).stored[0]


def decode_chunk(codec: ChunkCodec, stored: Tensor, chunk: Tensor) -> ChunkHeader:
    """Decodes bytes, uint8 on the CPU, into a chunk; returns their header.

    ChunkError: as of `chunk_layout` and of `ChunkCodec.check`; the chunk is unchanged.
    """
    layout, keys, values = keys_and_values(chunk, codec.served.spec)
    header = codec.check(stored, layout)
    for layer_idx, (k, v) in enumerate(codec.decode([stored], layout)):
        keys[layer_idx], values[layer_idx] = k[0].to(keys.device), v[0].to(values.device)
    return header
