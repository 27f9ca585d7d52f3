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
    """Gives back what nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


@contextmanager
def memory_limit(budget: int | None, device: torch.device) -> Iterator[None]:
    """Limits what torch may allocate on a GPU to `budget` bytes, inside the block.

    Raises:
        UsageError: more than the GPU has.
    """
    if budget is None:
        yield
        return
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


def largest(
    fits: Callable[[int], bool], *, start: int = 1, step: int = 1, most: int | None = None, resolution: float = 0.0
) -> int:
    """The largest multiple of `step` that fits, 0 if none does.

    Doubles from `start` until something fails, or halves until something fits, and bisects between the two.

    Args:
        fits: whether a size fits; if one does, all smaller ones do.
        start: a guess, rounded up to a multiple of `step`.
        step: granularity of the answer.
        most: the largest size to try.
        resolution: share of the answer that it may fall short of the largest.
    """
    limit = None if most is None else most // step
    size = max(1, -(-start // step))
    size = size if limit is None else min(size, limit)
    good, bad = 0, None if limit is None else limit + 1
    while size and bad != size:
        if fits(size * step):
            good = size
            size = 2 * size if bad is None else min(2 * size, bad)
        else:
            bad = size
            size = size // 2 if not good else bad
    while bad is not None and bad - good > max(1, resolution * good):
        middle = (good + bad) // 2
        if fits(middle * step):
            good = middle
        else:
            bad = middle
    return good * step
