"""What one run of a model gave, and what a decode step of it has to read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers.cache_utils import DynamicLayer

from kvcli.cache.compressed import CompressedCache
from kvcli.cache.memory import own_bytes


@dataclass(frozen=True)
class Run:
    """One run of a model.

    Attributes:
        prefill_s: seconds of the prompt, encoding included.
        ttft_s: seconds until the first token was chosen.
        decode_s: seconds of all tokens after the first, capturing CUDA graphs included.
        cache_bytes: bytes allocated by the cache at the end.
        peak_bytes: peak of bytes allocated by torch, weights included; None on a CPU.
        reserved_bytes: peak of bytes reserved by torch, which is what a limit counts; None on a CPU.
        used_bytes: bytes of the keys and values in the cache at the end, which a step reads.
        other_bytes: bytes of them in layers that do not attend to the whole context, which no method compresses.
        how: how the tokens after the first were made.
        steady: number and seconds of steady steps; None: their rate is that of `decode_s`.
        note: why the tokens were not made faster.
    """

    prefill_s: float
    ttft_s: float
    decode_s: float
    cache_bytes: int
    peak_bytes: int | None
    reserved_bytes: int | None
    used_bytes: int = 0
    other_bytes: int = 0
    how: str = "eager"
    steady: tuple[int, float] | None = None
    note: str | None = None


def cache_bytes(cache: Any) -> int:
    """Bytes allocated by a cache."""
    if isinstance(cache, CompressedCache):
        memory = cache.memory()
        return memory.allocated_bytes + memory.other_bytes
    return own_bytes(cache.layers)


def used_bytes(cache: Any) -> int:
    """Bytes of the keys and values in a cache, coded or not: no headroom, nor positions, which all layers share."""
    if isinstance(cache, CompressedCache):
        memory = cache.memory()
        return memory.code_bytes + memory.window_bytes + memory.state_bytes + memory.other_bytes
    return cache_bytes(cache)


def other_bytes(cache: Any) -> int:
    """Bytes in the layers of a cache that do not attend to the whole context."""
    if isinstance(cache, CompressedCache):
        return cache.memory().other_bytes
    return own_bytes(layer for layer in cache.layers if type(layer) is not DynamicLayer)


def step_weights_bytes(model: Any) -> int:
    """Bytes of the weights that a decode step reads: all but the input embedding, unless it is the output layer too."""
    read = sum(weight.nbytes for weight in model.parameters())
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return read if output is embedding else read - embedding.nbytes
