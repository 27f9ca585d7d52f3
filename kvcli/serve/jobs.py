"""Requests on their way through a thread that makes tokens."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from kvcli.attention.generation import SamplingConfig
from kvcli.errors import KvcliError, error_text
from kvcli.progress import Say
from kvcli.serve.answers import Answer
from kvcli.serve.metrics import Metrics
from kvcli.serve.requests import ApiError


class Cancelled(Exception):
    """Nobody waits for an answer any more."""


@dataclass(eq=False)
class Job:
    """A request on its way through the engine.

    Attributes:
        ids: prompt, int64 [1, time] on the CPU.
        owner: whose contexts it may use; empty: anybody's.
        store: whether its context may be kept.
        done: called in the engine's thread when the answer has ended, with an error if it failed.
        cached: tokens of the prompt that were not read again.
    """

    ids: Tensor
    sampling: SamplingConfig
    seed: int | None
    answer: Answer
    owner: str
    store: bool
    done: Callable[[Exception | None], None]
    cached: int = 0
    cancelled: threading.Event = field(default_factory=threading.Event)
    since: float = field(default_factory=time.monotonic)

    def check(self) -> None:
        """Raises Cancelled if nobody waits any more."""
        if self.cancelled.is_set():
            raise Cancelled


class JobThread:
    """A thread that answers requests, from `start` to `close`.

    Args:
        max_waiting: requests that may wait.
        say: gets a line about a request that failed.
    """

    def __init__(self, max_waiting: int, say: Say) -> None:
        self.metrics = Metrics()
        self.metrics.waiting.set_function(lambda: self.num_waiting)
        self._max_waiting, self._say, self._closing = max_waiting, say, False
        self._waiting, self._changed = deque[Job](), threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kvcli-engine", daemon=True)

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    @property
    def is_alive(self) -> bool:
        """Whether requests are answered."""
        return self._thread.is_alive() and not self._closing

    def submit(self, job: Job) -> None:
        """Queues a request; ApiError: too many wait, or the server ends."""
        with self._changed:
            self._drop_cancelled()
            if not self.is_alive:
                raise ApiError(503, "the server ends")
            if len(self._waiting) >= self._max_waiting:
                raise ApiError(429, "too many requests wait; try again later", code="rate_limit_exceeded")
            self._waiting.append(job)
            self._changed.notify()

    def _drop_cancelled(self) -> None:
        """Ends requests that wait for which nobody waits any more; the caller holds the lock."""
        for job in [*self._waiting]:
            if job.cancelled.is_set():
                self._waiting.remove(job)
                job.done(Cancelled())

    def start(self) -> None:
        """Begins to answer."""
        self._thread.start()

    def close(self) -> None:
        """Ends after the answers that are being made; those that wait fail."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while self._answer():
            pass
        for job in self._waiting:
            job.done(ApiError(503, "the server ends"))

    def _answer(self) -> bool:
        """Waits for requests and works on some; returns False at the end."""
        raise NotImplementedError

    @contextmanager
    def _reporting_failures(self, jobs: Collection[Job]) -> Iterator[None]:
        """Tells requests if what is done for them fails."""
        try:
            yield
        except Exception as error:
            self._fail(jobs, error)

    def _fail(self, jobs: Collection[Job], error: Exception) -> None:
        """Tells requests of an error."""
        if not isinstance(error, Cancelled):
            self._say(f"a request failed: {type(error).__name__}: {error_text(error)}")
        if not isinstance(error, Cancelled | KvcliError):  # memory above all
            self._free_memory()
        for job in jobs:
            job.done(error)

    def _free_memory(self) -> None:
        """Forgets what is kept, which may need the memory that was not there."""
