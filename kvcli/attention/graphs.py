"""CUDA graphs: functions of tensors that stay where they are, launched as a whole."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch


class Graphs:
    """Functions that are called as they are the first time, and afterwards as CUDA graphs captured then.

    Args:
        device: of the tensors.
        enabled: False calls them as they are every time.
        most: graphs that are kept; of more, the one that was not replayed for longest is dropped. None: all.

    Attributes:
        device: as given.
        enabled: False once capturing has failed.
        note: why nothing is captured; None if it is, or was not asked to be.
        nbytes: what the graphs hold.
    """

    def __init__(self, device: torch.device, enabled: bool, most: int | None = None) -> None:
        self.enabled, self.nbytes = enabled, 0
        self.note: str | None = None
        self.device, self._most = device, most
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def call(self, key: Hashable, function: Callable[[], None]) -> None:
        """Calls a function of tensors on the device, or replays what it launched under this key."""
        graph = self._graphs.pop(key, None)
        if graph is not None:
            self._graphs[key] = graph
            graph.replay()
            return
        # Triton launches on the current GPU, whose stream is captured
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            function()
            if self.enabled:
                self._capture(key, function)

    def _capture(self, key: Hashable, function: Callable[[], None]) -> None:
        torch.cuda.empty_cache()  # capturing does so, too: what it gives back is not what the graph takes
        before = torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        if not self._graphs:  # a pool ends with the last of its graphs and cannot be used again
            self._pool = torch.cuda.graph_pool_handle()
        try:
            # graphs run one after another and leave nothing in their own memory, so they share it; other threads, such
            # as one that writes contexts, may wait for the device meanwhile
            stream = _capture_stream(self.device)
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                function()
        except RuntimeError as error:
            cause: BaseException = error
            while isinstance(cause.__context__, RuntimeError):  # which ending the capture hides by failing in turn
                cause = cause.__context__
            reason = str(cause).partition("\n")[0]
            self.enabled, self.note = False, f"steps are not captured as CUDA graphs: {reason}"
            return
        self._graphs[key] = graph
        if self._most is not None and len(self._graphs) > self._most:
            del self._graphs[next(iter(self._graphs))]
        self.nbytes += torch.cuda.memory_reserved() - before

    def clear(self) -> None:
        """Drops the graphs, whose functions are called anew."""
        self._graphs.clear()


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream | None:
    """torch's own is of the GPU that was current when the process captured first: elsewhere it captures nothing."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None
