"""Times of calls, with the GPU's L2 cache flushed before each.

Launching a kernel of some tens of microseconds takes Python longer than it runs, so a call is also recorded as a CUDA
graph and replayed, as in a decode step. Both times are recorded. `triton.testing` does not replace this:
`do_bench_cudagraph` does not flush L2, and `do_bench` takes a duration instead of a number of calls.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

_FLUSH_BYTES = 256 * 2**20
_WARM_SECONDS = 0.05
_MAX_SECONDS = 5.0
_MIN_CALLS = 3

Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Percentiles of the time of one call in microseconds, of replays of a CUDA graph or of eager calls."""

    p20_us: float
    p50_us: float
    p80_us: float
    eager_us: float  # the median without a graph
    how: Literal["graph", "eager"]
    repeats: int
    note: str | None = None  # why no graph could be recorded


def time_call(call: Call, device: torch.device, repeats: int, *, graph: bool = True) -> Timing:
    """Times a call `repeats` times, or fewer, though at least three, when they take more than 5 seconds together.

    On a CPU there is no graph and nothing to flush; `graph` is to be False for calls that synchronize with the GPU.
    """
    note: str | None = None
    recorded: Any = None
    if device.type != "cuda":
        samples = eager = _cpu_samples(call, repeats)
    else:
        with torch.cuda.device(device):
            l2_bytes = int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0))
            flush = torch.empty(max(_FLUSH_BYTES, 2 * l2_bytes), dtype=torch.uint8, device=device)
            samples = eager = _cuda_samples(call, flush, repeats)
            if graph:
                recorded, note = record_graph(call)
            if recorded is not None:
                samples = _cuda_samples(recorded.replay, flush, repeats)
    how: Literal["graph", "eager"] = "eager" if recorded is None else "graph"
    return Timing(*percentiles(samples), percentiles(eager)[1], how, len(samples), note)


def percentiles(samples: list[float]) -> tuple[float, float, float]:
    """The 20th, 50th and 80th percentile, interpolated."""
    quantiles = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    p20, p50, p80 = torch.tensor(samples, dtype=torch.float64).quantile(quantiles).tolist()
    return p20, p50, p80


def _affordable(call_seconds: float, repeats: int) -> int:
    """Number of calls: `repeats`, or fewer if those would take more than _MAX_SECONDS, but at least _MIN_CALLS."""
    return min(repeats, max(_MIN_CALLS, int(_MAX_SECONDS / max(call_seconds, 1e-9))))


def _cpu_samples(call: Call, repeats: int) -> list[float]:
    """Microseconds per call on the CPU, after one warm-up call."""
    started = time.perf_counter()
    call()
    samples = []
    for _ in range(_affordable(time.perf_counter() - started, repeats)):
        started = time.perf_counter()
        call()
        samples.append(1e6 * (time.perf_counter() - started))
    return samples


def _cuda_samples(call: Call, flush: Tensor, repeats: int) -> list[float]:
    """Microseconds per call between two events, after warm-up calls (compilation, autotuning, clocks)."""
    warm_up, calls = time.perf_counter(), 0
    while calls < _MIN_CALLS or time.perf_counter() - warm_up < _WARM_SECONDS:
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        last = time.perf_counter() - started
        calls += 1
    events = []
    for _ in range(_affordable(last, repeats)):
        # flushes also keep the GPU busy while Python launches the call's kernels; one is too short now and then
        for _ in range(3):
            flush.zero_()
        first, second = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        call()
        second.record()
        events.append((first, second))
    torch.cuda.synchronize()
    return [1e3 * first.elapsed_time(second) for first, second in events]


def record_graph(call: Call) -> tuple[Any | None, str | None]:
    """The CUDA graph of a call and None, or None and the reason why it cannot be captured."""
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_MIN_CALLS):
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            call()
        graph.replay()
        torch.cuda.synchronize()
    except RuntimeError as error:
        torch.cuda.synchronize()
        return None, f"no CUDA graph: {(str(error).strip().splitlines() or [repr(error)])[0]}"
    return graph, None


def copy_bandwidth(device: torch.device, repeats: int) -> float:
    """GB/s of a copy within the device's memory, bytes read plus bytes written."""
    count = (512 if device.type == "cuda" else 64) * 2**20
    source = torch.zeros(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timing = time_call(lambda: target.copy_(source), device, repeats, graph=False)
    return 2 * count / timing.p50_us / 1e3


def synchronized_time(device: torch.device) -> float:
    """Seconds, read after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
