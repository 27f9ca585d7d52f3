"""What the cache stores, when it encodes, and that its bytes are what it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvcli
from kvcli.cache.stream import Stream
from kvcli.cache.timeline import Step
from kvcli.methods.base import Schedule
from kvcli.methods.full import METHOD as FULL
from kvcli.spec import ModelSpec, RopeSpec

SPEC = ModelSpec("llama", 1, 64, 4, 2, 16, 512, 97, RopeSpec("default", 1e4, 16))


def step(before: list[int], counts: list[int], query_len: int | None = None) -> Step:
    width = query_len or max(counts)
    real = torch.zeros(len(counts), width, dtype=torch.bool)
    for row, count in enumerate(counts):
        real[row, width - count :] = True
    return Step(tuple(before), tuple(counts), None if real.all() else real, torch.zeros(len(counts), width))


class Feeder:
    """Feeds a stream with random tokens and remembers all of them, row by row."""

    def __init__(self, stream: Stream, batch: int) -> None:
        self.stream, self.history = stream, [torch.zeros(2, 0, 16) for _ in range(batch)]
        self.generator = torch.Generator().manual_seed(0)

    def feed(self, counts: list[int]) -> None:
        new = torch.randn(len(counts), 2, max(counts), 16, generator=self.generator)
        now = step([h.shape[1] for h in self.history], counts)
        self.stream.append(new, now)
        self.stream.flush(lambda x, rows, start: x)
        self.history = [torch.cat((h, now.row_tokens(new, row)), dim=1) for row, h in enumerate(self.history)]

    def check(self) -> None:
        """Every token is held once, in order: sinks, codes, window."""
        stream = self.stream
        assert stream.exact is not None
        for row, history in enumerate(self.history):
            sinks = min(stream.sink_length, history.shape[1])
            exact = stream.exact[row, :, : stream.exact_lengths[row]]
            codes = torch.zeros(2, 0, 16)
            if stream.encoded[row]:
                assert stream.buffer.codes is not None
                codes = stream.codec.decode(stream.buffer.codes)[row, :, : stream.encoded[row]]
            assert torch.equal(torch.cat((exact[:, :sinks], codes, exact[:, sinks:]), dim=1), history)


@pytest.mark.parametrize("sink_length", [0, 3])
@pytest.mark.parametrize("schedule", [Schedule(8, 1), Schedule(0, 1), Schedule(8, 4), Schedule(0, 8, 8)])
def test_every_token_is_kept_once_in_order(schedule: Schedule, sink_length: int) -> None:
    feeder = Feeder(Stream(FULL.build(SPEC, None, 0).key, schedule, sink_length), 3)
    for counts in ([5, 1, 30], [1, 1, 1], [40, 7, 2], *[[1, 1, 1]] * 12, [3, 3, 3]):
        feeder.feed(counts)
        feeder.check()
        for row, history in enumerate(feeder.history):
            window = max(0, history.shape[1] - sink_length) - feeder.stream.encoded[row]
            assert window < schedule.keep + max(schedule.block, schedule.granule)
            assert window >= min(schedule.keep, max(0, history.shape[1] - sink_length))
            assert feeder.stream.encoded[row] % schedule.granule == 0


def test_rows_that_end_up_equal_keep_apart_what_they_encoded() -> None:
    feeder = Feeder(Stream(FULL.build(SPEC, None, 0).key, Schedule(4, 4), 0), 2)
    for counts in ([9, 2], [1, 8], [1, 1], [1, 1]):
        feeder.feed(counts)
        feeder.check()


def test_decoding_does_not_reallocate_every_step() -> None:
    feeder = Feeder(Stream(FULL.build(SPEC, None, 0).key, Schedule(4, 1), 2), 1)
    feeder.feed([50])
    pointers = set()
    for _ in range(200):
        feeder.feed([1])
        assert feeder.stream.buffer.codes is not None
        pointers.add(feeder.stream.buffer.codes.tensors()["x"].data_ptr())
        assert feeder.stream.exact is not None
        assert feeder.stream.exact.shape[2] <= 7
    assert len(pointers) <= 2


def test_a_long_prompt_does_not_stay_in_full_precision() -> None:
    feeder = Feeder(Stream(FULL.build(SPEC, None, 0).key, Schedule(8, 1), 2), 1)
    feeder.feed([500])
    assert feeder.stream.exact is not None
    assert feeder.stream.exact.shape[2] <= 2 * 11


def test_truncate_takes_window_tokens_first_then_codes() -> None:
    stream = Stream(FULL.build(SPEC, None, 0).key, Schedule(4, 1), 2)
    feeder = Feeder(stream, 1)
    feeder.feed([20])
    stream.truncate([3])
    assert (stream.encoded, stream.exact_lengths) == ([14], [3])
    stream.truncate([5])
    assert (stream.encoded, stream.exact_lengths) == ([10], [2])
    stream.truncate([12])
    assert (stream.encoded, stream.exact_lengths) == ([0], [0])


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
    assert memory.exact_bytes == 20 * per_token
    assert memory.key_bits == memory.value_bits == 32.0
    assert memory.fp16_bytes == 65 * per_token // 2
    held = [x for layer in cache.layers for s in layer.streams for x in (s.exact, *s.buffer.codes.tensors().values())]
    assert memory.allocated_bytes == sum(x.nbytes for x in held) + memory.position_bytes
