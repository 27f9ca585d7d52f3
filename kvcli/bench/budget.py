"""Memory as a budget: a limit on this process, running out of it, and the largest size that fits.

A limit holds for what torch allocates; the CUDA context and the libraries come on top.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from kvcli.errors import UsageError


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a GPU or a CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)


def free() -> None:
    """Gives back GPU memory that nothing refers to any more."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def need_gpu(device: torch.device) -> None:
    """Raises UsageError where torch cannot limit its memory."""
    if device.type != "cuda":
        raise UsageError("measuring what fits into a memory budget needs a GPU")


@contextmanager
def memory_limit(budget: int | None, device: torch.device) -> Iterator[None]:
    """Limits what torch may allocate on a GPU to `budget` bytes, inside the block.

    Raises:
        UsageError: more than the GPU has, or no GPU.
    """
    if budget is None:
        yield
        return
    need_gpu(device)
    total = torch.cuda.get_device_properties(device).total_memory
    if budget > total:
        raise UsageError(f"the GPU has {total / 2**30:.1f} GiB, less than the budget of {budget / 2**30:.1f} GiB")
    free()
    torch.cuda.set_per_process_memory_fraction(budget / total, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def attempt(run: Callable[[], None]) -> bool:
    """Runs something that may need too much memory; whether it went through."""
    fits = True
    try:
        run()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        fits = False
    free()  # not inside the handler, where the error still holds the failed run's tensors
    return fits


_SMALL, _LARGER = 1, 9
_GROWTH, _RESOLUTION = 1.25, 1 / 32


def largest(
    fits: Callable[[int], bool],
    *,
    start: int = 1,
    step: int = 1,
    most: int | None = None,
    growth: float = 2.0,
    resolution: float = 0.0,
) -> int:
    """The largest multiple of `step` that fits, 0 if none does.

    Grows from `start` until something fails, or shrinks until something fits, and bisects between the two.

    Args:
        fits: whether a size fits; if one does, all smaller ones do.
        start: a guess, rounded up to a multiple of `step`.
        step: granularity of the answer.
        most: the largest size to try.
        growth: factor of growing and shrinking; a good guess deserves a small one.
        resolution: share of the answer that it may fall short of the largest.
    """
    size = max(1, -(-start // step))
    good, bad = 0, None if most is None else most // step + 1
    failed = False
    while True:
        size = size if bad is None else min(size, bad - 1)
        if size <= good:
            break
        if fits(size * step):
            good = size
            size = 0 if failed else max(size + 1, int(size * growth))
        else:
            bad, failed = size, True
            size = 0 if good else min(size - 1, int(size / growth))
    while bad is not None and bad - good > max(1, resolution * good):
        middle = (good + bad) // 2
        if fits(middle * step):
            good = middle
        else:
            bad = middle
    return good * step


def largest_by_peak(peak: Callable[[int], int | None], budget: int) -> int:
    """The largest size that fits, up to a thirtieth below; 0 if none does.

    Args:
        peak: runs a size; the bytes it took at most, or None if it ran out of memory.
        budget: bytes, from which the first guess is made.
    """

    def fits(size: int) -> bool:
        return peak(size) is not None

    small = peak(_SMALL)
    if small is None:
        return 0
    larger = peak(_LARGER)
    if larger is None:
        return max(_SMALL, largest(fits, start=2, most=_LARGER - 1))
    each = max(1.0, (larger - small) / (_LARGER - _SMALL))
    guess = _LARGER + max(1, int((budget - larger) / each))
    return max(_LARGER, largest(fits, start=guess, growth=_GROWTH, resolution=_RESOLUTION))
