"""Times, budgets and the search for the largest size that fits."""

from collections.abc import Callable
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcli.bench import timing
from kvcli.bench.timing import copy_bandwidth, time_call
from kvcli.errors import UsageError
from kvcli.plan.budget import attempt, check_budget, is_out_of_memory, largest, memory_limit

CPU = torch.device("cpu")


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Callable[[], None]]:
    """A call that takes each of some seconds in turn, the last from then on, by a clock that no other moves."""
    now = [0.0]
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def of(*seconds: float) -> Callable[[], None]:
        durations = chain(seconds, repeat(seconds[-1]))

        def run() -> None:
            now[0] += next(durations)

        return run

    return of


def test_a_call_is_timed_after_its_warm_up(call: Any) -> None:
    timed = time_call(call(1.0, *(1e-6 * x for x in range(1, 12)), 50.0), CPU, 11)
    # the first call's second would allow five more; these are the samples 1 to 5 microseconds
    assert (timed.repeats, timed.how, timed.note) == (5, "eager", None)
    assert (timed.p20_us, timed.p50_us, timed.p80_us) == pytest.approx((1.8, 3.0, 4.2))
    assert timed.eager_us == timed.p50_us


@pytest.mark.parametrize(("seconds", "repeats"), [(1e-3, 40), (0.5, 10), (100.0, 3)])
def test_slow_calls_are_repeated_less(call: Any, seconds: float, repeats: int) -> None:
    assert time_call(call(seconds), CPU, 40).repeats == repeats


def test_a_copy_counts_bytes_read_and_written(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *_: call(1e-3)())
    assert copy_bandwidth(CPU, 3) == pytest.approx(2 * 64 * 2**20 / 1e-3 / 1e9)


@settings(max_examples=300, deadline=None)
@given(
    limit=st.integers(0, 70),
    start=st.integers(1, 50),
    most=st.none() | st.integers(1, 60),
    growth=st.sampled_from([1.1, 1.25, 2.0]),
)
def test_the_largest_that_fits(limit: int, start: int, most: int | None, growth: float) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= limit

    expected = min(limit, most if most is not None else limit)
    assert largest(fits, start=start, most=most, growth=growth) == expected
    assert len(tried) == len(set(tried))
    assert all(size > 0 and (most is None or size <= most) for size in tried)


def test_a_coarse_search_tries_less() -> None:
    def search(resolution: float) -> tuple[int, int]:
        tried: list[int] = []
        size = largest(lambda size: not tried.append(size) and size <= 777, start=600, resolution=resolution)
        return size, len(tried)

    (exact, many), (coarse, few) = search(0.0), search(1 / 16)
    assert exact == 777
    assert 777 / (1 + 1 / 16) <= coarse <= 777
    assert few < many


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: out of memory"),
    ],
)
def test_out_of_memory_makes_a_failed_attempt(error: Exception) -> None:
    assert is_out_of_memory(error)
    assert attempt(Mock(side_effect=error)) is None


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), ValueError("out of memory")])
def test_other_errors_are_raised_by_an_attempt(error: Exception) -> None:
    assert not is_out_of_memory(error)
    with pytest.raises(type(error)):
        attempt(Mock(side_effect=error))
    assert attempt(lambda: 3) == 3


def test_a_budget_limits_torch_inside_the_block_only(monkeypatch: pytest.MonkeyPatch) -> None:
    fractions: list[float] = []
    properties = SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: fractions.append(share))
    with memory_limit(None, CPU):
        assert fractions == []
    with memory_limit(20 * 2**30, torch.device("cuda")):
        assert fractions == [0.25]
    assert fractions == [0.25, 1.0]
    with pytest.raises(UsageError, match=r"80.0 GiB, less than the budget of 81.0 GiB"):
        check_budget(81 * 2**30, torch.device("cuda"))
    with pytest.raises(UsageError, match="needs a GPU"):
        check_budget(1, CPU)
