"""One thread that makes the tokens of all requests, in their order; those that wait are decoded as one batch."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from kvcli.attention.session import Session
from kvcli.cache.snapshot import Snapshot, join
from kvcli.contexts import ContextStore
from kvcli.errors import KvcliError
from kvcli.models.load import LoadedModel
from kvcli.progress import Say, say_nothing
from kvcli.registry import method_name
from kvcli.serve.jobs import Cancelled, Job, JobThread
from kvcli.serve.prefixes import Prefix, Prefixes
from kvcli.serve.requests import ApiError

Prefilled = tuple[Job, Prefix, Tensor, Snapshot | None]
"""A request, the cache of its prompt and its tokens [1, time]; with others, one more than the snapshot of it holds."""


class Engine(JobThread):
    """Makes tokens for a session, from the first `submit` to `close`.

    Args:
        name: of the model, as clients see it.
        store, store_bytes: see `ServedContexts`; hot_bytes: see `Prefixes`.
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
        name: str,
        *,
        store: ContextStore | None,
        store_bytes: int | None = None,
        hot_bytes: int = 2**31,
        max_model_len: int | None = None,
        max_waiting: int = 64,
        max_batch: int = 8,
        say: Say = say_nothing,
    ) -> None:
        super().__init__(name, loaded.tokenizer, store, store_bytes, max_waiting, say)
        self.prefixes = Prefixes(session, self.contexts, hot_bytes)
        self.identity_of = self.prefixes.identity_of
        self.metrics.hot_bytes.set_function(lambda: self.prefixes.hot_bytes)
        self.max_length = max_model_len or loaded.spec.max_position_embeddings
        self.method, self.bits = method_name(session.method.name, dict(session.config)), session.true_bits
        self._session, self._max_batch = session, max_batch
        self._thread.start()

    def submit(self, job: Job) -> None:
        """As that of `JobThread`; ApiError: what is asked for needs the logits of every token."""
        for name, value in (("logprobs", job.num_logprobs), ("response_format", job.grammar)):
            if value is not None:
                raise ApiError(400, f"{name} is served by 'kvcli serve --continuous' alone", name)
        super().submit(job)

    def _answer(self) -> bool:
        jobs = self._next()
        single, ready = len(jobs) == 1, list[Prefilled]()
        for job in jobs:
            with self._reporting_failures([job]):
                ready.append(self._prefill(job, single))
        if ready:
            with self._reporting_failures([job for job, *_ in ready]):
                self._decode(ready, single)
        return bool(jobs)

    def _next(self) -> list[Job]:
        """The next request, and those after it that can be decoded together with it; none at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._waiting)
            if self._closing:
                return []
            jobs = [self._begin()]
            while self._waiting and len(jobs) < self._max_batch and self._together([*jobs, self._waiting[0]]):
                jobs.append(self._begin())
            return jobs

    def _together(self, jobs: list[Job]) -> bool:
        """Whether requests can be one batch, in which the longest prompt goes on as long as the longest answer."""
        length = max(job.ids.shape[1] for job in jobs) + max(job.sampling.max_new_tokens for job in jobs)
        (one, *others) = {replace(job.sampling, max_new_tokens=1) for job in jobs}
        alike = one.temperature == 0 and not others and self._session.rope.switch is None
        return alike and length <= self.max_length and self.prefixes.joinable

    def _fail(self, jobs: Collection[Job], error: Exception) -> None:
        if not isinstance(error, Cancelled | KvcliError):  # memory above all, which what is kept takes
            self.prefixes.hot.clear()
        super()._fail(jobs, error)

    def _prefill(self, job: Job, single: bool) -> Prefilled:
        """Reads a prompt up to its last boundary; if others follow, all of it, and its first token is made as alone."""
        job.check()
        prefix = self.prefixes.read(job.ids, job.owner, job.store, lambda count: job.check())
        job.cached = prefix.reused
        if prefix.source == "disk":
            job.from_disk = prefix.reused
            self.metrics.load.observe(prefix.load_s)
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
            for job, row in zip(jobs, tokens.tolist(), strict=True):
                if job not in unended:
                    continue
                ended = True  # by an error, too, of which no other request is told
                with self._reporting_failures([job]):
                    job.check()
                    if ended := self._feed(job, row):
                        self._finish(job)
                if ended:
                    unended.remove(job)
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
