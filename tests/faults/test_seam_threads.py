"""One model and several threads, each with a cache of its own."""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from factories import make_spec
from test_cache_copies import attach, ids

from kvcli.methods.kivi import METHOD as KIVI
from kvcli.seam.versions import with_cache


def in_threads(work: Callable[[int], None], count: int) -> None:
    """Runs work(0), ..., work(count - 1) at the same time and raises the first error."""
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(work, range(count)))


def test_sizing_buffers_leaves_kernels_on_for_other_threads_and_all_get_the_same_group(monkeypatch: Any) -> None:
    """While one thread learns what codes look like, others encode."""
    codec = KIVI.build(make_spec(), KIVI.config_cls(**KIVI.example_settings), 0).key
    codec.fused = True
    meet, groups, seen, encode = threading.Barrier(3, timeout=20), [], [], type(codec).encode

    def together(self: Any, x: torch.Tensor, state: None = None) -> Any:
        meet.wait()
        seen.append((self.fused, codec.fused))
        return encode(self, x, state)

    monkeypatch.setattr(type(codec), "encode", together)
    for _ in range(2):
        in_threads(lambda _: groups.append(codec.encoded_group(torch.zeros(1, 2, 4, 16))), 3)
    assert seen == [(False, True)] * 3
    assert len(groups) == 6
    assert all(group is groups[0] for group in groups)


@pytest.mark.parametrize("method", ["fp16", "kivi-2", "squat-pre-2", "qjl"])
def test_threads_under_load(tiny_model: Any, method: str) -> None:
    """Four threads generate at once, with prompts of different lengths and a switch every 10 microseconds.

    Fault: threads with a cache each. Result: each gets the tokens that it gets alone.
    """

    def generate(session: Any, index: int) -> torch.Tensor:
        prompt, cache = ids(20 + 11 * index, seed=index), session.new_cache()
        return tiny_model.generate(prompt, **with_cache(cache), max_new_tokens=16, do_sample=False)

    found: dict[int, torch.Tensor] = {}
    interval = sys.getswitchinterval()
    with attach(tiny_model, method) as session:
        expected = [generate(session, i) for i in range(4)]
        sys.setswitchinterval(1e-5)
        try:
            in_threads(lambda i: found.update({i: generate(session, i)}), 4)
        finally:
            sys.setswitchinterval(interval)
    assert all(torch.equal(found[i], expected[i]) for i in range(4))
