"""Whole models with each method's cache: speed of prompts, and what fits into a memory budget.

The suites `generate` and `memory` of `kvcli bench`. Before a method is run, its kernels are checked against the
reference on one layer of the model's shape.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from typing import Any, Literal

import torch

from kvcli.attention.generation import Mode
from kvcli.attention.session import Session
from kvcli.bench.baselines import Baseline
from kvcli.bench.budget import attempt, largest_by_peak, memory_limit, release_gpu_memory
from kvcli.bench.fixed_length import library_runs, with_fixed_length
from kvcli.bench.layer import KernelCheck, MethodCase, uncompressed_layer
from kvcli.bench.model import ModelRun, attached, random_prompt, round_tokens, run_model, step_weights_bytes
from kvcli.bench.suite import NoFigures, PromptRow, run_row
from kvcli.bench.timing import copy_bandwidth, percentiles
from kvcli.errors import UsageError

_WARM_TOKENS = 40
"""New tokens of the warm-up run beyond a round of encoding, so that all kernels are compiled."""

_WARM_SECONDS = {"cuda": 10.0}
"""Warm-up before the fp16 baseline, by type of device; it otherwise runs first, at a higher boost clock."""

_CHECKED_TOKENS = 256
"""Fewest tokens on which `generate` checks kernels: a short prompt may have no codes."""

_CHECKED_CONTEXT = 4096
"""Tokens on which `memory` checks kernels."""

_CONTEXT_UNIT = 4096
"""Contexts are searched in multiples of this."""


@dataclass(frozen=True)
class ModelRow(PromptRow):
    """A row of `Row`'s fields and these; figures of time are None in the suite `memory`.

    `fp16` is the model without kvcli. The context is that of the prompt. A context or batch that was searched for is 0
    if not even the smallest one fits.

    Errors are those of `kvcli.bench.layer.Agreement`, bytes those of `kvcli.bench.model.ModelRun`.

    Attributes:
        question: whether batch and context were options, or which of them was searched for.
        prefill_ms: 20th, 50th and 80th percentile of the time of the prompt, encoding included.
        ttft_ms: median time to the first token.
        decode: how the tokens after the first were generated: graphs, steps or passes; fp16: eager or graph of one
            length; libraries: the latter.
        steady_tokens: tokens per sequence that `tokens_per_s` is of; None: all after the first, captures included.
        tokens_per_s: percentiles of the rate of steady steps, all sequences together; None without a second token.
        total_tokens_per_s: median of all new tokens over the whole time, prefill and captures included.
        read_bytes: weights that a decode step reads, and the bytes of keys and values at the end; None on a CPU.
        copy_gb_s: a device copy, bytes read plus bytes written; None on a CPU.
        ceiling_tokens_per_s: rate of steps that take as long as `read_bytes` at `copy_gb_s`.
        ceiling_share: median of `tokens_per_s` over `ceiling_tokens_per_s`.
        rate_ratio: `tokens_per_s` over fp16's.
        total_ratio: `total_tokens_per_s` over fp16's.
        prefill_ratio: prefill time per sequence over fp16's.
        cache_ratio: bytes of fp16's cache per sequence over this one's.
    """

    question: Literal["given", "largest batch", "longest context"] = field(kw_only=True)
    new_tokens: int = field(kw_only=True)
    lse_error: float | None = None
    encoding_gap: float | None = None
    weights_bytes: int | None = None
    cache_bytes: int | None = None
    other_bytes: int | None = None
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    prefill_ms: tuple[float, float, float] | None = None
    ttft_ms: float | None = None
    decode: str | None = None
    steady_tokens: int | None = None
    tokens_per_s: tuple[float, float, float] | None = None
    total_tokens_per_s: float | None = None
    repeats: int | None = None
    read_bytes: int | None = None
    copy_gb_s: float | None = None
    ceiling_tokens_per_s: float | None = None
    ceiling_share: float | None = None
    rate_ratio: float | None = None
    total_ratio: float | None = None
    prefill_ratio: float | None = None
    cache_ratio: float | None = None

    def with_memory(self, runs: list[ModelRun]) -> ModelRow:
        """The row with the memory of its runs."""
        return replace(
            self,
            cache_bytes=runs[-1].cache_bytes,
            other_bytes=runs[-1].other_bytes,
            peak_bytes=max((run.peak_bytes for run in runs if run.peak_bytes is not None), default=None),
            reserved_bytes=max((run.reserved_bytes for run in runs if run.reserved_bytes is not None), default=None),
        )

    def with_times(self, runs: list[ModelRun], *, filled: bool = False) -> ModelRow:
        """The row with the times of its runs; only those of decoding if the prompt was `filled` with random tokens."""
        batch, new = self.batch, self.new_tokens
        # of the steady steps; without them, of all tokens after the first
        steps = [run.steady or (new - 1, run.decode_s) for run in runs]
        row = replace(
            self,
            note=next((run.note for run in runs if run.note), self.note),
            decode=runs[-1].how if new > 1 else None,
            steady_tokens=runs[-1].steady and runs[-1].steady[0],
            tokens_per_s=percentiles([batch * count / seconds for count, seconds in steps]) if new > 1 else None,
            repeats=len(runs),
        )
        if filled:
            return row
        totals = [batch * new / (run.ttft_s + run.decode_s) for run in runs]
        return replace(
            row,
            prefill_ms=percentiles([1e3 * run.prefill_s for run in runs]),
            ttft_ms=percentiles([1e3 * run.ttft_s for run in runs])[1],
            total_tokens_per_s=percentiles(totals)[1] if new else None,
        )

    def with_ceiling(self, read_bytes: int) -> ModelRow:
        """The row compared with the rate at which memory could be read, if that is known."""
        if self.copy_gb_s is None:
            return self
        ceiling = self.batch * self.copy_gb_s * 1e9 / read_bytes
        return replace(
            self,
            read_bytes=read_bytes,
            ceiling_tokens_per_s=ceiling,
            ceiling_share=self.tokens_per_s[1] / ceiling if self.tokens_per_s else None,
        )

    def with_ratios(self, baseline: ModelRow) -> ModelRow:
        """The row compared with fp16's, per sequence where batches differ."""
        if not (self.repeats and self.cache_bytes and baseline.repeats and baseline.cache_bytes):
            return self
        scale = baseline.batch / self.batch
        rates, totals, prefill = self.tokens_per_s, self.total_tokens_per_s, self.prefill_ms
        return replace(
            self,
            rate_ratio=rates[1] / baseline.tokens_per_s[1] if rates and baseline.tokens_per_s else None,
            total_ratio=totals / baseline.total_tokens_per_s if totals and baseline.total_tokens_per_s else None,
            prefill_ratio=prefill[1] / baseline.prefill_ms[1] * scale if prefill and baseline.prefill_ms else None,
            cache_ratio=baseline.cache_bytes / self.cache_bytes / scale,
        )


