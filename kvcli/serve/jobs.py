"""Requests on their way through a thread that makes tokens."""

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Gauge
from torch import Tensor

from kvcli.attention.generation import SamplingConfig
from kvcli.attention.session import Session
from kvcli.cache.identity import CacheIdentity
from kvcli.contexts import ContextStore
from kvcli.errors import error_text
from kvcli.progress import Say, say_nothing
from kvcli.registry import method_name
from kvcli.serve.answers import Answer
from kvcli.serve.grammar import Grammar
from kvcli.serve.metrics import Metrics
from kvcli.serve.requests import ApiError
from kvcli.serve.store import ServedContexts


class Cancelled(Exception):
    """Nobody waits for an answer any more."""


@dataclass(eq=False)
class Job:
    """A request on its way through the engine."""

    ids: Tensor  # prompt, int64 [1, time] on the CPU
    sampling: SamplingConfig
    seed: int | None
    answer: Answer
    owner: str  # whose contexts it may use; empty: anybody's
    store: bool  # whether its context may be kept
    done: Callable[[Exception | None], None]  # called in the engine's thread at the answer's end, or with its error
    num_logprobs: int | None = None  # most probable tokens that are told at each place; None: no probabilities
    grammar: Grammar | None = None  # which the answer follows
    prompt_logprobs: bool = False  # whether these are told of the prompt's tokens, too; all of it is read then
    documents: tuple[str, ...] = ()  # contexts that the prompt begins with, side by side
    repair: float = 0.0  # share of their tokens that is read again
    cached: int = 0  # tokens of the prompt that were not read again
    from_disk: int = 0  # of them on disk
    cancelled: threading.Event = field(default_factory=threading.Event)
    since: float = field(default_factory=time.monotonic)  # when it came; then when it was begun
    begun: float = 0.0
    first: float = 0.0  # when it had its first token, and the last one so far
    last: float = 0.0

    def check(self) -> None:
        """Raises Cancelled if nobody waits any more."""
        if self.cancelled.is_set():
            raise Cancelled


class JobThread(ABC):
    """A thread that answers requests, once it was started, until `close`.

    Args:
        name: of the model, as clients see it.
        session: of the model and the method.
        tokenizer, store, store_bytes: see `ServedContexts`.
        max_waiting: requests that may wait.
        say: gets a line about a request that failed.

    `method` is that of the session with its bits, `bits` those per value of what is encoded.
    """

    takes_documents = False  # whether prompts can begin with contexts that they name
    max_length: int  # tokens of a prompt and its answer
    reading: str  # how prompts are read, on which contexts depend

    def __init__(
        self,
        name: str,
        session: Session,
        tokenizer: Any,
        *,
        store: ContextStore | None = None,
        store_bytes: int | None = None,
        max_waiting: int = 64,
        say: Say = say_nothing,
    ) -> None:
        self.name, self.session, self.metrics = name, session, Metrics(name)
        self.method, self.bits = method_name(session.method.name, dict(session.config)), session.true_bits
        self.contexts = ServedContexts(store, tokenizer, store_bytes, say, self.metrics.count_stored)
        self.metrics.store_bytes.set_function(lambda: self.contexts.nbytes)
        self._max_waiting, self._say, self._closing = max_waiting, say, False
        self._waiting, self._unended, self._changed = deque[Job](), set[Job](), threading.Condition()
        self.metrics.of_vllm(Gauge, "num_requests_waiting").set_function(lambda: len(self._waiting))
        running = self.metrics.of_vllm(Gauge, "num_requests_running")
        running.set_function(lambda: len(self._unended) - len(self._waiting))
        self._thread = threading.Thread(target=self._run, name="kvcli-engine", daemon=True)

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
            self._unended.add(job)
            self._changed.notify()

    def _drop_cancelled(self) -> None:
        """Ends requests that wait for which nobody waits any more; the caller holds the lock."""
        for job in [*self._waiting]:
            if job.cancelled.is_set():
                self._waiting.remove(job)
                self._finish(job, Cancelled())

    def close(self) -> None:
        """Ends after the answers that are being made; those that wait fail, and what was read is on disk."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        self.contexts.close()

    def _run(self) -> None:
        try:
            while self._answer():
                pass
        finally:  # also after an error that nobody expects, or clients would wait for ever
            self._closing = True
            for job in [*self._unended]:
                self._finish(job, ApiError(503, "the server ends"))

    @abstractmethod
    def _answer(self) -> bool:
        """Waits for requests and works on some; returns False at the end."""

    def identity_of(self, owner: str, length: int = 1) -> CacheIdentity:
        """What contexts of so many tokens of a client are bound to."""
        return self.contexts.identity(self.session, self.reading, owner, length)

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
        for job in jobs:
            self._finish(job, error)

    def _begin(self) -> Job:
        """Takes the request that waits longest; the caller holds the lock."""
        job = self._waiting.popleft()
        job.begun = time.monotonic()
        self.metrics.add(request_queue_time_seconds=job.begun - job.since)
        return job

    def _feed(self, job: Job, tokens: Sequence[int], *told: Any) -> bool:
        """`Answer.feed` of a request."""
        before, count, metrics = job.answer.num_tokens, job.ids.shape[1], self.metrics
        ended = job.answer.feed(tokens, *told)
        made, now = job.answer.num_tokens - before, time.monotonic()
        metrics.add(generation_tokens=made)
        if before:
            for _ in range(made):
                metrics.add(inter_token_latency_seconds=(now - job.last) / made)
        else:
            job.first, hits = now, job.cached - job.from_disk
            metrics.add(time_to_first_token_seconds=now - job.since, request_prefill_time_seconds=now - job.begun)
            metrics.add(prompt_tokens=count, prefix_cache_queries=count, prefix_cache_hits=hits)
            metrics.add(external_prefix_cache_queries=count - hits, external_prefix_cache_hits=job.from_disk)
        job.last = now
        return ended

    def _finish(self, job: Job, error: Exception | None = None) -> None:
        """Tells a request, once, that its answer has ended or failed."""
        with self._changed:
            if job not in self._unended:
                return
            self._unended.remove(job)
        now, metrics, answer = time.monotonic(), self.metrics, job.answer
        reason = "length" if answer.finish_reason == "length" else "stop"
        metrics.ended["abort" if isinstance(error, Cancelled) else reason if error is None else "error"].inc()
        if error is None:
            metrics.add(e2e_request_latency_seconds=now - job.since, request_inference_time_seconds=now - job.begun)
            metrics.add(request_decode_time_seconds=now - job.first)
            metrics.add(request_prompt_tokens=job.ids.shape[1], request_generation_tokens=answer.num_tokens)
        job.done(error)
