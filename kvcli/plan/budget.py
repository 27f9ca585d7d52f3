"""Memory as a budget: a limit on this process, running out of it, and the largest size that fits.

A limit holds for what torch allocates; the CUDA context and the libraries come on top.
"""

import gc
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from kvcli.errors import UsageError

T = TypeVar("T")
_SMALL, _LARGER = 1, 9
_GROWTH, _RESOLUTION = 1.25, 1 / 32


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a GPU or a CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)


def release_gpu_memory() -> None:
    """Releases cached GPU memory that nothing uses."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def need_gpu(device: torch.device) -> None:
    """Raises UsageError where torch cannot limit its memory."""
    if device.type != "cuda":
        raise UsageError("measuring what fits into a memory budget needs a GPU")


def check_budget(budget: int, device: torch.device) -> None:
    """Raises UsageError for a budget larger than the GPU, or without a GPU."""
    need_gpu(device)
    total = torch.cuda.get_device_properties(device).total_memory
    if budget > total:
        raise UsageError(f"the GPU has {total / 2**30:.1f} GiB, less than the budget of {budget / 2**30:.1f} GiB")


@contextmanager
def memory_limit(budget: int | None, device: torch.device) -> Iterator[None]:
    """Limits what torch may allocate on a GPU to `budget` bytes, inside the block; None is no limit."""
    if budget is None:
        yield
        return
    release_gpu_memory()
    torch.cuda.set_per_process_memory_fraction(budget / torch.cuda.get_device_properties(device).total_memory, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def attempt(call: Callable[[], T]) -> T | None:
    """What a call returned; None if it ran out of memory."""
    result = None
    try:
        result = call()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    release_gpu_memory()  # outside the handler: there the error still holds the failed run's tensors
    return result


def largest(
    fits: Callable[[int], bool],
    *,
    start: int = 1,
    most: int | None = None,
    growth: float = 2.0,
    resolution: float = 0.0,
) -> int:
    """The largest size that fits, as all smaller ones do, at most `most`; 0 if none does.

    Sizes grow or shrink by the factor `growth` from `start` on, a guess; then by bisection. The answer may fall short
    of the largest by a share of it, the `resolution`.
    """
    good, end = 0, sys.maxsize if most is None else most + 1
    bad, size = end, min(start, end - 1)
    # until one is known that fits, and one that does not
    while good < size < bad and (not good or bad == end):
        if fits(size):
            good, size = size, min(max(size + 1, int(size * growth)), bad - 1)
        else:
            bad, size = size, max(1, min(size - 1, int(size / growth)))
    step = max(1, int(resolution * good))
    sizes = range(good + step, bad, step)
    return good + step * bisect_left(sizes, True, key=lambda size: not fits(size))


def largest_by_peak(peak: Callable[[int], int | None], budget: int) -> int:
    """The largest size that fits, at most 1/32 below the true one; 0 if none fits.

    `peak` runs a size and returns its peak in bytes, or None if it ran out of memory; the first guess is made from
    the `budget` in bytes.
    """

    def fits(size: int) -> bool:
        return peak(size) is not None

    small = peak(_SMALL)
    if small is None:
        return 0
    larger = peak(_LARGER)
    if larger is None:
        return max(_SMALL, largest(fits, start=2, most=_LARGER - 1))
    bytes_per_size = max(1.0, (larger - small) / (_LARGER - _SMALL))
    guess = _LARGER + max(1, int((budget - larger) / bytes_per_size))
    return max(_LARGER, largest(fits, start=guess, growth=_GROWTH, resolution=_RESOLUTION))
