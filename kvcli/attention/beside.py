"""Work of a layer that runs on a GPU beside other work of the same layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The second stream of a device."""
    return torch.cuda.Stream(device)


@contextmanager
def forked(device: torch.device, enough: bool) -> Iterator[torch.cuda.Stream | None]:
    """A block whose work may be given to a second stream; after it, the current stream has waited for both.

    What the second stream allocates may be used and freed anywhere: it allocates nothing before it has waited. What it
    reads must not be freed inside the block, or the current stream may allocate the same memory.

    Args:
        device: whose streams.
        enough: whether there is work worth it.

    Yields:
        The second stream, for `torch.cuda.stream`; None, which that takes too, where all stays on the current one.
    """
    if device.type != "cuda" or not enough:
        yield None
        return
    current, second = torch.cuda.current_stream(device), _stream(device)
    second.wait_stream(current)
    try:
        yield second
    finally:
        current.wait_stream(second)
