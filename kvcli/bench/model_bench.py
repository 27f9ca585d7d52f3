"""Whole models with each method's cache: speed of prompts, and what fits into a memory budget.

The suites `generate` and `memory` of `kvcli bench`. Before a method is run, its kernels are checked against the
reference on one layer of the model's shape.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any

import torch

from kvcli.artifact.choice import MethodChoice
from kvcli.attention.generation import Mode
from kvcli.attention.session import Session
from kvcli.bench.fixed_length import with_fixed_length
from kvcli.bench.layer import KernelCheck
from kvcli.bench.model import ModelRun, attached, held_bytes, random_prompt, round_tokens, run_model, step_weights_bytes
from kvcli.bench.suite import NoFigures, Row, median_of, run_row
from kvcli.bench.timing import copy_bandwidth, percentiles
from kvcli.plan.budget import attempt, largest_by_peak, memory_limit, release_gpu_memory

_WARM_TOKENS = 40
"""New tokens of the warm-up run beyond a round of encoding, so that all kernels are compiled."""

_WARM_SECONDS = {"cuda": 10.0}
"""Warm-up before the fp16 baseline, by type of device; it otherwise runs first, at a higher boost clock."""

_CHECKED_CONTEXT = 4096
"""Tokens on which `memory` checks kernels."""

_CONTEXT_UNIT = 4096
"""Contexts are searched in multiples of this."""


def memory_figures(runs: Sequence[ModelRun]) -> dict[str, Any]:
    """The memory of runs."""
    peaks = [run.peak_bytes for run in runs if run.peak_bytes is not None]
    reserved = [run.reserved_bytes for run in runs if run.reserved_bytes is not None]
    return {
        "cache_bytes": runs[-1].cache_bytes,
        "other_bytes": runs[-1].other_bytes,
        "peak_bytes": max(peaks, default=None),
        "reserved_bytes": max(reserved, default=None),
    }


def time_figures(runs: Sequence[ModelRun], batch: int, new_tokens: int, *, filled: bool = False) -> dict[str, Any]:
    """The times of runs; only those of decoding if the prompt was `filled` with random tokens."""
    # of the steady steps; without them, of all tokens after the first
    steps = [run.steady or (new_tokens - 1, run.decode_s) for run in runs]
    figures: dict[str, Any] = {"repeats": len(runs), "steady_tokens": runs[-1].steady and runs[-1].steady[0]}
    if new_tokens > 1:
        figures["decode"] = runs[-1].how
        figures["tokens_per_s"] = percentiles([batch * count / seconds for count, seconds in steps])
    if not filled:
        figures["prefill_ms"] = percentiles([1e3 * run.prefill_s for run in runs])
        figures["ttft_ms"] = percentiles([1e3 * run.ttft_s for run in runs])[1]
        if new_tokens:
            totals = [batch * new_tokens / (run.ttft_s + run.decode_s) for run in runs]
            figures["total_tokens_per_s"] = percentiles(totals)[1]
    return figures


def with_ceiling(row: Row, read_bytes: int, copy_gb_s: float) -> Row:
    """The row compared with the rate at which memory could be read."""
    ceiling, rate = row.batch * copy_gb_s * 1e9 / read_bytes, median_of(row.figures, "tokens_per_s")
    return row.plus(
        read_bytes=read_bytes,
        copy_gb_s=copy_gb_s,
        ceiling_tokens_per_s=ceiling,
        ceiling_share=None if rate is None else rate / ceiling,
    )


def with_ratios(row: Row, baseline: Row) -> Row:
    """The row compared with fp16's, per sequence where batches differ; one that was not measured as it is."""

    def ratio(name: str) -> float | None:
        own, fp16 = median_of(row.figures, name), median_of(baseline.figures, name)
        return own / fp16 if own and fp16 else None

    cache, prefill, scale = ratio("cache_bytes"), ratio("prefill_ms"), baseline.batch / max(1, row.batch)
    return row.plus(
        rate_ratio=ratio("tokens_per_s"),
        total_ratio=ratio("total_tokens_per_s"),
        prefill_ratio=prefill and prefill * scale,
        cache_ratio=cache and 1 / (cache * scale),
    )


