"""Chunks of random numbers, and models that code and decode them."""

from typing import Any

import torch
from factories import make_model, make_spec
from torch import Tensor
from transformers import DynamicCache

from kvcli.integrations.chunks.codec import ChunkCodec
from kvcli.integrations.chunks.format import ChunkLayout
from kvcli.integrations.chunks.served import Served
from kvcli.integrations.lmcache.layout import chunk_layout, decode_chunk
from kvcli.registry import make_config, parse_method
from kvcli.rope import Rope
from kvcli.seam.versions import with_cache
from kvcli.spec import ModelSpec

SPEC = make_spec()
CHUNK = [2, 1, 64, 32]
"""A chunk of the model of `SPEC`: 1 layer, 64 tokens, 2 kv heads of 16 channels."""


def served(spec: ModelSpec = SPEC, method: str = "kivi-2", exact_tokens: int = 1, **settings: Any) -> Served:
    """A model of these shapes and a method that needs no artifact."""
    record, from_bits = parse_method(method)
    config = make_config(record.name, {**from_bits, **settings})
    rotary = make_model("llama", head_dim=spec.head_dim).model.rotary_emb
    return Served(spec, Rope(rotary), record, config, exact_tokens=exact_tokens)


def random_chunk(shape: list[int], dtype: torch.dtype = torch.float16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def decoded(codec: ChunkCodec, stored: Tensor, like: Tensor) -> Tensor:
    chunk = torch.full_like(like, float("nan"))
    decode_chunk(codec, stored, chunk)
    return chunk


def stored_bytes(codec: ChunkCodec, shape: list[int] | torch.Size, dtype: torch.dtype = torch.float16) -> int:
    return codec.stored_bytes(chunk_layout([shape], [dtype], codec.served.spec))


def cached_chunks(model: Any, length: int, num_tokens: int = 512) -> list[tuple[Tensor, Tensor]]:
    """Chunks of a model's cache, keys and values of [layers, num_kv_heads, length, head_dim] each."""
    cache = DynamicCache()
    tokens = torch.randint(3, 97, (1, num_tokens), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        model(tokens, **with_cache(cache))
    keys, values = (torch.cat([getattr(x, name) for x in cache.layers]) for name in ("keys", "values"))
    return list(zip(keys.split(length, 2), values.split(length, 2), strict=True))


def real_chunks(model: Any, length: int, num_tokens: int = 512) -> list[Tensor]:
    """A model's cache as a server of LMCache gets it, in chunks."""
    chunks = [torch.stack(both).transpose(2, 3).flatten(3) for both in cached_chunks(model, length, num_tokens)]
    return [x.clone(memory_format=torch.contiguous_format) for x in chunks]


def coded(served: Served, chunks: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """What `cached_chunks` are after codes, by the codecs alone."""
    codec, out = ChunkCodec(served), []
    for i, (keys, values) in enumerate(chunks):
        layers, heads, length, head_dim = keys.shape
        layout = ChunkLayout(layers, length, heads, head_dim, keys.dtype)
        pairs = [(keys[layer].unsqueeze(0), values[layer].unsqueeze(0)) for layer in range(layers)]
        decoded = list(codec.decode(list(codec.encode(layout, pairs.__getitem__, [i * length]).stored), layout))
        out.append((torch.cat([k for k, _ in decoded]), torch.cat([v for _, v in decoded])))
    return out


def equal(first: list[tuple[Tensor, Tensor]], second: list[tuple[Tensor, Tensor]]) -> bool:
    """Whether keys and values of chunks are bitwise equal."""
    return all(torch.equal(a, b) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True))
