"""One model and several threads, each with a cache of its own."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_cache_copies import attach, ids

from kvcli.methods.kivi import METHOD as KIVI
from kvcli.spec import ModelSpec


def in_threads(work: Callable[[int], None], count: int) -> None:
    """Runs work(0), ..., work(count - 1) at the same time and raises the first error."""
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_sizing_buffers_leaves_kernels_on_for_other_threads(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one thread learns what codes look like, another one encodes."""
    spec = ModelSpec.from_config(tiny_model.config)
    codec = KIVI.build(spec, KIVI.config_cls(**KIVI.example_settings), 0).key
    codec.fused = True
    seen: list[tuple[bool, bool]] = []
    encode = type(codec).encode

    def watched(self: Any, x: torch.Tensor, state: None = None) -> Any:
        seen.append((self.fused, codec.fused))
        return encode(self, x, state)

    monkeypatch.setattr(type(codec), "encode", watched)
    groups = [codec.encoded_group(torch.zeros(1, 2, 4, 16)) for _ in range(2)]
    assert seen == [(False, True)]
    assert groups[0] is groups[1]


def test_threads_get_the_same_group(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ModelSpec.from_config(tiny_model.config)
    codec = KIVI.build(spec, KIVI.config_cls(**KIVI.example_settings), 0).key
    meet, groups, encode = threading.Barrier(3, timeout=20), {}, type(codec).encode

    def together(self: Any, x: torch.Tensor, state: None = None) -> Any:
        meet.wait()
        return encode(self, x, state)

    monkeypatch.setattr(type(codec), "encode", together)

    def work(index: int) -> None:
        groups[index] = codec.encoded_group(torch.zeros(1, 2, 4, 16))

    in_threads(work, 3)
    assert groups[0] is groups[1] is groups[2]


@pytest.mark.parametrize("method", ["fp16", "kivi-2", "squat-pre-2", "qjl"])
def test_threads_under_load(tiny_model: Any, method: str) -> None:
    """Four threads generate at once, with prompts of different lengths and a switch every 10 microseconds.

    Fault (calls): threads with a cache each. Result: each gets the tokens that it gets alone. Also in:
    test_seam_calls.
    """
    prompts = [ids(20 + 11 * i, seed=i) for i in range(4)]

    def generate(session: Any, index: int) -> torch.Tensor:
        cache = session.new_cache()
        return tiny_model.generate(prompts[index], past_key_values=cache, max_new_tokens=16, do_sample=False)

    found: dict[int, torch.Tensor] = {}
    with attach(tiny_model, method) as session:
        expected = [generate(session, i) for i in range(4)]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            in_threads(lambda i: found.update({i: generate(session, i)}), 4)
        finally:
            sys.setswitchinterval(interval)
    assert all(torch.equal(found[i], expected[i]) for i in range(4))