@dataclass(frozen=True)
class ModelBench:
    """Measures methods on one model; fields without a comment are as in `run_model`."""

    model: Any  # detached
    cases: list[MethodChoice]  # the first is fp16
    _: KW_ONLY
    impl: str  # as in `kvcli.attach`
    seed: int  # of prompts and codebooks
    memory_budget: int | None = None  # bytes that torch may reserve, weights included; None: all there are
    prefill_chunk: int | None = None
    fill_middle: bool = False
    mode: Mode | None = None

    @cached_property
    def check(self) -> KernelCheck:
        """The kernels of the methods."""
        return KernelCheck(self.model, self.cases, self.impl, self.seed)

    def generate(
        self, contexts: list[int], batches: list[int] | None, *, new_tokens: int, repeats: int
    ) -> Iterator[Row]:
        """Times every method at every prompt length and batch, after fp16.

        Without `batches`, at the largest that fits, for each method its own; with 0 `new_tokens`, the prompt only.
        With `fill_middle`, the prompt's times are None.
        """
        copy_gb_s = None
        if self.model.device.type == "cuda":
            copy_gb_s = copy_bandwidth(self.model.device, 10)
            release_gpu_memory()
        sizes: Sequence[int | None] = batches or [None]
        for context, batch in product(contexts, sizes):
            baseline: Row | None = None
            for case in self.cases:
                empty = self._empty(case, context, batch, new_tokens)
                row = run_row(partial(self._times, case, repeats, copy_gb_s), empty)
                baseline = baseline or row
                yield with_ratios(row, baseline)

    def memory(self, contexts: list[int], batches: list[int] | None, *, longest: bool) -> Iterator[Row]:
        """Tries what fits into the budget: every method at every context, then, if `longest`, its longest context.

        Without `batches`, the largest batch is searched for.
        """
        sizes: Sequence[int | None] = batches or [None]
        questions: list[tuple[int | None, int | None]] = [*product(contexts, sizes)]
        if longest:
            questions.append((None, 1))
        for case, (context, batch) in product(self.cases, questions):
            yield run_row(partial(self._memory, case), self._empty(case, context, batch, 2))

    def _empty(self, case: MethodChoice, context: int | None, batch: int | None, new_tokens: int) -> Row:
        """A row without figures; None is the size that is searched for."""
        question = "longest context" if context is None else "largest batch" if batch is None else "given"
        weights = sum(map(held_bytes, self.model.parameters()))
        figures = {"question": question, "new_tokens": new_tokens, "weights_bytes": weights}
        return Row(case.label, context or 0, batch or 0, self.check.impl(case), figures=figures)

    def _times(self, case: MethodChoice, repeats: int, copy_gb_s: float | None, row: Row) -> Row:
        """The row with the times and the memory of its runs."""
        row, runs = self._runs(case, repeats, row)
        return self.timed(row, runs, copy_gb_s, filled=self.fill_middle)

    def timed(self, row: Row, runs: Sequence[ModelRun], copy_gb_s: float | None, *, filled: bool) -> Row:
        """The row with the times and the memory of runs, and the ceiling if the bandwidth of copies is known."""
        times = time_figures(runs, row.batch, row.figures["new_tokens"], filled=filled)
        note = next((run.note for run in runs if run.note), None)
        row = replace(row, note=note).plus(**memory_figures(runs), **times)
        if copy_gb_s is None:
            return row
        return with_ceiling(row, step_weights_bytes(self.model) + runs[-1].used_bytes, copy_gb_s)

    def _runs(self, case: MethodChoice, repeats: int, row: Row) -> tuple[Row, list[ModelRun]]:
        """The row, checked at the batch that was asked for or is the largest, and its runs."""
        bounded, new_tokens = self.memory_budget is not None or not row.batch, row.figures["new_tokens"]
        if not row.batch:
            row, _ = self._search(case, row)
        row = row.checked(self.check.agreement(case, row.context + new_tokens, row.batch))
        with (
            memory_limit(self.memory_budget, self.model.device),
            attached(self.model, case, self.impl, self.seed) as session,
        ):
            run = partial(self._run, session, row.batch, row.context)
            if case.is_baseline:
                end = time.perf_counter() + _WARM_SECONDS.get(self.model.device.type, 0.0)
                while time.perf_counter() < end:
                    run(0)
            run(min(new_tokens, _WARM_TOKENS + round_tokens(case)))
            runs = []
            for _ in range(repeats):
                if bounded:
                    release_gpu_memory()  # a run that fitted in the search began with no memory reserved
                runs.append(run(new_tokens))
            if case.is_baseline and not self.check.spec.other_layers:  # a cache of fixed length has full attention only
                runs = with_fixed_length(self.model, runs, row.batch, row.context, new_tokens)
        return row, runs

    def _memory(self, case: MethodChoice, row: Row) -> Row:
        """Checks the kernels, once per method, and answers the question."""
        row, run = self._search(case, row.checked(self.check.agreement(case, _CHECKED_CONTEXT, 1)))
        fp16_bytes = row.batch * (row.context + 1) * self.check.spec.fp16_bytes_per_token()
        return row.plus(**memory_figures([run]), cache_ratio=(fp16_bytes + run.other_bytes) / run.cache_bytes)

    def _search(self, case: MethodChoice, row: Row) -> tuple[Row, ModelRun]:
        """The row with the batch and context that answer its question, and their run; NoFigures: nothing fits."""
        runs: dict[int, ModelRun] = {}
        question, new_tokens = row.figures["question"], row.figures["new_tokens"]
        budget = self.memory_budget or torch.cuda.get_device_properties(self.model.device).total_memory
        with (
            memory_limit(self.memory_budget, self.model.device),
            attached(self.model, case, self.impl, self.seed) as session,
        ):

            def peak(size: int) -> int | None:
                """Peak in bytes of a batch, or of a context in units."""
                batch, context = (size, row.context) if row.context else (1, size * _CONTEXT_UNIT)
                run = attempt(partial(self._run, session, batch, context, new_tokens))
                if run is None:
                    return None
                runs[size] = run
                return run.peak_bytes or 0

            if question == "given":
                size = 0 if peak(row.batch) is None else row.batch
            else:
                size = largest_by_peak(peak, budget)
        if question == "largest batch":
            row = replace(row, batch=size)
        elif question == "longest context":
            row = replace(row, context=size * _CONTEXT_UNIT)
        if not size:
            raise NoFigures(replace(row, status="out of memory"))
        return row, runs[size]

    def _run(self, session: Session | None, batch: int, context: int, new_tokens: int) -> ModelRun:
        ids = random_prompt(self.model, batch, context, self.seed)
        return run_model(
            self.model, session, ids, new_tokens, self.prefill_chunk, fill_middle=self.fill_middle, mode=self.mode
        )
