"""One run of a whole model with a method's cache: prompt in chunks, greedy decoding, times and peak memory.

The fp16 baseline is the model as transformers runs it: SDPA and `DynamicCache`, nothing attached;
`kvcli.bench.fixed_length` has a faster way of decoding with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from kvcli.attention.backend import AttentionBackend
from kvcli.attention.layer import attend_layer
from kvcli.attention.next_token import SamplingConfig
from kvcli.attention.session import Session
from kvcli.bench.decode import (
    COMPILED,
    Decoded,
    DecodeMode,
    StepClock,
    decode_uncompressed,
    round_tokens,
    synchronized_time,
)
from kvcli.bench.layer import MethodCase, randomize_
from kvcli.bench.run import Run, cache_bytes, other_bytes, used_bytes
from kvcli.bench.shapes import shape_config
from kvcli.cache.compressed import CompressedCache
from kvcli.cache.layer import NewTokens
from kvcli.errors import UnsupportedModelError
from kvcli.methods.layer_codec import EncodedTokens, LayerCodec, PartialAttention
from kvcli.seam.layer import AttentionCall, RotaryOutput
from kvcli.seam.probe import probe
from kvcli.spec import ModelSpec

_SHORTEST_CHUNK = 16


def random_model(shape: str, num_layers: int | None, device: torch.device, dtype: torch.dtype, seed: int) -> Any:
    """A model of a shape with random weights, allocated on its device.

    Args:
        shape: one of `kvcli.bench.shapes.SHAPES`.
        num_layers: number of layers; None: the shape's own.
        device: where.
        dtype: of the weights.
        seed: of the weights.

    Returns:
        A transformers causal language model in eval mode.

    Raises:
        UsageError: no such shape.
    """
    config = shape_config(shape, num_layers)
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config).to(dtype)
    model.to_empty(device=device)
    model.tie_weights()
    # the rotary buffers were created on the meta device, without values
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
def attached(model: Any, case: MethodCase, impl: str, seed: int) -> Iterator[Session | None]:
    """Attaches a method with random codebooks to a model, inside the block.

    Args:
        model: a causal language model, detached.
        case: the method; the baseline leaves the model as it is.
        impl: as in `kvcli.attach`.
        seed: of the codebooks.

    Yields:
        The session; None for the baseline.

    Raises:
        UsageError: an implementation that cannot run.
        ConfigError: settings that do not fit the model.
    """
    if case.is_baseline:
        yield None
        return
    with open_session(model, case, impl, seed) as session:
        yield session


def open_session(model: Any, case: MethodCase, impl: str, seed: int) -> Session:
    """Attaches a method with random codebooks to a model, the baseline too; as `attached` otherwise."""
    spec = probe(model).spec
    generator = torch.Generator(model.device).manual_seed(seed)
    codecs = [case.build(spec, layer_idx).to(model.device) for layer_idx in range(spec.num_layers)]
    for codec in codecs:
        randomize_(codec, generator)
    return Session(model, spec, case.method, case.config, codecs, impl)


def new_cache(model: Any, session: Session | None) -> Any:
    """An empty cache of a session, or of transformers."""
    return DynamicCache(config=model.config) if session is None else session.new_cache()


@torch.inference_mode()
def run_model(
    model: Any,
    session: Session | None,
    ids: Tensor,
    new_tokens: int,
    chunk: int | None,
    *,
    fill_middle: bool = False,
    decode: DecodeMode = "auto",
    backend: str | None = None,
) -> Run:
    """Reads a prompt and continues it greedily: `Session.generate`, or transformers' own passes.

    Args:
        model: a causal language model.
        session: of the method that is attached to it; None: the model with `DynamicCache`.
        ids: prompt, int64 [batch, time].
        new_tokens: tokens chosen; 0 reads the prompt only.
        chunk: tokens of the whole batch per forward pass of the prompt; None: all.
        fill_middle: whether the model computes only the first and the last chunk of the prompt, where the peak is, and
            the cache is filled with random keys and values between them.
        decode: how tokens are made with a compressed cache.
        backend: of `torch.compile`, which compiles the layers for its steps; None: they run as they are.

    Returns:
        Times and memory. With `fill_middle`, the times of the prompt and of the first token mean nothing.
    """
    device = ids.device
    reset_peak_memory(device)
    cache = new_cache(model, session)
    started = synchronized_time(device)
    length = chunk_length(chunk, *ids.shape)
    middle = max(0, ids.shape[1] - 2 * length) if fill_middle else 0
    if middle:
        prefill(model, cache, ids[:, :length], chunk)
        fill(model, cache, session, ids.shape[0], middle, chunk)
    if session is None or not new_tokens:
        logits = prefill(model, cache, ids[:, cache.get_seq_length() :], chunk)
        prefilled = synchronized_time(device)
        decoded = decode_uncompressed(model, cache, logits, new_tokens)
    else:
        prefilled, decoded = _generate(session, cache, ids, new_tokens, length, decode, backend)
    return Run(
        prefilled - started,
        decoded.first - started,
        decoded.ended - decoded.first,
        cache_bytes(cache),
        *peak_memory(device),
        used_bytes(cache),
        other_bytes(cache),
        decoded.how,
        decoded.steady,
        decoded.note,
    )


def _generate(
    session: Session,
    cache: CompressedCache,
    ids: Tensor,
    new_tokens: int,
    chunk: int,
    decode: DecodeMode,
    backend: str | None,
) -> tuple[float, Decoded]:
    """Continues a prompt; returns when it was read, and when tokens were known."""
    clock, read = StepClock(cache, round_tokens(session.method, session.config)), [0.0]
    generated = session.generate(
        ids,
        sampling=SamplingConfig(new_tokens),
        past_key_values=cache,
        eos_token_id=[],
        prefill_chunk=chunk,
        on_prefill=lambda count: read.append(synchronized_time(ids.device)),
        on_tokens=clock,
        mode=None if decode == "auto" else decode,
        compile_layers=backend or False,
    )
    ended, how = synchronized_time(ids.device), generated.mode + COMPILED * generated.compiled
    return read[-1], Decoded(clock.first, ended, how, clock.steady(generated.mode != "passes"), generated.note)


def prefill(model: Any, cache: Any, ids: Tensor, chunk: int | None) -> Tensor:
    """Reads a prompt [batch, time] in chunks; returns the logits of its last token, [batch, 1, vocab_size]."""
    for part in ids.split(chunk_length(chunk, *ids.shape), dim=1):
        logits: Tensor = model(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    return logits


def chunk_length(chunk: int | None, batch: int, length: int) -> int:
    """Tokens per sequence in a forward pass of the prompt."""
    return length if chunk is None else min(length, max(_SHORTEST_CHUNK, chunk // batch))


def fill(model: Any, cache: Any, session: Session | None, batch: int, count: int, chunk: int | None) -> None:
    """Appends `count` random tokens per sequence to a cache without running the model.

    The cache appends, encodes and allocates as it does in a prefill, without the model's layers and attention.

    Args:
        model: whose cache it is.
        cache: holds the beginning of the prompt.
        session: of the method that is attached; None: the model as it is.
        batch: sequences.
        count: tokens to append per sequence.
        chunk: tokens of the whole batch that are appended at once; None: all.

    Raises:
        UnsupportedModelError: layers of other kinds, whose own caches cannot be filled.
    """
    spec = probe(model).spec
    if spec.other_layers:
        raise UnsupportedModelError(
            f"{spec.other_layers} of {spec.model_layers} layers keep transformers' own cache, which cannot be "
            "filled with random keys and values; let the prompt be computed"
        )
    length = chunk_length(chunk, batch, count)
    for start in range(0, count, length):
        new = min(length, count - start)
        key, value = (
            torch.randn(batch, spec.num_kv_heads, new, width, device=model.device, dtype=model.dtype)
            for width in (spec.head_dim, spec.value_dim)
        )
        if session is not None:
            _fill_compressed(cache, session.backend, key, value, spec)
            continue
        for layer_idx in range(spec.num_layers):
            cache.update(key, value, layer_idx)


def _fill_compressed(
    cache: CompressedCache, backend: AttentionBackend, key: Tensor, value: Tensor, spec: ModelSpec
) -> None:
    """Appends the same keys and values [batch, num_kv_heads, time, head_dim] to all layers, attention left out."""
    batch, _, new, head_dim = key.shape
    sequences = cache.sequences
    positions = torch.arange(sequences.slots, sequences.slots + new, device=key.device).unsqueeze(0)
    rotary = RotaryOutput(positions, sequences.rope.rotation(positions, key.dtype))
    query = key.new_zeros(batch, spec.num_heads, new, head_dim)
    backend = replace(
        backend,
        attend_codes=_no_codes,
        attend_decoded=_no_codes,
        attend_window=lambda query, *window: query.transpose(1, 2),
        attend_new=None,
    )
    for layer in cache.compressed:
        attend_layer(
            AttentionCall(layer.attention, query, NewTokens(layer, key, value), value, None, 1.0, rotary), backend
        )


def _no_codes(codec: LayerCodec, query: Tensor, encoded: EncodedTokens, scaling: float) -> PartialAttention:
    """Stands in for attention over codes while a cache is filled."""
    return query, query[..., 0]


def reset_peak_memory(device: torch.device) -> None:
    """Resets the counters that `peak_memory` reads."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> tuple[int | None, int | None]:
    """Peaks of the bytes that torch allocated and reserved on a GPU; None on a CPU."""
    if device.type != "cuda":
        return None, None
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)


def random_prompt(spec: ModelSpec, batch: int, length: int, device: torch.device, seed: int) -> Tensor:
    """Random token ids, int64 [batch, length]."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(3, spec.vocab_size, (batch, length), device=device, generator=generator)
