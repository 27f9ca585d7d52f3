"""Work of a layer that runs on a GPU beside other work of the same layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch


@cache
def _beside(stream: torch.cuda.Stream) -> torch.cuda.Stream:
    """The second stream beside a first one: what is given to it begins as soon as there is room."""
    return torch.cuda.Stream(stream.device, priority=-1)


@contextmanager
def forked(device: torch.device, enough: bool) -> Iterator[AbstractContextManager[Any]]:
    """A block whose work may be given to a second stream; after it, the current stream has waited for both.

    What the second stream allocates may be used and freed after the block, but is memory that only it can use again:
    keep nothing of it that is freed later and replaced by larger things. What it reads must not be freed inside the
    block, or the current stream may allocate the same memory.

    Args:
        device: whose streams.
        enough: whether there is work worth it.

    Yields:
        The context in which work goes to the second stream, if there is one.
    """
    if device.type != "cuda" or not enough:
        yield nullcontext()
        return
    current = torch.cuda.current_stream(device)
    second = _beside(current)
    second.wait_stream(current)
    try:
        yield torch.cuda.stream(second)
    finally:
        current.wait_stream(second)
