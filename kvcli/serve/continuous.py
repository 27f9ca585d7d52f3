"""Requests of several clients in the same passes, whose contexts are pages of transformers' continuous batching."""

from __future__ import annotations

import secrets
import threading
import time
from typing import Any

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, LogitsProcessorList
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.continuous_batching.model_runner import infer_max_single_request_tokens

from kvcli.attention.generation import NextToken
from kvcli.errors import ModelError, UsageError, error_text
from kvcli.models.load import LoadedModel
from kvcli.progress import Say, say_nothing
from kvcli.registry import method_name
from kvcli.serve.engine import Cancelled, Job
from kvcli.serve.metrics import Metrics
from kvcli.serve.requests import ApiError

_PASS_TOKENS = 1024
"""Tokens of a pass at most: transformers keeps a mask of so many rows, and earlier passes of a prompt are codes."""

_POLL_S = 0.05
"""Seconds after which requests are looked at whose clients may have gone away."""


class Sampler(ContinuousBatchingLogitsProcessor):
    """Leaves each request the token that its `NextToken` chooses; transformers then takes the most probable one."""

    supported_kwargs: dict[str, type] = {}
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self, choose: dict[str, NextToken]) -> None:
        self._choose, self._requests = choose, list[str]()

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        """The tensor is not used."""
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> Tensor:
        """Notes whose logits the next ones are."""
        self._requests = [request.state.request_id for request in requests_with_new_token]
        return torch.zeros(len(self._requests), dtype=torch.int32)

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        """Logits [rows, vocab_size]; ModelError: they are not finite."""
        if not scores[: len(self._requests)].isfinite().all():
            raise ModelError("the model computed logits that are not finite")
        for row, name in enumerate(self._requests):
            if (choose := self._choose.get(name)) is not None:
                token = choose(scores[row : row + 1])
                scores[row] = -torch.inf
                scores[row, token] = 0
        return scores


