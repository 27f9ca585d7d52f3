"""A second CUDA stream for independent work of the same layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch


@cache
def _side_stream_of(stream: torch.cuda.Stream) -> torch.cuda.Stream:
    """The side stream of a stream; its kernels start as soon as multiprocessors are free."""
    return torch.cuda.Stream(stream.device, priority=-1)


@contextmanager
def side_stream(device: torch.device, enabled: bool) -> Iterator[AbstractContextManager[Any]]:
    """Lets work inside the block run on a side CUDA stream, and joins it on exit.

    Memory that is allocated on the side stream can be reused by it only: keep none of it after the block. What the side
    stream reads must not be freed inside the block, or the current stream may allocate the same memory.

    Args:
        device: of the streams.
        enabled: False runs everything on the current stream.

    Yields:
        The context whose work goes to the side stream.
    """
    if device.type != "cuda" or not enabled:
        yield nullcontext()
        return
    current = torch.cuda.current_stream(device)
    side = _side_stream_of(current)
    side.wait_stream(current)
    try:
        yield torch.cuda.stream(side)
    finally:
        current.wait_stream(side)
