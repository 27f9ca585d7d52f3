"""Running whole models with each method's cache: random weights, prompts in chunks, greedy steps, times and peaks.

The fp16 baseline is the model as transformers runs it: SDPA and `DynamicCache`, nothing attached.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

from kvcli.attention.forward import ForwardPass
from kvcli.attention.layer import attend_layer
from kvcli.attention.session import Session, attend_forms
from kvcli.bench.layer import Subject, randomise
from kvcli.bench.shapes import shape_config
from kvcli.cache.compressed import CompressedCache
from kvcli.spec import ModelSpec

NewCache = Callable[[], Any]
_SHORTEST_CHUNK = 16


def random_model(shape: str, num_layers: int | None, device: torch.device, dtype: torch.dtype, seed: int) -> Any:
    """A model of a shape with random weights, made on its device.

    Args:
        shape: one of `kvcli.bench.shapes.SHAPES`.
        num_layers: another depth than the model's own.
        device: where.
        dtype: of the weights.
        seed: of the weights.

    Raises:
        UsageError: no such shape.
    """
    config = shape_config(shape, num_layers)
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config).to(dtype)
    model.to_empty(device=device)
    model.tie_weights()
    # its angles were computed on the meta device, that is not at all
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.fill_(1.0)
            else:
                weight.normal_(0.0, 0.02, generator=generator)
    return model.eval()


@contextmanager
def opened(model: Any, subject: Subject, impl: str, seed: int) -> Iterator[NewCache]:
    """Attaches a method with random codebooks to a model, inside the block; gives what makes its caches.

    Raises:
        UsageError: a form of attention that the method does not have.
        ConfigError: settings that do not fit the model.
    """
    if subject.is_baseline:
        yield lambda: DynamicCache(config=model.config)
        return
    spec = ModelSpec.from_config(model.config)
    generator = torch.Generator(model.device).manual_seed(seed)
    codecs = [subject.build(spec, layer_idx).to(model.device) for layer_idx in range(spec.num_layers)]
    for codec in codecs:
        randomise(codec, generator)
    with Session(model, spec, subject.method, subject.config, codecs, impl) as session:
        yield session.new_cache


@dataclass(frozen=True)
class Run:
    """One run of a model.

    Attributes:
        prefill_s: seconds of the prompt, encoding included.
        ttft_s: seconds until the first token was chosen.
        decode_s: seconds of all tokens after the first.
        cache_bytes: what the cache had allocated at the end.
        peak_bytes: most that torch had allocated, weights included; None on a CPU.
        reserved_bytes: most that torch had taken from the GPU, which is what a limit counts.
    """

    prefill_s: float
    ttft_s: float
    decode_s: float
    cache_bytes: int
    peak_bytes: int | None
    reserved_bytes: int | None


def run_model(model: Any, new_cache: NewCache, ids: Tensor, new_tokens: int, chunk: int | None) -> Run:
    """Reads a prompt and continues it greedily.

    Args:
        model: a causal language model, attached or not.
        new_cache: makes its cache.
        ids: prompt, int64 [batch, time].
        new_tokens: tokens chosen; 0 reads the prompt only.
        chunk: tokens of the whole batch that are read at once; None: all.
    """
    reset_peak_memory(ids.device)
    with torch.inference_mode():
        cache = new_cache()
        started = _now(ids.device)
        logits = prefill(model, cache, ids, chunk)
        prefilled = _now(ids.device)
        token = logits.argmax(-1)
        first = _now(ids.device)
        for _ in range(new_tokens - 1):
            token = step(model, cache, token)
        ended = _now(ids.device)
    return Run(
        prefilled - started,
        first - started,
        ended - first,
        cache_bytes(cache),
        *peak_memory(ids.device),
    )


def prefill(model: Any, cache: Any, ids: Tensor, chunk: int | None) -> Tensor:
    """Reads a prompt [batch, time]; the logits of its last token, [batch, 1, vocab_size]."""
    for part in ids.split(chunk_length(chunk, *ids.shape), dim=1):
        logits: Tensor = model(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    return logits


def step(model: Any, cache: Any, token: Tensor) -> Tensor:
    """The most probable successor of a token, both [batch, 1]."""
    logits: Tensor = model(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    return logits.argmax(-1)


def chunk_length(chunk: int | None, batch: int, length: int) -> int:
    """Tokens of each sequence that are read at once."""
    return length if chunk is None else min(length, max(_SHORTEST_CHUNK, chunk // batch))


def fill(model: Any, cache: Any, batch: int, count: int, chunk: int | None) -> None:
    """Gives a cache `count` more random tokens a sequence without running the model.

    The cache appends, encodes and allocates as it does in a prefill; only the model's layers and the attention over
    what is held are left out.

    Args:
        model: whose cache it is.
        cache: holds the beginning of the prompt.
        batch: sequences.
        count: tokens to add.
        chunk: tokens of the whole batch that are added at once; None: all.
    """
    spec = ModelSpec.from_config(model.config)
    length = chunk_length(chunk, batch, count)
    with torch.inference_mode():
        for start in range(0, count, length):
            new = min(length, count - start)
            shape = (batch, spec.num_kv_heads, new, spec.head_dim)
            key, value = (torch.randn(shape, device=model.device, dtype=model.dtype) for _ in range(2))
            if isinstance(cache, CompressedCache):
                _fill_compressed(cache, key, value, spec)
                continue
            for layer_idx in range(spec.num_layers):
                cache.update(key, value, layer_idx)


def _fill_compressed(cache: CompressedCache, key: Tensor, value: Tensor, spec: ModelSpec) -> None:
    """Takes the same new keys and values [batch, num_kv_heads, time, head_dim] into all layers."""
    batch, _, new, head_dim = key.shape
    timeline = cache.timeline
    positions = torch.arange(timeline.slots, timeline.slots + new, device=key.device).unsqueeze(0)
    now = ForwardPass(
        timeline,
        timeline.begin(batch, new, positions, None),
        timeline.rope.rotation(positions, key.dtype),
        None,
    )
    query = key.new_zeros(batch, spec.num_heads, new, head_dim)
    impl = "fused" if cache.layers[0].codec.key.fused else "reference"
    forms = replace(
        attend_forms(cache.method, impl),
        codes=lambda codec, query, part, scaling: (query, query[..., 0]),
        exact=lambda query, key, value, visible, scaling, encoded: query.transpose(1, 2),
    )
    for layer in cache.layers:
        layer.update(key, value)
        attend_layer(layer, query, now, forms, 1.0)


def cache_bytes(cache: Any) -> int:
    """Bytes that a cache has allocated."""
    if isinstance(cache, CompressedCache):
        return cache.memory().allocated_bytes
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers if layer.keys is not None)


def reset_peak_memory(device: torch.device) -> None:
    """Begins to count anew what `peak_memory` tells."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> tuple[int | None, int | None]:
    """Most bytes that torch had allocated, and had taken from the GPU; None on a CPU."""
    if device.type != "cuda":
        return None, None
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)


def random_prompt(spec: ModelSpec, batch: int, length: int, device: torch.device, seed: int) -> Tensor:
    """Random token ids, int64 [batch, length]."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(3, spec.vocab_size, (batch, length), device=device, generator=generator)


def _now(device: torch.device) -> float:
    """Seconds, after all that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
