"""One thread that makes the tokens of all requests, in their order; those that wait are decoded as one batch."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvcli.attention.generation import SamplingConfig
from kvcli.attention.session import Session
from kvcli.cache.snapshot import Snapshot, join
from kvcli.contexts import ContextStore
from kvcli.errors import KvcliError, error_text
from kvcli.models.load import LoadedModel
from kvcli.progress import Say, say_nothing
from kvcli.registry import method_name
from kvcli.serve.answers import Answer
from kvcli.serve.metrics import Metrics
from kvcli.serve.prefixes import Prefix, Prefixes
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
        cached: tokens of the prompt that were not read again; None: it is not known.
    """

    ids: Tensor
    sampling: SamplingConfig
    seed: int | None
    answer: Answer
    owner: str
    store: bool
    done: Callable[[Exception | None], None]
    cached: int | None = 0
    cancelled: threading.Event = field(default_factory=threading.Event)
    since: float = field(default_factory=time.monotonic)

    def check(self) -> None:
        """Raises Cancelled if nobody waits any more."""
        if self.cancelled.is_set():
            raise Cancelled


Prefilled = tuple[Job, Prefix, Tensor, Snapshot | None]
"""A request, the cache of its prompt and its tokens [1, time]; with others, one more than the snapshot of it holds."""


