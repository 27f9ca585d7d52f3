"""What the cache stores, when it encodes, and that its bytes are what it says."""

from typing import Any

import pytest
import torch
from torch import Tensor

import kvcli
from kvcli.cache.counts import TokenCounts
from kvcli.cache.forward import Forward
from kvcli.cache.layer import LayerStore
from kvcli.cache.record import Counts
from kvcli.methods.fp16 import METHOD as FP16
from kvcli.methods.method import Schedule
from kvcli.rope import unrotate
from kvcli.seam.versions import with_cache
from kvcli.spec import ModelSpec, RopeSpec

SPEC = ModelSpec("llama", 1, 64, 4, 2, 16, 512, 97, RopeSpec("default", 1e4, 16))
KIVI = Schedule(0, 8, 8), Schedule(8, 1)


class Feeder:
    """Feeds a store with random tokens as its counts say, and remembers all of them, row by row."""

    def __init__(
        self, keys: Schedule, values: Schedule | None = None, sink_length: int = 0, batch: int = 1, group: int = 1
    ) -> None:
        self.stores: list[LayerStore] = []
        self.counts = TokenCounts((keys, values or keys), sink_length, (group, 1))
        self.history = [torch.zeros(2, 2, 0, 16) for _ in range(batch)]
        self.generator = torch.Generator().manual_seed(0)

    @property
    def store(self) -> LayerStore:
        return self.stores[0]

    def feed(self, *counts: int) -> None:
        width = max(counts)
        new = torch.randn(2, len(counts), 2, width, 16, generator=self.generator)
        real = torch.arange(width) >= width - torch.tensor(counts).unsqueeze(1)
        plan = self.counts.append(counts)
        forward = Forward(None, None, counts, None if real.all() else real, plan, new.device)  # type: ignore[arg-type]
        if not self.stores:
            self.stores.append(LayerStore(FP16.build(SPEC, None, 0), new[0], new[1], plan.layout))
        self.store.reserve(forward)
        forward.window.write_new(self.store.keys, new[0])
        forward.window.write_new(self.store.values, new[1])
        new_again = torch.stack([forward.window.read_new(x, width) for x in (self.store.keys, self.store.values)])
        assert torch.equal(new_again.transpose(2, 3)[:, real], new.transpose(2, 3)[:, real])
        self.history = [torch.cat((h, new[:, row][:, :, real[row]]), dim=2) for row, h in enumerate(self.history)]
        self.check(plan.attended, forward)
        self.store.encode_keys(forward, unrotate, lambda encoding, x, codes: None)
        self.store.encode_values(forward, lambda encoding, x, codes: None)
        self.store.shrink(forward)
        self.check(self.counts.attended)

    def check(self, attended: Counts, forward: Forward | None = None) -> None:
        """Every token is in its slot of the window, or a code, or both."""
        store, sinks = self.store, self.counts.sink_length
        ring = store.keys.shape[2] - sinks
        assert (store.layout.sinks, store.layout.ring) == (sinks, ring)
        for row, (history, left) in enumerate(zip(self.history, attended, strict=True)):
            held = [t for t in range(history.shape[2]) if t < sinks or t >= sinks + left]
            slots = [t if t < sinks else sinks + (t - sinks) % ring for t in held]
            assert len(set(slots)) == len(slots)
            for kind, window in enumerate((store.keys, store.values)):
                assert torch.equal(window[row][:, slots], history[kind][:, held])
                if forward is not None:
                    assert torch.equal(forward.window.read(window)[row, :, : len(held)], history[kind][:, held])
            if forward is None:
                for kind, (codes, counts) in enumerate(self.codes()):
                    decoded = codes[row, :, : counts[row]]
                    assert torch.equal(decoded, history[kind][:, sinks : sinks + counts[row]])

    def codes(self) -> list[tuple[Tensor, Counts]]:
        decoded = [buffer.codec.decode(buffer.codes, None) for buffer in (self.store.key_codes, self.store.value_codes)]
        return list(zip(decoded, (self.counts.keys.coded, self.counts.values.coded), strict=True))


