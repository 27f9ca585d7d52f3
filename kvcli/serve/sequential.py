"""One request at a time, with a cache as sessions have it: for methods and models that pages do not take."""

import secrets
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from kvcli.attention.generation import prefill
from kvcli.attention.session import Session
from kvcli.errors import CacheError, ContextError, KvcliError, ModelError, UsageError
from kvcli.models.load import LoadedModel
from kvcli.serve.jobs import Cancelled, Job, JobThread
from kvcli.serve.prefixes import Prefix, Prefixes
from kvcli.serve.requests import ApiError
from kvcli.serve.sampler import Sampler, add_prompt_logprobs, choose

_CHUNK = 4096
"""Tokens of a pass that reads documents again."""


class SequentialEngine(JobThread):
    """Makes the tokens of requests in their order, from the first `submit` to `close`.

    Args:
        hot_bytes: see `Prefixes`.
        max_model_len: tokens of a prompt and its answer; None: as many as the model has positions.
        others: as of `JobThread`.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        session: Session,
        name: str,
        *,
        hot_bytes: int = 2**31,
        max_model_len: int | None = None,
        **others: Any,
    ) -> None:
        super().__init__(name, session, loaded.tokenizer, **others)
        self.max_length = max_model_len or loaded.spec.max_position_embeddings
        self.prefixes = Prefixes(session, self.contexts, hot_bytes)
        self.reading, self.takes_documents = self.prefixes.reading, True
        self.metrics.hot_bytes.set_function(lambda: self.prefixes.hot_bytes)
        self._thread.start()

    def _answer(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._waiting)
            if self._closing:
                return False
            job = self._begin()
        with self._reporting_failures([job]):
            prefix = self._prefill(job)
            with suppress(Cancelled):
                self._decode(job, prefix)
            if job.store:
                self.prefixes.keep(prefix)
        return True

    def _fail(self, jobs: Collection[Job], error: Exception) -> None:
        if not isinstance(error, Cancelled | KvcliError | ApiError):  # memory above all, which what is kept takes
            self.prefixes.hot.clear()
        super()._fail(jobs, error)

    def _beside(self, job: Job) -> Prefix:
        """The cache of a prompt's documents side by side, which is not kept."""
        store, started = self.contexts.store, time.monotonic()
        assert store is not None
        try:
            contexts = [store.load(store.whole(name)) for name in job.documents]
            composed = self.session.compose(contexts, repair=job.repair, prefill_chunk=_CHUNK)
        except (CacheError, ContextError, UsageError) as error:
            raise ApiError(400, str(error), "documents") from error
        self.metrics.load.observe(time.monotonic() - started)
        count = composed.input_ids.shape[1]
        if not torch.equal(composed.input_ids.cpu(), job.ids[:, :count]):
            raise ApiError(409, "a document was replaced meanwhile", "documents")
        if job.ids.shape[1] + composed.cache.gap + job.sampling.max_new_tokens > self.max_length:
            raise ApiError(400, f"with the positions between documents, it exceeds {self.max_length}", "documents")
        job.cached = job.from_disk = count - composed.reread
        return Prefix(composed.cache, job.ids, self.identity_of(job.owner, count))

    def _prefill(self, job: Job) -> Prefix:
        """Reads a prompt up to its last boundary."""
        job.check()
        if job.documents:
            return self._beside(job)
        on_logits = partial(add_prompt_logprobs, job) if job.prompt_logprobs else None
        prefix = self.prefixes.read(job.ids, job.owner, job.store, lambda count: job.check(), on_logits)
        job.cached = prefix.reused
        if prefix.source == "disk":
            job.from_disk = prefix.reused
            self.metrics.load.observe(prefix.load_s)
        return prefix

    def _decode(self, job: Job, prefix: Prefix) -> None:
        """Makes tokens until the answer has ended, also by an error, and its client was told; then raises Cancelled."""
        ids, begun = job.ids.to(self.session.model.device), False

        def on_tokens(tokens: Tensor, *told: Any) -> None:
            nonlocal begun
            with self._reporting_failures([job]):
                job.check()
                if not self._feed(job, tokens[0].tolist(), *told):
                    if not begun:
                        time.sleep(0.001)  # gives Python's lock to the event loop, which sends the first token
                    begun = True
                    return
                self._finish(job)
            raise Cancelled

        if job.num_logprobs is not None or job.grammar is not None:
            self._decode_in_passes(job, ids, prefix, on_tokens)
        torch.manual_seed(secrets.randbits(63) if job.seed is None else job.seed)
        self.session.generate(ids, sampling=job.sampling, cache=prefix.cache, on_tokens=on_tokens)

    @torch.inference_mode()
    def _decode_in_passes(self, job: Job, ids: Tensor, prefix: Prefix, on_tokens: Callable[..., None]) -> NoReturn:
        """The same where the logits of each token are needed on the way."""
        sampler, whole = Sampler(job, ids.device, self.session.spec.vocab_size), job.prompt_logprobs
        while True:
            logits = prefill(self.session.model, prefix.cache, ids, None, None, all_logits=whole)
            if whole:
                add_prompt_logprobs(job, ids.shape[1] - logits.shape[1], logits[0])
                logits, whole = logits[:, -1], False
            if not logits.isfinite().all():
                raise ModelError("the model computed logits that are not finite")
            token = choose([sampler], sampler.scores(logits))
            ids = torch.cat((ids, token), 1)
            on_tokens(token, *sampler.take(int(token), logits))
