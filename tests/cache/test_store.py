"""What the cache stores, when it encodes, and that its bytes are what it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvcli
from kvcli.cache.counts import Counts, TokenCounts
from kvcli.cache.forward import Forward
from kvcli.cache.store import LayerStore
from kvcli.cache.window import WindowTokens
from kvcli.methods.fp16 import METHOD as FP16
from kvcli.methods.schedule import Schedule
from kvcli.spec import ModelSpec, RopeSpec

SPEC = ModelSpec("llama", 1, 64, 4, 2, 16, 512, 97, RopeSpec("default", 1e4, 16))


class Feeder:
    """Feeds a store with random tokens as its counts say, and remembers all of them, row by row."""

    def __init__(self, schedule: Schedule, sink_length: int, batch: int) -> None:
        self.stores: list[LayerStore] = []
        self.counts = TokenCounts(schedule, sink_length)
        self.history = [torch.zeros(2, 0, 16) for _ in range(batch)]
        self.generator = torch.Generator().manual_seed(0)

    @property
    def store(self) -> LayerStore:
        return self.stores[0]

    def feed(self, counts: list[int]) -> None:
        new = torch.randn(len(counts), 2, max(counts), 16, generator=self.generator)
        real = torch.arange(max(counts)) >= max(counts) - torch.tensor(counts).unsqueeze(1)
        plan = self.counts.append(tuple(counts))
        before = tuple(h.shape[1] for h in self.history)
        padding = None if real.all() else real
        forward = Forward(None, None, before, tuple(counts), padding, torch.zeros(real.shape), plan, plan)  # type: ignore[arg-type]
        if not self.stores:
            self.stores.append(LayerStore(FP16.build(SPEC, None, 0).key, self.counts.sink_length, new, plan))
        self.store.reserve(plan)
        if forward.ragged:
            self.store.append(new, plan, forward)
        else:
            self.store.next_slots(plan, new.shape[2]).copy_(new)
        self.history = [torch.cat((h, forward.new_tokens(new, row)), dim=1) for row, h in enumerate(self.history)]
        self.check(plan.window, plan.coded)
        self.store.encode(plan)
        self.store.evict(plan)
        self.check(plan.window_after, self.counts.coded)

    def check(self, window: Counts, coded: Counts) -> None:
        """Every token is held once, in order: sinks, codes, residual window."""
        store = self.store
        assert store.window.shape[2] == store.layout.capacity
        tokens = WindowTokens(store.window, max(window), store.sink_length, store.layout.gap).joined()
        for row, history in enumerate(self.history):
            sinks = min(store.sink_length, history.shape[1])
            codes = store.codec.decode(store.codes.codes)[row, :, : coded[row]]
            held = tokens[row, :, : window[row]]
            assert torch.equal(torch.cat((held[:, :sinks], codes, held[:, sinks:]), dim=1), history)


@pytest.mark.parametrize("sink_length", [0, 3])
@pytest.mark.parametrize(
    "schedule", [Schedule(8, 1), Schedule(16, 1), Schedule(0, 1), Schedule(8, 4), Schedule(0, 8, 8)]
)
def test_every_token_is_kept_once_in_order(schedule: Schedule, sink_length: int) -> None:
    feeder = Feeder(schedule, sink_length, 3)
    for counts in ([5, 1, 30], [1, 1, 1], [40, 7, 2], *[[1, 1, 1]] * 12, [3, 3, 3]):
        feeder.feed(counts)
        for row, history in enumerate(feeder.history):
            window = max(0, history.shape[1] - sink_length) - feeder.counts.coded[row]
            assert window < schedule.keep + max(schedule.block, schedule.multiple_of)
            assert window >= min(schedule.keep, max(0, history.shape[1] - sink_length))
            assert feeder.counts.coded[row] % schedule.multiple_of == 0


@pytest.mark.parametrize("sink_length", [0, 3])
def test_a_window_that_moves_leaves_a_gap_and_closes_it_now_and_then(sink_length: int) -> None:
    feeder, gaps = Feeder(Schedule(16, 1), sink_length, 2), []
    for counts in ([50, 50], *[[1, 1]] * 12, [2, 2], [1, 1], [1, 3], [1, 1], [30, 30], *[[1, 1]] * 6):
        feeder.feed(counts)
        gaps.append(feeder.store.layout.gap)
    assert gaps == [0, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 2, 3, 0, 1, 0, 1, 2, 3, 4, 1, 2]


def test_rows_that_end_up_equal_keep_apart_what_they_encoded() -> None:
    feeder = Feeder(Schedule(4, 4), 0, 2)
    for counts in ([9, 2], [1, 8], [1, 1], [1, 1]):
        feeder.feed(counts)


def test_decoding_does_not_reallocate_every_step() -> None:
    feeder = Feeder(Schedule(4, 1), 2, 1)
    feeder.feed([50])
    pointers = set()
    for _ in range(200):
        feeder.feed([1])
        pointers.add(feeder.store.codes.codes.tensors()["x"].data_ptr())
        assert feeder.store.window.shape[2] <= 7
    assert len(pointers) <= 2


def test_a_long_prompt_does_not_stay_in_full_precision() -> None:
    feeder = Feeder(Schedule(8, 1), 2, 1)
    feeder.feed([500])
    assert feeder.store.window.shape[2] <= 2 * 11


def test_truncate_takes_window_tokens_first_then_codes() -> None:
    feeder = Feeder(Schedule(4, 1), 2, 1)
    feeder.feed([20])
    counts = feeder.counts
    for removed, coded, window in ((3, 14, 3), (5, 10, 2), (11, 0, 1)):
        counts.truncate([removed])
        feeder.history = [feeder.history[0][:, :-removed]]
        assert (counts.coded, counts.window) == ((coded,), (window,))
        feeder.check(counts.window, counts.coded)
    feeder.feed([9])


def test_sinks_that_were_removed_come_back_before_the_gap() -> None:
    feeder = Feeder(Schedule(4, 1), 2, 1)
    for count in (20, 1):
        feeder.feed([count])
    assert feeder.store.layout.gap == 1
    feeder.counts.truncate([20])
    feeder.history = [feeder.history[0][:, :1]]
    feeder.feed([3])


def test_memory_report_counts_live_tensors(tiny_model: Any, prompt: Any) -> None:
    settings = {"residual_length": 8, "sink_length": 2, "flush_block": 1}
    with kvcli.attach(tiny_model, "fp16", **settings) as session, torch.no_grad():
        cache = session.new_cache()
        assert cache.memory().cache_bytes == 0
        tiny_model(**prompt(40, 25), past_key_values=cache)
        memory = cache.memory()
    per_token = 3 * 2 * 32 * 4  # layers, K and V, channels, float32
    assert memory.num_tokens == 65
    assert memory.num_encoded == (40 - 10) + (25 - 10)
    assert memory.code_bytes == 45 * per_token
    assert memory.window_bytes == 20 * per_token
    assert memory.key_bits == memory.value_bits == 32.0
    assert memory.fp16_bytes == 65 * per_token // 2
    held = [x for layer in cache.layers for s in layer.stores for x in (s.window, *s.codes.codes.tensors().values())]
    assert memory.allocated_bytes == sum(x.nbytes for x in held) + memory.position_bytes