class ContinuousEngine:
    """Makes tokens of all requests at once; as `Engine`, but contexts are in memory alone.

    Args:
        loaded: a model for which `integrations.continuous_batching.enable` is open.
        hot_bytes: of pages at most; fewer where that many requests of the largest length need fewer.
        max_model_len, max_waiting, max_batch, say: see `Engine`.

    Attributes:
        max_length, method, bits: as of `Engine`; bits are those of a page, exact sinks included.
        session: whose codes the pages hold.
        num_tokens: of all pages.

    Raises:
        UsageError: a model that transformers does not batch, or a `max_model_len` that the pages do not hold.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        hot_bytes: int = 2**31,
        max_model_len: int | None = None,
        max_waiting: int = 64,
        max_batch: int = 8,
        say: Say = say_nothing,
    ) -> None:
        self._max_waiting, self._say, self._closing = max_waiting, say, False
        self._jobs, self._choose, self._lock = dict[str, Job](), dict[str, NextToken](), threading.Lock()
        spec, model = loaded.spec, loaded.model
        self._device, self._vocab_size = model.device, spec.vocab_size
        config = ContinuousBatchingConfig(
            num_blocks=1,
            max_batch_tokens=_PASS_TOKENS,
            max_requests_per_batch=max_batch,
            use_cuda_graph=False,
            use_async_batching=False,
        )
        try:
            self._manager = model.init_continuous_batching(GenerationConfig(eos_token_id=-1), config)
            self._manager.logit_processor = ContinuousBatchingLogitsProcessorList(
                LogitsProcessorList([Sampler(self._choose)])
            )
            self._manager.logit_processor.tensors_required = 1
            self._manager.warmup()  # with one block, to see how large requests are
        except ValueError as error:
            raise UsageError(f"transformers does not batch requests of this model: {error}") from error
        length, cache = max_model_len or spec.max_position_embeddings, self._manager.batch_processor.cache
        sectors = sum(x.needs_new_sectors("", 0, length) for x in cache.cache_allocators.values())
        hot_bytes = min(hot_bytes, sectors * max_batch * cache.bytes_per_sector)
        layers = model.config.get_text_config().num_hidden_layers
        block = config.page_size * layers * 2 * spec.kv_dim * model.dtype.itemsize  # one of transformers' own pages
        self._manager.batch_processor = None
        self._manager.continuous_batching_config.num_blocks = hot_bytes / block  # need not be whole
        self._manager.warmup()
        self._cache = cache = self._manager.batch_processor.cache
        self.max_length = min(length, infer_max_single_request_tokens(cache))
        if max_model_len is not None and max_model_len > self.max_length:
            raise UsageError(f"pages hold {self.max_length} tokens, not {max_model_len}; give them more memory")
        pages = cache.cache_allocators["full_attention"]
        self.session, self.num_tokens = pages.session, pages.num_blocks * pages.tokens_per_page
        self.method = method_name(self.session.method.name, dict(self.session.config))
        self.bits = self.session.true_bits
        self.metrics = Metrics()
        self.metrics.waiting.set_function(lambda: self.num_waiting)
        self.metrics.hot_bytes.set_function(lambda: self.nbytes - cache.compute_free_capacity(relative=False))
        self._manager.start()
        self._thread = threading.Thread(target=self._run, name="kvcli-engine", daemon=True)
        self._thread.start()

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return int(self._cache.num_sectors * self._cache.bytes_per_sector)

    @property
    def num_waiting(self) -> int:
        """Requests that wait; one that has ended is active until its pass is over."""
        return len(self._jobs.keys() - self._manager.batch_processor.scheduler.active_requests.keys())

    @property
    def is_alive(self) -> bool:
        """Whether requests are answered."""
        return self._thread.is_alive() and not self._closing

    def submit(self, job: Job) -> None:
        """Queues a request; ApiError: too many wait, the server ends, or its context may not be kept."""
        if not job.store:
            raise ApiError(400, "store: contexts are kept in memory while there is room; false is not served", "store")
        name, sampling, job.cached = secrets.token_hex(12), job.sampling, None
        with self._lock:
            if not self.is_alive:
                raise ApiError(503, "the server ends")
            if self.num_waiting >= self._max_waiting:
                raise ApiError(429, "too many requests wait; try again later", code="rate_limit_exceeded")
            self._jobs[name] = job
            if sampling.temperature > 0 or sampling.repetition_penalty != 1:
                generator = torch.Generator(self._device)
                generator.manual_seed(secrets.randbits(63) if job.seed is None else job.seed)
                self._choose[name] = NextToken(sampling, job.ids.to(self._device), self._vocab_size, generator)
            ids, ends = job.ids[0].tolist(), list(job.answer.ends)
            # of a manager that has failed this does nothing, and `_begin_again` tells the request
            self._manager.add_request(ids, name, sampling.max_new_tokens, streaming=True, eos_token_id=ends)

    def close(self) -> None:
        """Ends; answers that are being made fail."""
        with self._lock:
            self._closing = True
        self._thread.join()
        self._manager.stop(hard_stop=True)

    def _run(self) -> None:
        while not self._closing:
            for name, job in [*self._jobs.items()]:
                if job.cancelled.is_set():
                    self._end(name, Cancelled())
            output = self._manager.get_result(timeout=_POLL_S)
            if output is not None:
                self._take(output)
            elif not self._manager.is_running():
                self._begin_again()
        for name in [*self._jobs]:
            self._end(name, ApiError(503, "the server ends"))

    def _take(self, output: Any) -> None:
        """Takes the tokens of a request that are new."""
        name = output.request_id
        if (job := self._jobs.get(name)) is None:
            return
        if output.error is not None:
            self._manager.join(time.perf_counter(), 1)  # an error of a pass ends the thread, which then says which
            if self._manager.is_running():
                self._end(name, RuntimeError(output.error))
            return
        if not job.answer.num_tokens:
            self.metrics.first.observe(time.monotonic() - job.since)
            self.metrics.tokens.labels("prompt").inc(job.ids.shape[1])
        try:
            if job.answer.feed(output.generated_tokens[job.answer.num_tokens :]):
                self._end(name, None)
        except Exception as error:
            self._end(name, error)

    def _begin_again(self) -> None:
        """Tells all requests that a pass has failed, and begins again."""
        error = self._manager.background_thread_status.fatal_error or RuntimeError("the thread has ended")
        with self._lock:
            if self._jobs:
                self._say(f"all requests failed: {type(error).__name__}: {error_text(error)}")
            for name in [*self._jobs]:
                self._end(name, error)
            self._manager.start()
        time.sleep(_POLL_S)  # it may fail at once, such as after an error of the GPU

    def _end(self, name: str, error: Exception | None) -> None:
        job = self._jobs[name]
        self._manager.cancel_request(name)
        self.metrics.tokens.labels("generated").inc(job.answer.num_tokens)
        self._choose.pop(name, None)
        del self._jobs[name]
        job.done(error)
