"""Kernels that run beside others."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch


def run_beside(device: torch.device, first: Callable[[], None], then: Callable[[], None]) -> None:
    """`first` on a CUDA stream of its own while `then` runs on the current one; both have ended after it.

    Neither may read what the other writes. What is allocated on the side stream can be reused by it only: nothing of it
    may be kept. What it reads is not freed before it has ended, or the current stream could allocate the same memory.
    On a CPU one runs after the other.
    """
    if device.type != "cuda":
        first()
        return then()
    current = torch.cuda.current_stream(device)
    side = _side_stream_of(current)
    side.wait_stream(current)
    try:
        with torch.cuda.stream(side):
            first()
        then()
    finally:
        current.wait_stream(side)


@cache
def _side_stream_of(stream: torch.cuda.Stream) -> torch.cuda.Stream:
    """The side stream of a stream; its kernels start as soon as multiprocessors are free."""
    return torch.cuda.Stream(stream.device, priority=-1)