@pytest.mark.parametrize("sink_length", [0, 3])
@pytest.mark.parametrize(
    ("schedules", "group"),
    [
        ((Schedule(8, 1),), 1),
        ((Schedule(16, 1),), 1),
        ((Schedule(0, 1),), 1),
        ((Schedule(8, 4),), 1),
        ((Schedule(0, 8, 8),), 1),
        (KIVI, 1),
        (KIVI, 4),
        (KIVI, 8),
    ],
)
def test_every_token_is_kept_in_its_slot(schedules: tuple[Schedule, ...], group: int, sink_length: int) -> None:
    feeder = Feeder(*schedules, sink_length=sink_length, batch=3, group=group)
    for counts in ([5, 1, 30], [1, 1, 1], [40, 7, 2], *[[1, 1, 1]] * 12, [3, 3, 3], [2, 0, 1], [30, 30, 30]):
        feeder.feed(*counts)
        tokens = [max(0, history.shape[2] - sink_length) for history in feeder.history]
        for kind in (feeder.counts.keys, feeder.counts.values):
            for count, coded in zip(tokens, kind.coded, strict=True):
                assert min(kind.schedule.keep, count) <= count - coded < kind.schedule.longest
                assert coded % kind.schedule.multiple_of == 0
        for count, attended in zip(tokens, feeder.counts.attended, strict=True):
            assert attended % group == 0
            assert count - attended < max(schedule.longest for schedule in schedules) + group - 1


def test_a_token_stays_in_its_slot_while_it_is_in_the_window() -> None:
    """Also one whose key is encoded before its value: nothing is moved, and nothing is written but new tokens."""
    feeder = Feeder(*KIVI, sink_length=2, batch=2, group=4)
    feeder.feed(50, 50)
    feeder.feed(1, 1)
    layout, addresses = feeder.store.layout, (feeder.store.keys.data_ptr(), feeder.store.values.data_ptr())
    assert layout.capacity == 2 + 8 + 4  # sinks, R values, and those of a group that is not complete
    for _ in range(60):
        before = [feeder.store.keys.clone(), feeder.store.values.clone()]
        feeder.feed(1, 1)
        slot = 2 + (feeder.history[0].shape[2] - 1 - 2) % 12
        for old, now in zip(before, (feeder.store.keys, feeder.store.values), strict=True):
            old[:, :, slot] = now[:, :, slot]
            assert torch.equal(old, now)
    assert layout == feeder.store.layout
    assert addresses == (feeder.store.keys.data_ptr(), feeder.store.values.data_ptr())


@pytest.mark.parametrize(
    ("schedules", "group", "ring"), [((Schedule(128, 32),), 1, 160), ((Schedule(0, 1),), 1, 1), (KIVI, 4, 12)]
)
def test_a_window_is_no_larger_than_decoding_needs(schedules: tuple[Schedule, ...], group: int, ring: int) -> None:
    feeder = Feeder(*schedules, sink_length=4, group=group)
    feeder.feed(400)
    longest = 0
    for _ in range(3 * ring):
        plan = feeder.counts.append((1,))
        longest = max(longest, plan.longest)
        assert plan.layout.capacity == 4 + ring
    assert longest == 4 + ring


def test_nothing_is_decoded_where_keys_and_values_leave_together() -> None:
    counts = TokenCounts((Schedule(8, 4), Schedule(8, 4)), 2)
    for new in ((50, 9, 1), *[(1, 1, 1)] * 20, (30, 2, 7)):
        plan = counts.append(new)
        assert not any(encoding.kept for encoding in (*plan.keys, *plan.values))