class Engine:
    """Makes tokens for a session, from the first `submit` to `close`.

    Args:
        store, store_bytes, hot_bytes: see `Prefixes`.
        max_model_len: tokens of a prompt and its answer; None: as many as the model has positions.
        max_waiting: requests that may wait.
        max_batch: requests that are decoded together.
        say: gets a line about a request that failed.

    Attributes:
        max_length: tokens of a prompt and its answer.
        method: with its bits.
        bits: per value of what is encoded.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        session: Session,
        *,
        store: ContextStore | None,
        store_bytes: int | None = None,
        hot_bytes: int = 2**31,
        max_model_len: int | None = None,
        max_waiting: int = 64,
        max_batch: int = 8,
        say: Say = say_nothing,
    ) -> None:
        self.metrics = Metrics()
        self.prefixes = Prefixes(
            session, loaded.tokenizer, store, store_bytes, hot_bytes, say, self.metrics.count_stored
        )
        self.metrics.waiting.set_function(lambda: self.num_waiting)
        self.metrics.hot_bytes.set_function(lambda: self.prefixes.hot_bytes)
        self.metrics.store_bytes.set_function(self.prefixes.store_bytes)
        self.max_length = max_model_len or loaded.spec.max_position_embeddings
        self.method, self.bits = method_name(session.method.name, dict(session.config)), session.true_bits
        self._session, self._max_waiting, self._max_batch, self._say = session, max_waiting, max_batch, say
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
        """Queues a request; ApiError: too many wait, or the server ends."""
        with self._changed:
            for other in [*self._waiting]:
                if other.cancelled.is_set():
                    self._waiting.remove(other)
                    other.done(Cancelled())
            if not self.is_alive:
                raise ApiError(503, "the server ends")
            if len(self._waiting) >= self._max_waiting:
                raise ApiError(429, "too many requests wait; try again later", code="rate_limit_exceeded")
            self._waiting.append(job)
            self._changed.notify()

    def close(self) -> None:
        """Ends after the answers that are being made; those that wait fail. What was read is on disk then."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        self.prefixes.close()

    def _run(self) -> None:
        while jobs := self._next():
            single, ready = len(jobs) == 1, list[Prefilled]()
            for job in jobs:
                with self._reporting_failures([job]):
                    ready.append(self._prefill(job, single))
            if ready:
                with self._reporting_failures([job for job, *_ in ready]):
                    self._decode(ready, single)
        for job in self._waiting:
            job.done(ApiError(503, "the server ends"))

    def _next(self) -> list[Job]:
        """The next request, and those after it that can be decoded together with it; none at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._waiting)
            if self._closing:
                return []
            jobs = [self._waiting.popleft()]
            while self._waiting and len(jobs) < self._max_batch and self._together([*jobs, self._waiting[0]]):
                jobs.append(self._waiting.popleft())
            return jobs

    def _together(self, jobs: list[Job]) -> bool:
        """Whether requests can be one batch, in which the longest prompt goes on as long as the longest answer."""
        length = max(job.ids.shape[1] for job in jobs) + max(job.sampling.max_new_tokens for job in jobs)
        (one, *others) = {replace(job.sampling, max_new_tokens=1) for job in jobs}
        alike = one.temperature == 0 and not others and self._session.rope.switch is None
        return alike and length <= self.max_length and self.prefixes.joinable

    @contextmanager
    def _reporting_failures(self, jobs: list[Job]) -> Iterator[None]:
        """Tells requests if what is done for them fails."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, Cancelled):
                self._say(f"a request failed: {type(error).__name__}: {error_text(error)}")
            if not isinstance(error, Cancelled | KvcliError):  # memory above all: what is kept may need it
                self.prefixes.hot.clear()
            for job in jobs:
                job.done(error)

    def _prefill(self, job: Job, single: bool) -> Prefilled:
        """Reads a prompt up to its last boundary; if others follow, all of it, and its first token is made as alone."""
        job.check()
        started = time.monotonic()
        prefix = self.prefixes.read(job.ids, job.owner, job.store, lambda count: job.check())
        job.cached = prefix.reused
        self.metrics.prefixes.labels(prefix.source).inc()
        self.metrics.load.observe(prefix.load_s)
        self.metrics.prefill.observe(time.monotonic() - started - prefix.load_s)
        self.metrics.tokens.labels("prompt").inc(job.ids.shape[1])
        self.metrics.tokens.labels("cached").inc(prefix.reused)
        ids = job.ids.to(self._session.model.device)
        if single:
            return job, prefix, ids, None
        one = replace(job.sampling, max_new_tokens=1)
        ids = self._session.generate(ids, sampling=one, cache=prefix.cache).sequences
        snapshot = prefix.cache.snapshot(ids.device)
        self._cache_prefix(job, prefix)  # the next one may begin alike
        return job, prefix, ids, snapshot

    def _decode(self, ready: list[Prefilled], single: bool) -> None:
        """Makes tokens until all answers have ended; each is told as soon as it has."""
        session = self._session
        jobs = [job for job, *_ in ready]
        most = max(job.sampling.max_new_tokens for job in jobs)
        rows, snapshots = [ids for *_, ids, _ in ready], [x for *_, x in ready if x is not None]
        ids, mask, cache = rows[0], None, ready[0][1].cache
        if not single:
            longest = max(x.shape[1] for x in rows)
            left = [longest - x.shape[1] for x in rows]
            mask = (torch.arange(longest) >= torch.tensor(left)[:, None]).long().to(ids.device)
            # padded with a token that a prompt has: others are not penalized as repetitions
            ids = torch.cat([torch.cat((x[:, :1].expand(1, n), x), 1) for n, x in zip(left, rows, strict=True)])
            cache = session.new_cache()
            cache.restore(join(snapshots))
        begun, unended = False, set(jobs)

        def on_tokens(tokens: Tensor) -> None:
            nonlocal begun
            if not begun:
                for job in jobs:
                    self.metrics.first.observe(time.monotonic() - job.since)
            for job, row in zip(jobs, tokens.tolist(), strict=True):
                if job not in unended:
                    continue
                ended = True  # by an error, too, of which no other request is told
                with self._reporting_failures([job]):
                    job.check()
                    if ended := job.answer.feed(row):
                        job.done(None)
                if ended:
                    unended.remove(job)
                    self.metrics.tokens.labels("generated").inc(job.answer.num_tokens)
            if not unended:
                raise Cancelled
            if not begun:
                time.sleep(0.001)  # gives Python's lock to the event loop, which sends the first token
            begun = True

        seed = jobs[0].seed
        torch.manual_seed(secrets.randbits(63) if seed is None else seed)
        with suppress(Cancelled):
            if not single:
                on_tokens(ids[:, -1:])
            sampling = replace(jobs[0].sampling, max_new_tokens=most if single else most - 1)
            session.generate(ids, mask, sampling=sampling, cache=cache, on_tokens=on_tokens)
        if single:
            self._cache_prefix(jobs[0], ready[0][1])

    def _cache_prefix(self, job: Job, prefix: Prefix) -> None:
        if job.store:
            self.prefixes.keep(prefix)
