"""Passes over a cache whose counts are on the device (`kvcli.cache.step`), so that a CUDA graph of one serves for all.

A pass and the encoding of what leaves the window after it are calls of their own; both read their counts from device
tensors, so what was captured once is replayed until the codes outgrow its capacity.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvcli.attention.backend import AttentionBackend
from kvcli.attention.generation import Mode
from kvcli.attention.graphs import Graphs
from kvcli.attention.layer import flush_layer
from kvcli.cache.compressed import CompressedCache
from kvcli.cache.counts import HostCounts, TokenCounts
from kvcli.cache.forward import Forward
from kvcli.cache.others import StaticStates
from kvcli.cache.step import DeviceCounts, FlushPattern

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