def test_every_encoded_token_of_kivi_is_decoded_once_unless_it_leaves_at_once() -> None:
    counts = TokenCounts(KIVI, 0, (4, 1))
    plan = counts.append((50,))  # 48 keys and 42 values are codes, of which 40 leave
    assert [(encoding.count, encoding.kept) for encoding in (*plan.keys, *plan.values)] == [(48, 8), (42, 2)]
    kept = []
    for _ in range(8):
        plan = counts.append((1,))
        kept.append([encoding.kept for encoding in (*plan.keys, *plan.values)])
    assert kept == [[1], [0], [1], [1], [1], [8, 0], [1], [1]]


def test_rows_that_end_up_equal_keep_apart_what_they_encoded() -> None:
    feeder = Feeder(Schedule(4, 4), batch=2)
    for counts in ([9, 2], [1, 8], [1, 1], [1, 1]):
        feeder.feed(*counts)


def test_decoding_does_not_reallocate_every_step() -> None:
    feeder = Feeder(Schedule(4, 1), sink_length=2)
    feeder.feed(50)
    pointers = set()
    for _ in range(200):
        feeder.feed(1)
        pointers.add(feeder.store.key_codes.codes.tensors()["x"].data_ptr())
        assert feeder.store.keys.shape[2] == 7
    assert len(pointers) <= 3  # the prompt's own, and two larger ones


def test_a_long_prompt_does_not_stay_in_full_precision() -> None:
    feeder = Feeder(Schedule(8, 1), sink_length=2)
    feeder.feed(500)
    assert feeder.store.keys.shape[2] == feeder.store.values.shape[2] == 11


def test_truncate_takes_window_tokens_first_then_codes() -> None:
    feeder = Feeder(Schedule(4, 1), sink_length=2)
    feeder.feed(20)
    counts = feeder.counts
    for removed, coded, window in ((3, 14, 3), (5, 10, 2), (11, 0, 1)):
        counts.truncate([removed])
        feeder.history = [feeder.history[0][:, :, :-removed]]
        assert (counts.keys.coded, counts.window) == ((coded,), (window,))
        feeder.check(counts.attended)
    feeder.feed(9)


@pytest.mark.parametrize("removed", [1, 3, 7, 20])
def test_tokens_after_a_rollback_overwrite_those_removed(removed: int) -> None:
    feeder = Feeder(Schedule(4, 3), sink_length=2, batch=2)
    for counts in ((20, 23), (1, 1), (1, 1)):
        feeder.feed(*counts)
    feeder.counts.truncate([removed, removed])
    feeder.history = [history[:, :, :-removed] for history in feeder.history]
    for counts in ((3, 3), *[(1, 1)] * 9, (11, 2)):
        feeder.feed(*counts)


def test_memory_report_counts_live_tensors(tiny_model: Any, prompt: Any) -> None:
    settings = {"residual_length": 8, "sink_length": 2, "flush_block": 1}
    with kvcli.attach(tiny_model, "fp16", **settings) as session, torch.no_grad():
        cache = session.new_cache()
        assert cache.memory().cache_bytes == 0
        tiny_model(**prompt(40, 25), **with_cache(cache))
        memory = cache.memory()
    per_token = 3 * 2 * 32 * 4  # layers, K and V, channels, float32
    assert memory.num_tokens == 65
    assert memory.num_encoded == (40 - 10) + (25 - 10)
    assert memory.code_bytes == 45 * per_token
    assert memory.window_bytes == 20 * per_token
    assert memory.key_bits == memory.value_bits == 32.0
    assert memory.fp16_bytes == 65 * per_token // 2
    assert f"{memory}" == f"{memory.cache_bytes:,} bytes, 24,960 in 16 bits (0.48 times as many)"
    stores = [layer.store for layer in cache.layers]
    held = [x for s in stores for x in (s.keys, s.values, s.key_codes.codes, s.value_codes.codes)]
    assert memory.allocated_bytes == sum(x.nbytes for x in held) + memory.position_bytes
