"""Requests that join and leave between passes: a pass makes a token of each that runs, and reads of new prompts."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from prometheus_client import Gauge
from torch import Tensor

from kvcli.cache.identity import CacheIdentity
from kvcli.errors import CacheError, ModelError, UsageError
from kvcli.paged import content
from kvcli.paged.model import PagedModel
from kvcli.paged.requests import ScheduledRequest
from kvcli.serve.answers import TokenLogprob
from kvcli.serve.jobs import Cancelled, Job, JobThread
from kvcli.serve.pages import LONG_PASS, PagePool, pass_ends, segments
from kvcli.serve.sampler import Sampler, add_prompt_logprobs, choose


@dataclass(eq=False)
class Request:
    """A request that has pages."""

    job: Job
    model: PagedModel
    ring: int  # of its recent tokens
    ends: list[tuple[int, bytes]] = field(default_factory=list)  # of `segments` of the prompt
    pages: list[int] = field(default_factory=list)  # of all its tokens, those to come included
    own: set[int] = field(default_factory=set)  # pages of no segment
    segments: list[bytes] = field(default_factory=list)  # of the prompt that are shared, by their digests
    num_computed: int = 0  # tokens whose keys and values are in pages
    end_of_segment: int = 0  # of what has no exact tokens any more
    token: int = -1  # that was made last and is to be read

    @cached_property
    def prompt(self) -> list[int]:
        """Its tokens."""
        tokens: list[int] = self.job.ids[0].tolist()
        return tokens

    @property
    def is_prompt(self) -> bool:
        """Whether tokens of the prompt are left to be read."""
        return self.num_computed < len(self.prompt)

    @property
    def next_end(self) -> tuple[int, bytes]:
        """Where the next pass over the prompt ends, and the digest up to there; at its end that of no segment."""
        return next((x for x in self.ends if x[0] > self.num_computed), (len(self.prompt), b""))

    def scheduled(self) -> ScheduledRequest:
        """It in the next pass."""
        tokens = self.prompt[self.num_computed : self.next_end[0]] if self.is_prompt else [self.token]
        return ScheduledRequest(tokens, self.num_computed, self.end_of_segment, self.pages, self.ring)

    @cached_property
    def sampler(self) -> Sampler:
        """What chooses its tokens."""
        return Sampler(self.job, self.model.device, self.model.vocab_size)


class ContinuousEngine(JobThread):
    """Makes tokens of all requests at once, from the first `submit` to `close`.

    Args:
        model: whose pages hold the contexts; it is open.
        max_model_len: tokens of a prompt and its answer; None: as many as the pages hold.
        others: as of `JobThread`.

    UsageError: a `max_model_len` that the pages do not hold.
    """

    def __init__(
        self, model: PagedModel, tokenizer: object, name: str, *, max_model_len: int | None = None, **others: Any
    ) -> None:
        super().__init__(name, model.session, tokenizer, **others)
        if max_model_len is not None and max_model_len > model.max_length:
            raise UsageError(f"pages hold {model.max_length} tokens, not {max_model_len}; give them more memory")
        self.max_length = max_model_len or model.max_length
        self.reading = f"{LONG_PASS} pages at once"
        self.model, self._pool, self._unread = model, PagePool(model.num_pages), max(1, model.residual_length)
        self._running, self._rings = list[Request](), [*range(1, model.num_rings + 1)]
        self._untold = list[tuple[Request, TokenLogprob | None, bool]]()
        if self.contexts.store is not None:
            self.contexts.store.block_tokens = model.page_size
        self.metrics.of_vllm(Gauge, "kv_cache_usage_perc").set_function(self._usage)
        self.metrics.hot_bytes.set_function(lambda: self._pool.num_used * model.page_bytes)
        self._thread.start()

    def identity_of(self, owner: str, length: int = 1) -> CacheIdentity:
        return replace(super().identity_of(owner, length), page_size=self.model.page_size)

    def _answer(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._waiting or self._running)
            if self._closing and not self._running:
                return False
            self._drop_cancelled()
            admitted = list[Request]()
            while self._waiting and not self._closing and (request := self._admit(self._waiting[0])) is not None:
                admitted.append(request)
                self._begin()
        for request in admitted:
            with self._ending(request):
                self._find(request)
        for request in [*self._running]:
            if request.job.cancelled.is_set():
                self._end([request], Cancelled())
        ready = self._next_pass()
        # graphs are of one or the other; who begins does not wait for those who go on
        parts = [[x for x in ready if x.is_prompt], [x for x in ready if not x.is_prompt]]
        for part in [ready] if self.model.captured is None else parts:
            if some := [request for request in part if request.job in self._unended]:
                self._run_pass(some)
        return True

    def _usage(self) -> float:
        return len({page for request in [*self._running] for page in request.pages}) / self.model.num_pages

    def _admit(self, job: Job) -> Request | None:
        """Gives a request a ring and pages for all its tokens; None: there are none."""
        if not self._rings:
            return None
        size = self.model.page_size
        request = Request(job, self.model, self._rings[0])
        request.ends += segments(request.prompt, size, self._unread, job.owner)
        self._share(request)
        needed = -(-(job.ids.shape[1] + job.sampling.max_new_tokens) // size) - len(request.pages)
        if needed > self._pool.num_available:
            self._pool.release(request.segments, ())
            return None
        own = self._pool.take(needed)
        request.pages += own
        request.own.update(own)
        self._rings.pop(0)
        self._running.append(request)
        return request

    def _find(self, request: Request) -> None:
        """Fills pages with what is on disk of a prompt, if that is more than what others have in memory."""
        self._share(request)  # with what was found for others since it was admitted
        if not request.ends or request.job.prompt_logprobs:
            return
        loaded, name = self._load(request), self._pool.on_disk.get(request.ends[-1][1])
        if not loaded and not request.next_end[1] and name is not None:
            self.contexts.touch(name, partial(self._pool.forget_disk, name))
        request.job.from_disk = loaded
        request.job.cached += loaded

    def _load(self, request: Request) -> int:
        """How many more tokens were on disk, which are in the request's pages and shared then."""
        size, ends = self.model.page_size, [end for end, _ in request.ends]

        def fit(stored: int, length: int) -> int:
            return max((x for x in {*ends} & {*pass_ends(stored, size)} if x <= length), default=0)

        started, wanted = time.monotonic(), request.job.ids[:, : ends[-1]]
        identity = self.identity_of(request.job.owner)
        found = self.contexts.load(wanted, identity, fit, request.num_computed, self.model.device)
        if found is None:
            return 0
        (stored, length), context = found
        try:
            content.put(self.model, context.snapshot, request.pages[: length // size], request.num_computed // size)
        except CacheError as error:
            self._say(f"context '{stored.name}' is passed over: {error}")
            return 0
        before = request.num_computed
        while request.num_computed < length:
            end, digest = request.next_end
            self._keep(request)
            self._pool.on_disk[digest] = stored.name
            request.num_computed = end
        self.metrics.load.observe(time.monotonic() - started)
        return length - before

    def _store(self, request: Request) -> None:
        """Copies the segments of a prompt for the thread that writes; does nothing where that is behind."""
        if not request.job.store or not request.ends or self.contexts.is_busy:
            return
        end, digest = request.ends[-1]
        if digest in self._pool.on_disk:
            return
        identity, ids = self.identity_of(request.job.owner), request.job.ids[:, :end].clone()
        name = self.contexts.name(identity, ids)
        snapshot = content.take(self.model, request.pages[: end // self.model.page_size])
        self._pool.on_disk.update((digest, name) for _, digest in request.ends)
        self.contexts.put(snapshot, identity, ids, partial(self._pool.forget_disk, name))

    def _share(self, request: Request) -> None:
        """Lets a request go on from what others have read of its prompt."""
        size, anew = self.model.page_size, request.job.prompt_logprobs
        while request.is_prompt and not anew and (pages := self._pool.share(request.next_end[1])) is not None:
            (end, digest), start = request.next_end, request.num_computed // size
            replaced = request.pages[start : end // size]
            self._pool.release((), replaced)
            request.own.difference_update(replaced)
            request.pages[start : end // size] = pages
            request.segments.append(digest)
            request.num_computed = request.end_of_segment = end
            request.job.cached += len(pages) * size

    def _next_pass(self) -> list[Request]:
        """The requests of the next pass: those that make tokens, and as many prompts as a pass has room for."""
        ready = [request for request in self._running if not request.is_prompt]
        room, reading = LONG_PASS * self.model.page_size, set[bytes]()
        for request in self._running:
            if not request.is_prompt:
                continue
            self._share(request)
            end, digest = request.next_end
            count = end - request.num_computed
            if digest in reading and digest:
                continue  # another one reads the same; its pages are there after this pass
            if count > room and reading:
                break
            room -= count
            reading.add(digest)
            ready.append(request)
        return ready

    def _run_pass(self, ready: list[Request]) -> None:
        """Reads what is next of requests, and makes a token of each whose prompt is read."""
        new = [request.scheduled() for request in ready]
        try:
            logits = self._logits(ready, new).float()
            self._tell()  # while the GPU computes them
            finite = logits.isfinite().all(1).tolist()
            out_of_range = self._out_of_range(ready, new)
        except Exception as error:  # what it has written of these requests is not known
            self._tell()
            self._end([request for request in ready if request.job in self._unended], error)
            return
        chosen = list[tuple[Request, Tensor, Tensor]]()
        for request, tokens, row, is_finite in zip(ready, new, logits, finite, strict=True):
            if request.job not in self._unended:
                continue
            if request.is_prompt and request not in out_of_range:
                self._keep(request)
            request.num_computed += len(tokens.tokens)
            if request in out_of_range:
                self._end([request], out_of_range[request])
            elif not is_finite:
                self._end([request], ModelError("the model computed logits that are not finite"))
            elif not request.is_prompt:
                with self._ending(request):
                    if not request.job.answer.num_tokens:
                        self._store(request)
                    chosen.append((request, request.sampler.scores(row.unsqueeze(0)), row))
        if chosen:
            made = choose([request.sampler for request, *_ in chosen], torch.cat([scores for _, scores, _ in chosen]))
            for (request, _, row), token in zip(chosen, made.flatten().tolist(), strict=True):
                self._take(request, token, row)

    def _logits(self, ready: Sequence[Request], new: Sequence[ScheduledRequest]) -> Tensor:
        """Logits of the last token of each request, not finite where any of its are not; adds `prompt_logprobs`."""
        echoed = {request for request in ready if request.is_prompt and request.job.prompt_logprobs}
        if not echoed:
            return self.model.run(new)
        logits = self.model.run(new, all_logits=True).split([len(tokens.tokens) for tokens in new])
        finite = [bool(x.isfinite().all()) for x in logits]
        for request, its, is_finite in zip(ready, logits, finite, strict=True):
            if request in echoed and is_finite:
                add_prompt_logprobs(request.job, request.num_computed, its)
        return torch.stack([x[-1] if is_finite else x.sum(0) for x, is_finite in zip(logits, finite, strict=True)])

    def _out_of_range(self, ready: Sequence[Request], new: Sequence[ScheduledRequest]) -> dict[Request, CacheError]:
        """The requests of a pass with values that codes do not hold, found by reading each prompt again, alone.

        Such a pass has no exact earlier tokens, so that it leaves pages and rings as they are.
        """
        if (error := self.model.range_error()) is None:
            return {}
        found = dict[Request, CacheError]()
        for request, tokens in zip(ready, new, strict=True):
            if request.is_prompt and len(ready) > 1:
                self.model.run([tokens])
                if (its := self.model.range_error()) is not None:
                    found[request] = its
        return found or {request: error for request in ready if len(ready) == 1 or not request.is_prompt}

    def _keep(self, request: Request) -> None:
        """Shares what a pass has read of a prompt, if it was a segment, with others."""
        (end, digest), size = request.next_end, self.model.page_size
        if not digest:
            return
        request.end_of_segment = end
        if request.job.store:
            pages = request.pages[request.num_computed // size : end // size]
            request.own.difference_update(pages)
            request.segments.append(digest)
            self._pool.keep(digest, pages)

    def _take(self, request: Request, token: int, logits: Tensor) -> None:
        """Gives a request its next token, which was chosen by logits [vocab_size].

        Its text, but that of the first one, follows while a GPU is busy with the next pass, if there is one.
        """
        request.token, answer = token, request.job.answer
        with self._ending(request):
            told, is_over = request.sampler.take(token, logits.unsqueeze(0))
            self._untold.append((request, told, is_over))
            is_last = is_over or token in answer.ends or answer.num_tokens + 1 >= answer.max_tokens
            if is_last or not answer.num_tokens or self.model.captured is None:
                self._tell()

    def _tell(self) -> None:
        """Adds the tokens that were chosen to the answers, of which some end."""
        untold, self._untold = self._untold, []
        for request, *told in untold:
            with self._ending(request):
                if request.job in self._unended and self._feed(request.job, [request.token], *told):
                    self._end([request], None)

    @contextmanager
    def _ending(self, request: Request) -> Iterator[None]:
        """Ends a request, and no other, if what is done for it fails."""
        try:
            yield
        except Exception as error:
            self._end([request], error)

    def _end(self, requests: Sequence[Request], error: Exception | None) -> None:
        """Takes back what requests have, and tells them that their answers have ended or failed."""
        for request in requests:
            self._running.remove(request)
            self._rings.append(request.ring)
            self._pool.release(request.segments, request.own)
            if error is None:
                self._finish(request.job)
        if error is not None:
            self._fail([request.job for request in requests], error)
