"""The kernels of a session: launched by passes over a cache of numbers that need not be right, without the model."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from kvcli.attention.backend import AttentionBackend
from kvcli.attention.layer import attend_layer, flush_layer
from kvcli.attention.steps import begin_steps, step_capacity
from kvcli.cache.compressed import CompressedCache
from kvcli.cache.layer import CompressedLayer, NewTokens
from kvcli.cache.ranges import Ranges
from kvcli.cache.step import FlushPattern
from kvcli.kernels.compiling import compiled_not_launched
from kvcli.progress import Progress
from kvcli.seam.layer import AttentionCall, RotaryOutput

_FEW = (8, 7, 6, 5, 4, 3, 2, *[1] * 8)
_SOME = (9, 12, 16, 17, 31, 32, 33, 40, 64, 65, 100)
_PASSES = (
    (1, 70),
    (5, *_FEW, 17, 33, 70),
    (300, *_FEW, *_SOME, 1300, *_FEW, 1024, 1024, 1024, *_FEW, 257, 200, *_SOME, *_FEW),
)
"""Tokens of passes over caches, before there are codes and with them: each kind of launch is among them."""

_MOST_TOKENS, _LEAST = 2**14, 256
"""Tokens of all rows in one pass, unless a row would have fewer than the least."""


class _Unchecked(Ranges):
    """Of numbers that no kernel has written."""

    def note(self, *args: Any) -> None:
        """Notes nothing."""


@torch.inference_mode()
def warm_up(
    new_cache: Callable[[], CompressedCache],
    layers: list[tuple[torch.device, AttentionBackend]],
    dtype: torch.dtype,
    rows: int,
    progress: Progress,
    width: int | None,
    launch_modules: Callable[[int], None] = lambda rows: None,
) -> list[str]:
    """Compiles the kernels that passes over caches of so many rows launch; returns their names, one per variant.

    With a `width`, also those of steps of so many tokens per row.
    """
    with compiled_not_launched(progress) as names:
        launch_modules(rows)
        first = new_cache()
        first.passes.new_ranges = _Unchecked
        _attend(first, layers, dtype, rows, 0, 1, None)
        kinds = {_kind(layer): layer_idx for layer_idx, layer in enumerate(first.compressed)}.values()
        layers = [layers[layer_idx] for layer_idx in kinds]
        for padding in (0, 200) if rows > 1 else (0,):
            for passes in _PASSES:
                counts = [min(count, max(_LEAST, _MOST_TOKENS // rows)) for count in passes]
                cache, seen = new_cache(), 0
                cache.compressed = [cache.compressed[layer_idx] for layer_idx in kinds]
                cache.passes.num_layers, cache.passes.new_ranges = len(kinds), _Unchecked
                real = torch.ones(rows, sum(counts), dtype=torch.bool, device=layers[0][0])
                real[1:, :padding] = False
                for count in counts:
                    seen += count
                    mask = real[:, None, None, :seen] & real.new_ones(count, seen).tril(seen - count)
                    _attend(cache, layers, dtype, rows, seen - count, count, mask if padding else None)
            if cache.step_obstacle() is None:
                if width and not padding:
                    _steps(cache, layers, dtype, rows, width)
                _steps(cache, layers, dtype, rows)
    return names


def _kind(layer: CompressedLayer) -> Hashable:
    """What is the same of two layers that launch the same kernels."""
    codec, attention, store = layer.codec, layer.attention, layer.store
    assert store is not None
    parts = (store.key_codes.codes, store.value_codes.codes, *(() if store.state is None else (store.state,)))
    tensors = [*codec.buffers(), *(x for part in parts for x in part.tensors().values())]
    shapes = tuple((x.shape, x.dtype) for x in tensors)
    scores = codec.rotated, codec.offset is None, attention.soft_cap, attention.has_sinks
    return store.keys.device, type(codec.key), type(codec.value), shapes, scores


def _attend(
    cache: CompressedCache,
    layers: list[tuple[torch.device, AttentionBackend]],
    dtype: torch.dtype,
    rows: int,
    seen: int,
    count: int,
    mask: Tensor | None,
) -> None:
    """A pass of `count` new tokens per row after those `seen`, in all layers."""
    rope, spec = cache.sequences.rope, cache.spec
    positions = torch.arange(seen, seen + count, device=layers[0][0]).expand(rows, -1)
    rotary = RotaryOutput(positions, rope.rotation(positions, dtype))
    for layer, (device, backend) in zip(cache.compressed, layers, strict=True):
        query, key, value = (
            torch.zeros(rows, count, heads, width, dtype=dtype, device=device).transpose(1, 2)
            for heads, width in (
                (spec.num_heads, layer.attention.query_dim(spec.head_dim)),
                (spec.num_kv_heads, spec.head_dim),
                (spec.num_kv_heads, spec.value_dim),
            )
        )
        sinks = query.new_zeros(spec.num_heads) if layer.attention.has_sinks else None
        call = AttentionCall(layer.attention, query, NewTokens(layer, key, value), value, mask, 1.0, rotary, sinks)
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            attend_layer(call, backend)


def _steps(
    cache: CompressedCache,
    layers: list[tuple[torch.device, AttentionBackend]],
    dtype: torch.dtype,
    rows: int,
    width: int = 1,
) -> None:
    """A pass of `width` tokens with counts on the device, and what is encoded after one of the next, each kind once."""
    counts, passes = cache.sequences.counts, cache.passes
    longest, seen = max(schedule.longest for schedule in cache.method.schedules(cache.config)), cache.sequences.slots
    if width > 1:  # a pass that lays out the window
        counts.make_room(width)
        _attend(cache, layers, dtype, rows, seen, width, None)
    step = begin_steps(cache, step_capacity(counts, longest + width), (longest + 1) * width, width)
    new = (width,) * rows
    step.load(counts.append(new))
    _attend(cache, layers, dtype, rows, seen, width, None)
    patterns = set()
    for _ in range(longest):
        done = counts.append(new)
        pattern = FlushPattern.of(done)
        if done.flushes and pattern not in patterns:
            patterns.add(pattern)
            forward = passes.encoding(done if pattern is None else step.encoding(pattern))
            for layer_idx, (layer, (_, backend)) in enumerate(zip(cache.compressed, layers, strict=True)):
                flush_layer(layer.store, forward, backend, layer_idx, width)
