"""One thread that makes the tokens of all requests, in their order; those that wait are decoded as one batch."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from kvcli.attention.generation import SamplingConfig, prefill
from kvcli.attention.session import Session
from kvcli.cache.snapshot import join
from kvcli.errors import KvcliError
from kvcli.serve.answers import Answer
from kvcli.serve.metrics import Metrics
from kvcli.serve.prefixes import Prefix, Prefixes


class Overloaded(Exception):
    """As many requests wait as may, or the server ends."""


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


class Engine:
    """Makes tokens for a session, from the first `submit` to `close`.

    Args:
        max_waiting: requests that may wait.
        max_batch: requests that are decoded together.
    """

    def __init__(
        self, session: Session, prefixes: Prefixes, metrics: Metrics, *, max_waiting: int, max_batch: int
    ) -> None:
        self._session, self._prefixes, self._metrics = session, prefixes, metrics
        self._max_waiting, self._max_batch = max_waiting, max_batch
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvcli-engine", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    @property
    def is_alive(self) -> bool:
        """Whether requests are answered."""
        return self._thread.is_alive() and not self._closing

    def submit(self, job: Job) -> None:
        """Queues a request; raises Overloaded if too many wait."""
        with self._changed:
            for other in [*self._waiting]:
                if other.cancelled.is_set():
                    self._waiting.remove(other)
                    other.done(Cancelled())
            if not self.is_alive or len(self._waiting) >= self._max_waiting:
                raise Overloaded
            self._waiting.append(job)
            self._changed.notify()

    def close(self) -> None:
        """Ends after the answers that are being made; those that wait fail. What was read is on disk then."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        self._prefixes.close()

    def _run(self) -> None:
        while jobs := self._next():
            ready = [pair for job in jobs if (pair := self._read(job)) is not None]
            if ready:
                self._attempt([job for job, _ in ready], lambda ready=ready: self._decode(ready))  # type: ignore[misc]
        for job in self._waiting:
            job.done(Overloaded())

    def _next(self) -> list[Job]:
        """The next request, and those after it that can be decoded together with it; none at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._waiting)
            if self._closing:
                return []
            jobs = [self._waiting.popleft()]
            together = jobs[0].sampling.temperature == 0 and self._prefixes.reusable
            while self._waiting and together and len(jobs) < self._max_batch:
                if replace(self._waiting[0].sampling, max_new_tokens=1) != replace(jobs[0].sampling, max_new_tokens=1):
                    break
                jobs.append(self._waiting.popleft())
            return jobs

    def _attempt(self, jobs: list[Job], work: Callable[[], None]) -> bool:
        """Does some work, and tells those whom it was for if it fails."""
        try:
            work()
            return True
        except Cancelled as error:
            failure: Exception = error
        except KvcliError as error:
            failure = error
        except Exception as error:  # memory above all: what is kept may need it
            self._prefixes.hot.clear()
            failure = error
        for job in jobs:
            job.done(failure)
        return False

    def _read(self, job: Job) -> tuple[Job, Prefix] | None:
        """Reads a prompt up to its last boundary."""
        prefixes: list[Prefix] = []

        def work() -> None:
            job.check()
            started = time.monotonic()
            prefix = self._prefixes.read(job.ids, job.owner, job.store, lambda count: job.check())
            job.cached = prefix.reused
            self._metrics.prefixes.labels(prefix.source).inc()
            self._metrics.load.observe(prefix.load_s)
            self._metrics.prefill.observe(time.monotonic() - started - prefix.load_s)
            self._metrics.tokens.labels("prompt").inc(job.ids.shape[1])
            self._metrics.tokens.labels("cached").inc(prefix.reused)
            prefixes.append(prefix)

        return (job, prefixes[0]) if self._attempt([job], work) else None

    def _decode(self, ready: list[tuple[Job, Prefix]]) -> None:
        """Makes tokens until all answers have ended; each is told as soon as it has."""
        session, device = self._session, self._session.model.device
        jobs = [job for job, _ in ready]
        most = max(job.sampling.max_new_tokens for job in jobs)
        ids, mask, cache = jobs[0].ids, None, ready[0][1].cache
        if len(jobs) > 1:
            longest = max(job.ids.shape[1] for job in jobs)
            left = [longest - job.ids.shape[1] for job in jobs]
            # padding is of tokens that a prompt has: those that it has not are not penalized as repetitions
            ids = torch.cat([torch.cat((x.ids[:, :1].expand(1, n), x.ids), 1) for x, n in zip(jobs, left, strict=True)])
            mask = torch.cat(
                [nn.functional.pad(torch.ones_like(x.ids), (n, 0)) for x, n in zip(jobs, left, strict=True)]
            )
            snapshots = []
            for job, prefix in ready:
                with torch.inference_mode():
                    if prefix.cache.get_seq_length() < job.ids.shape[1] - 1:
                        prefill(session.model, prefix.cache, job.ids[:, :-1].to(device), None, None)
                    snapshots.append(prefix.cache.snapshot(device))
            cache = session.new_cache()
            cache.restore(join(snapshots))
        first, unended = True, set(jobs)

        def on_tokens(tokens: Tensor) -> None:
            nonlocal first
            if first:
                for job in jobs:
                    self._metrics.first.observe(time.monotonic() - job.since)
                first = False
            for job, row in zip(jobs, tokens.tolist(), strict=True):
                if job in unended and (job.cancelled.is_set() or job.answer.feed(row)):
                    unended.remove(job)
                    self._metrics.tokens.labels("generated").inc(job.answer.num_tokens)
                    job.done(Cancelled() if job.cancelled.is_set() else None)
            if not unended:
                raise Cancelled

        seed = jobs[0].seed
        torch.manual_seed(secrets.randbits(63) if seed is None else seed)
        inputs = ids.to(device), None if mask is None else mask.to(device)
        with suppress(Cancelled):
            session.generate(
                *inputs,
                sampling=replace(jobs[0].sampling, max_new_tokens=most),
                past_key_values=cache,
                on_tokens=on_tokens,
            )
        for job, prefix in ready:
            if job.store:
                self._prefixes.keep(prefix)
