"""Passes over a cache whose counts are on the device (`kvcli.cache.step`), so that a CUDA graph of one serves for all.

A pass and the encoding of what leaves the window after it are calls of their own; both read their counts from device
tensors, so what was captured once is replayed until the codes outgrow its capacity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvcli.attention.backend import AttentionBackend
from kvcli.attention.generation import Mode
from kvcli.attention.graphs import Graphs
from kvcli.attention.layer import flush_layer
from kvcli.cache.compressed import CompressedCache
from kvcli.cache.counts import HostCounts, TokenCounts
from kvcli.cache.forward import Forward
from kvcli.cache.others import StaticStates
from kvcli.cache.step import DeviceCounts, FlushPattern
from kvcli.seam.decoder import backbone
from kvcli.seam.versions import with_cache

_HEADROOM = 1024
"""Fewest tokens by which the capacity of a captured step exceeds what a row holds."""


def step_capacity(counts: TokenCounts, left: int) -> int:
    """Tokens of a row that steps can attend to as codes, where `left` are to come."""
    longest, group = max(counts.attended), counts.tokens_per_group
    return -(-(longest + min(left, max(_HEADROOM, longest // 8))) // group) * group


def begin_steps(cache: CompressedCache, capacity: int, left: int, width: int = 1) -> DeviceCounts:
    """Makes room for `left` more tokens per row, `capacity` of all as codes; the next passes count on the device.

    They have `width` tokens per row, for which the window has room (`TokenCounts.make_room`).
    """
    sequences, ring = cache.sequences, cache.sequences.counts.layout.ring
    sequences.extend(left + ring)
    for layer in cache.compressed:
        for codes in (layer.store.key_codes, layer.store.value_codes):
            codes.reserve(capacity + ring)  # tokens can be encoded before they leave the window
    cache.passes.step = DeviceCounts(sequences, capacity, len(cache.compressed), width)
    return cache.passes.step


class Steps:
    """Steps of `width` tokens per row over one cache.

    Args:
        mode: `graphs`, or `steps`, the same without capturing them.
        device: of the model.

    Attributes:
        counts: those of the next pass, on the device; None before the first.
        graphs: of the passes.
    """

    def __init__(
        self, cache: CompressedCache, backends: list[AttentionBackend], mode: Mode, device: torch.device, width: int = 1
    ) -> None:
        self.cache, self.backends, self.width, self._mode = cache, backends, width, mode
        self.counts: DeviceCounts | None = None
        self._states = StaticStates(())
        self.graphs = Graphs(device, mode == "graphs")

    @property
    def mode(self) -> Mode:
        """`steps` once capturing has failed."""
        return "steps" if self._mode == "graphs" and not self.graphs.enabled else self._mode

    def prepare(self, left: int) -> None:
        """Makes room in all buffers where the next step needs it, of `left` tokens per row to come."""
        counts = self.cache.sequences.counts
        if self.counts is None or max(counts.attended) > self.counts.max_codes:
            if self.counts is not None:
                self.check_ranges()
            self.graphs.clear()
            self.counts = begin_steps(self.cache, step_capacity(counts, left), left, self.width)
            self._states = StaticStates(self.cache.other_layers)

    def append(self) -> HostCounts:
        """Counts `width` more tokens per row, on the host and, after `prepare`, on the device."""
        assert self.counts is not None
        counts = self.cache.sequences.counts
        new = counts.append((self.width,) * len(counts.lengths))
        self.counts.load(new)
        return new

    def encode(self, new: HostCounts) -> None:
        """Encodes what counts of the host say, after the pass."""
        passes, pattern, counts = self.cache.passes, FlushPattern.of(new), self.counts
        assert counts is not None
        if pattern is None:  # rows encode different numbers of tokens
            self._flush(passes.encoding(new))
        else:
            self.graphs.call(pattern, lambda: self._flush(passes.encoding(counts.encoding(pattern))))

    def _flush(self, forward: Forward) -> None:
        for layer_idx, (layer, backend) in enumerate(zip(self.cache.compressed, self.backends, strict=True)):
            flush_layer(layer.store, forward, backend, layer_idx, self.width)

    def run(self, function: Callable[[], None]) -> None:
        """Calls or replays a pass of tensors on the device, as `Graphs.call`."""

        def settled() -> None:
            function()
            self._states.settle()

        self.graphs.call("pass", settled)
        self._states.advance()

    def check_ranges(self) -> None:
        """Raises CacheError where what was encoded in steps is beyond what codes hold; the cache refuses to go on."""
        assert self.counts is not None
        with self.cache.passes.complete_or_refused():
            self.counts.ranges.check()

    def end(self, made: int) -> None:
        """Hands the cache, to which steps have added so many tokens per row, back to ordinary passes."""
        if self.counts is None:
            return
        self.cache.passes.step = None
        self.cache.sequences.append_slots(made)
        self.graphs.clear()
        try:
            self.check_ranges()
        finally:
            self.counts = None


_LEAST_PASSES = 4
"""Passes for which capturing a graph pays."""


class Chunks:
    """Reads tokens into one cache without padding, `width` per row in each forward pass, until `left` are read.

    Once every row holds codes, and as long as chunks have `width` tokens, passes count on the device.

    Args:
        mode: `graphs`, `steps`, which are the same without capturing them, or `passes`.

    Attributes:
        left: tokens to come.
        mode: how the last pass was made.
    """

    def __init__(
        self, model: Any, cache: CompressedCache, backends: list[AttentionBackend], width: int, left: int, mode: Mode
    ) -> None:
        self.model, self.cache, self.width, self.left = model, cache, width, left
        few = all(width < backend.prefill_threshold for backend in backends)
        self._pays = mode != "passes" and few and left >= _LEAST_PASSES * width
        self._steps, self._made, self._has_room = Steps(cache, backends, mode, model.device, width), 0, False
        self._mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=model.device)
        self._ids = self._states = torch.empty(0)
        self.mode: Mode = "passes"

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> Tensor:
        """Reads tokens, int64 [batch, time]; returns their last hidden states, which the next call overwrites."""
        counts = self.cache.sequences.counts
        fits = ids.shape == (len(counts.lengths), self.width)  # an ordinary pass says what is wrong with another batch
        if self._has_room and fits and self.left >= self.width and self.cache.can_step:
            states = self._step(ids)
        else:
            self.close()
            if self._pays:
                counts.make_room(self.width)
            states = self._run(ids)
            self._has_room, self.mode = self._pays, "passes"
        self.left -= ids.shape[1]
        return states

    def _run(self, ids: Tensor, **inputs: Tensor) -> Tensor:
        states: Tensor = backbone(self.model)(ids, **inputs, **with_cache(self.cache))[0]
        return states

    def _step(self, ids: Tensor) -> Tensor:
        steps = self._steps
        if self._ids.shape != ids.shape:
            self._ids = torch.empty_like(ids, memory_format=torch.contiguous_format)
        self._ids.copy_(ids)
        steps.prepare(self.left)
        with self.cache.passes.complete_or_refused():
            new = steps.append()
            steps.run(self._captured)
            self._made += self.width
            if new.flushes:
                steps.encode(new)
        self.mode = steps.mode
        return self._states

    def _captured(self) -> None:
        step: Any = self._steps.counts
        states = self._run(self._ids, position_ids=step.positions(), attention_mask=self._mask)
        if self._states.shape != states.shape:
            self._states = torch.empty_like(states)
        self._states.copy_(states)

    def close(self) -> None:
        """Hands the cache back to ordinary passes."""
        self._steps.end(self._made)
        self._made, self._has_room = 0, False
        self.cache.sequences.counts.make_room(1)