@dataclass(frozen=True)
class ModelBench:
    """Measures methods on one model.

    Attributes:
        model: a causal language model, detached.
        cases: the methods; the first is fp16.
        impl: as in `kvcli.attach`.
        seed: of prompts and codebooks.
        memory_budget: bytes that torch may reserve, weights included; None: all there are.
        prefill_chunk, fill_middle, mode, backend: as in `run_model`; fp16's layers are compiled for decode steps, too.
        libraries: whose attention is measured beside fp16's, in `generate`.
    """

    model: Any
    cases: list[MethodCase]
    _: KW_ONLY
    impl: str
    seed: int
    memory_budget: int | None = None
    prefill_chunk: int | None = None
    fill_middle: bool = False
    mode: Mode | None = None
    backend: str | None = None
    libraries: Sequence[Baseline] = ()

    @cached_property
    def check(self) -> KernelCheck:
        """The kernels of the methods."""
        return KernelCheck(self.model, self.cases, self.impl, self.seed)

    def generate(
        self, contexts: list[int], batches: list[int] | None, *, new_tokens: int, repeats: int
    ) -> Iterator[ModelRow]:
        """Times every method at every prompt length and batch, after fp16 and the libraries.

        Without `batches`, at the largest that fits, for each method its own; with 0 `new_tokens`, the prompt only.
        With `fill_middle`, the prompt's times are None.
        """
        copy_gb_s = None
        if self.model.device.type == "cuda":
            copy_gb_s = copy_bandwidth(self.model.device, 10)
            release_gpu_memory()
        cases: list[MethodCase | Baseline] = [self.cases[0], *self.libraries, *self.cases[1:]]
        sizes: Sequence[int | None] = batches or [None]
        for context, batch in product(contexts, sizes):
            baseline: ModelRow | None = None
            for case in cases:
                empty = replace(self._empty(case, context, batch, new_tokens), copy_gb_s=copy_gb_s)
                row = run_row(partial(self._times, case, repeats), empty)
                baseline = baseline or row
                yield row.with_ratios(baseline)

    def memory(self, contexts: list[int], batches: list[int] | None, *, longest: bool) -> Iterator[ModelRow]:
        """Tries what fits into the budget: every method at every context, then, if `longest`, its longest context.

        Without `batches`, the largest batch is searched for.
        """
        sizes: Sequence[int | None] = batches or [None]
        questions: list[tuple[int | None, int | None]] = [*product(contexts, sizes)]
        if longest:
            questions.append((None, 1))
        for case, (context, batch) in product(self.cases, questions):
            yield run_row(partial(self._memory, case), self._empty(case, context, batch, 2))

    def _empty(self, case: MethodCase | Baseline, context: int | None, batch: int | None, new_tokens: int) -> ModelRow:
        """A row without figures; None is the size that is searched for."""
        return ModelRow(
            case.name,
            context or 0,
            batch or 0,
            case.name if isinstance(case, Baseline) else self.check.impl(case),
            question="longest context" if context is None else "largest batch" if batch is None else "given",
            new_tokens=new_tokens,
            weights_bytes=sum(weight.nbytes for weight in self.model.parameters()),
        )

    def _times(self, case: MethodCase | Baseline, repeats: int, row: ModelRow) -> ModelRow:
        """Searches for the batch if the row has none, checks the kernels at this shape, and times runs."""
        if isinstance(case, Baseline):
            return self._library_times(case, repeats, row)
        bounded = self.memory_budget is not None or not row.batch
        if not row.batch:
            row, _ = self._search(case, row)
        tokens = max(_CHECKED_TOKENS, row.context + row.new_tokens)
        row = row.checked(self.check.agreement(case, tokens, row.batch))
        with (
            memory_limit(self.memory_budget, self.model.device),
            attached(self.model, case, self.impl, self.seed) as session,
        ):
            run = partial(self._run, session, row.batch, row.context)
            if case.is_baseline:
                end = time.perf_counter() + _WARM_SECONDS.get(self.model.device.type, 0.0)
                while time.perf_counter() < end:
                    run(0)
            run(min(row.new_tokens, _WARM_TOKENS + round_tokens(case)))
            runs = []
            for _ in range(repeats):
                if bounded:
                    release_gpu_memory()  # a run that fitted in the search began with no memory reserved
                runs.append(run(row.new_tokens))
            if case.is_baseline and not self.check.spec.other_layers:  # a cache of fixed length has full attention only
                runs = with_fixed_length(self.model, runs, row.batch, row.context, row.new_tokens, self.backend)
        return self._timed(row, runs, filled=self.fill_middle)

    def _library_times(self, library: Baseline, repeats: int, row: ModelRow) -> ModelRow:
        """Checks a library's attention at this shape, and times captured steps with it."""
        model, spec = self.model, self.check.spec
        if spec.other_layers:
            raise UsageError(f"{library.name} replaces attention to the whole context only")
        layer = partial(uncompressed_layer, spec, row.batch, row.context + 1, model.device, model.dtype, self.seed)
        row = row.checked(library.check(*layer())[0])
        with memory_limit(self.memory_budget, model.device):
            runs = library_runs(model, library, row.batch, row.context, row.new_tokens, repeats, self.backend)
        return self._timed(row, runs, filled=True)

    def _timed(self, row: ModelRow, runs: list[ModelRun], *, filled: bool) -> ModelRow:
        row = row.with_memory(runs).with_times(runs, filled=filled)
        return row.with_ceiling(step_weights_bytes(self.model) + runs[-1].used_bytes)

    def _memory(self, case: MethodCase, row: ModelRow) -> ModelRow:
        """Checks the kernels, once per method, and answers the question."""
        row, run = self._search(case, row.checked(self.check.agreement(case, _CHECKED_CONTEXT, 1)))
        fp16_bytes = row.batch * (row.context + 1) * self.check.spec.fp16_bytes_per_token()
        return replace(row.with_memory([run]), cache_ratio=(fp16_bytes + run.other_bytes) / run.cache_bytes)

    def _search(self, case: MethodCase, row: ModelRow) -> tuple[ModelRow, ModelRun]:
        """The row with the batch and context that answer its question, and their run; NoFigures: nothing fits."""
        runs: dict[int, ModelRun] = {}
        budget = self.memory_budget or torch.cuda.get_device_properties(self.model.device).total_memory
        with (
            memory_limit(self.memory_budget, self.model.device),
            attached(self.model, case, self.impl, self.seed) as session,
        ):

            def peak(size: int) -> int | None:
                """Peak in bytes of a batch, or of a context in units."""
                batch, context = (size, row.context) if row.context else (1, size * _CONTEXT_UNIT)
                run = attempt(partial(self._run, session, batch, context, row.new_tokens))
                if run is None:
                    return None
                runs[size] = run
                return run.peak_bytes or 0

            if row.question == "given":
                size = 0 if peak(row.batch) is None else row.batch
            else:
                size = largest_by_peak(peak, budget)
        if row.question == "largest batch":
            row = replace(row, batch=size)
        elif row.question == "longest context":
            row = replace(row, context=size * _CONTEXT_UNIT)
        if not size:
            raise NoFigures(replace(row, status="out of memory"))
        return row, runs[size]

    def _run(self, session: Session | None, batch: int, context: int, new_tokens: int) -> ModelRun:
        ids = random_prompt(self.check.spec, batch, context, self.model.device, self.seed)
        how: dict[str, Any] = {"fill_middle": self.fill_middle, "mode": self.mode, "backend": self.backend}
        return run_model(self.model, session, ids, new_tokens, self.prefill_chunk, **how)
