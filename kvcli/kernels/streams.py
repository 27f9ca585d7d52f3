"""Kernels that run beside others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch


@contextmanager
def beside(device: torch.device | None, work: Callable[[], None], branch: int = 0) -> Iterator[None]:
    """Runs `work` on a CUDA stream of its own while the block runs on the current one; both have ended after it.

    Neither may read what the other writes. What is allocated on the side stream can be reused by it only: nothing of it
    may be kept. What it reads is not freed before it has ended, or the current stream could allocate the same memory.

    Args:
        device: None, or a CPU: the block runs after `work`.
        branch: which side stream; those of different numbers run at the same time.
    """
    if not _has_streams(device):
        work()
        yield
        return
    current = torch.cuda.current_stream(device)
    side = _side_stream_of(current, branch)
    side.wait_stream(current)
    try:
        with torch.cuda.stream(side):
            work()
        yield
    finally:
        current.wait_stream(side)


class Event:
    """A CUDA event, or nothing where `beside` has no streams for `device`."""

    def __init__(self, device: torch.device | None) -> None:
        self._event = torch.cuda.Event() if _has_streams(device) else None

    def record(self) -> None:
        """In the current stream."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """What follows in the current stream begins after what was recorded."""
        if self._event is not None:
            self._event.wait()


def _has_streams(device: torch.device | None) -> bool:
    return device is not None and device.type == "cuda"


@cache
def _side_stream_of(stream: torch.cuda.Stream, branch: int) -> torch.cuda.Stream:
    """A side stream of a stream; its kernels start as soon as multiprocessors are free."""
    return torch.cuda.Stream(stream.device, priority=-1)
