"""Whole models end to end: prefill with encoding, first token, rate, peak memory, beside transformers' own cache.

Before a method is timed, its kernels are checked against the reference on one layer of the model's shape.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from kvcli.bench.budget import attempt, free, largest_by_peak, memory_limit, need_gpu
from kvcli.bench.check import ModelCheck
from kvcli.bench.layer import Subject
from kvcli.bench.model import NewCache, Run, opened, random_prompt, run_model
from kvcli.bench.rows import Status, guarded
from kvcli.bench.timing import percentiles

_WARM_TOKENS = 40
"""Enough for the first tokens of a decode to be encoded, so that no kernel is compiled while the clock runs."""

_WARM_SECONDS = {"cuda": 10.0}
"""How long a device works before fp16 is timed, which would else be alone to run on a cool GPU, at a higher clock."""

_CHECKED_TOKENS = 256
"""Tokens that the check has at least: a short prompt may have no code."""


@dataclass(frozen=True)
class GenerateConfig:
    """What is benched.

    Attributes:
        model: a causal language model, detached.
        subjects: the methods; the first is fp16.
        prompt_tokens: lengths of the prompt.
        new_tokens: tokens chosen after it; 0 reads the prompt only.
        batches: sequences; None: the largest batch that fits, for each method its own.
        memory_budget: bytes that torch may allocate, weights included; None: all there are.
        prefill_chunk: tokens of the whole batch that are read at once; None: all.
        impl: form of attention, as in `kvcli.attach`.
        repeats: runs timed.
        seed: of prompts and codebooks.
    """

    model: Any
    subjects: list[Subject]
    prompt_tokens: list[int]
    new_tokens: int
    batches: list[int] | None
    memory_budget: int | None
    prefill_chunk: int | None
    impl: str
    repeats: int
    seed: int

    @property
    def bounded(self) -> bool:
        """Whether memory decides: a budget is given, or the largest batch is to be found."""
        return self.batches is None or self.memory_budget is not None


@dataclass(frozen=True)
class Figures:
    """What the runs of one method gave.

    Attributes:
        prefill_ms: 20th, 50th and 80th percentile of the prompt's time, encoding included.
        ttft_ms: median time until the first token was chosen.
        tokens_per_s: percentiles of the tokens after the first, all sequences together; None when there were none.
        total_tokens_per_s: median of all new tokens over the whole time, prefill included.
        cache_bytes: what the cache had allocated at the end.
        peak_bytes: most that torch had allocated, weights included.
        reserved_bytes: most that torch had taken from the GPU.
        repeats: runs.
    """

    prefill_ms: tuple[float, float, float]
    ttft_ms: float
    tokens_per_s: tuple[float, float, float] | None
    total_tokens_per_s: float | None
    cache_bytes: int
    peak_bytes: int | None
    reserved_bytes: int | None
    repeats: int

    @classmethod
    def of(cls, runs: list[Run], batch: int, new_tokens: int) -> Figures:
        """The figures of some equal runs."""
        rates = [batch * (new_tokens - 1) / run.decode_s for run in runs] if new_tokens > 1 else None
        totals = [batch * new_tokens / (run.ttft_s + run.decode_s) for run in runs] if new_tokens else None
        return cls(
            prefill_ms=percentiles([1e3 * run.prefill_s for run in runs]),
            ttft_ms=percentiles([1e3 * run.ttft_s for run in runs])[1],
            tokens_per_s=None if rates is None else percentiles(rates),
            total_tokens_per_s=None if totals is None else percentiles(totals)[1],
            cache_bytes=runs[-1].cache_bytes,
            peak_bytes=_most([run.peak_bytes for run in runs]),
            reserved_bytes=_most([run.reserved_bytes for run in runs]),
            repeats=len(runs),
        )


@dataclass(frozen=True)
class GenerateRow:
    """One line of the table; `figures` is None where there are no honest ones.

    Attributes:
        method: its name; `fp16` is the model without kvcli.
        prompt_tokens: length of the prompt.
        new_tokens: tokens chosen.
        batch: sequences; 0 when none fits.
        impl: the form of attention that ran.
        status: whether it agreed with the reference, and ran at all.
        note: what went wrong.
        out_error: |out - reference| / |reference| of one layer; None where the reference itself ran.
        lse_error: largest difference of a log-sum-exp.
        encoding_gap: difference of the encoding errors of kernels and reference.
        weights_bytes: of the model.
        figures: of the runs.
        rate_ratio: `tokens_per_s` over fp16's.
        total_ratio: `total_tokens_per_s` over fp16's.
        prefill_ratio: prefill time a sequence over fp16's.
        cache_ratio: fp16's cache bytes a sequence over this one's.
    """

    method: str
    prompt_tokens: int
    new_tokens: int
    batch: int
    impl: str
    status: Status = "ok"
    note: str | None = None
    out_error: float | None = None
    lse_error: float | None = None
    encoding_gap: float | None = None
    weights_bytes: int | None = None
    figures: Figures | None = None
    rate_ratio: float | None = None
    total_ratio: float | None = None
    prefill_ratio: float | None = None
    cache_ratio: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain JSON values, those of the runs beside the others."""
        values = asdict(self)
        figures = values.pop("figures") or dict.fromkeys(Figures.__dataclass_fields__)
        return {**values, **figures}


def bench_generate(config: GenerateConfig) -> Iterator[GenerateRow]:
    """Benches every method at every prompt length and batch, fp16 first.

    Raises:
        UsageError: a form of attention that a method does not have, or a budget without a GPU.
    """
    if config.bounded:
        need_gpu(config.model.device)
    bench = _Bench(config)
    batches: list[int | None] = [None] if config.batches is None else [*config.batches]
    for prompt in config.prompt_tokens:
        for batch in batches:
            baseline: GenerateRow | None = None
            for subject in config.subjects:
                row = bench.row(subject, prompt, batch)
                baseline = baseline or row
                yield _with_ratios(row, baseline)


class _Bench:
    """One model and what all its rows share."""

    def __init__(self, config: GenerateConfig) -> None:
        self.config, self.model = config, config.model
        self.device: torch.device = config.model.device
        self.check = ModelCheck(config.model, config.subjects, config.impl, config.seed)
        self.weights_bytes = sum(weight.nbytes for weight in config.model.parameters())

    def row(self, subject: Subject, prompt: int, batch: int | None) -> GenerateRow:
        """Measures one method; trouble of its own becomes its status."""
        impl, weights = self.check.impl(subject), self.weights_bytes
        row = GenerateRow(subject.name, prompt, self.config.new_tokens, batch or 0, impl, weights_bytes=weights)
        found = guarded(partial(self._measured, subject, row), row)
        free()
        return found

    def _measured(self, subject: Subject, row: GenerateRow) -> GenerateRow:
        """Finds the batch if none is given, checks the kernels at this shape, and runs the model."""
        if not row.batch:
            batch = self._in_budget(subject, lambda cache: self._largest_batch(cache, row.prompt_tokens))
            if not batch:
                return replace(row, status="out of memory")
            row = replace(row, batch=batch)
        agreement = self.check.agreement(subject, max(_CHECKED_TOKENS, row.prompt_tokens + row.new_tokens), row.batch)
        if agreement is not None:
            errors = (agreement.out_error, agreement.lse_error, agreement.encoding_gap)
            row = replace(row, out_error=errors[0], lse_error=errors[1], encoding_gap=errors[2])
            if not agreement.holds:
                return replace(row, status="mismatch", note=agreement.describe())
        if subject.is_baseline:
            self._in_budget(subject, lambda cache: self._heat(cache, row))
        runs = self._in_budget(subject, lambda cache: self._runs(cache, row))
        return replace(row, figures=Figures.of(runs, row.batch, row.new_tokens))

    def _in_budget(self, subject: Subject, run: Callable[[NewCache], Any]) -> Any:
        """Runs something with the method attached, within the memory budget."""
        with (
            memory_limit(self.config.memory_budget, self.device),
            opened(self.model, subject, self.config.impl, self.config.seed) as new_cache,
        ):
            return run(new_cache)

    def _heat(self, new_cache: NewCache, row: GenerateRow) -> None:
        end = time.perf_counter() + _WARM_SECONDS.get(self.device.type, 0.0)
        while time.perf_counter() < end:
            self._run(new_cache, row.batch, row.prompt_tokens, 0)

    def _runs(self, new_cache: NewCache, row: GenerateRow) -> list[Run]:
        self._run(new_cache, row.batch, row.prompt_tokens, min(row.new_tokens, _WARM_TOKENS))
        runs = []
        for _ in range(self.config.repeats):
            if self.config.bounded:
                free()  # each begins as the probe did that found the batch
            runs.append(self._run(new_cache, row.batch, row.prompt_tokens, row.new_tokens))
        return runs

    def _run(self, new_cache: NewCache, batch: int, prompt: int, new_tokens: int) -> Run:
        ids = random_prompt(self.check.spec, batch, prompt, self.device, self.config.seed)
        return run_model(self.model, new_cache, ids, new_tokens, self.config.prefill_chunk)

    def _largest_batch(self, new_cache: NewCache, prompt: int) -> int:
        budget = self.config.memory_budget or torch.cuda.get_device_properties(self.device).total_memory

        def peak(batch: int) -> int | None:
            runs: list[Run] = []
            attempt(lambda: runs.append(self._run(new_cache, batch, prompt, self.config.new_tokens)))
            return runs[0].peak_bytes if runs else None

        return largest_by_peak(peak, budget)


def _with_ratios(row: GenerateRow, baseline: GenerateRow) -> GenerateRow:
    """The row beside fp16's, per sequence where batches differ."""
    ours, theirs = row.figures, baseline.figures
    if ours is None or theirs is None:
        return row
    scale = baseline.batch / row.batch
    rates = (ours.tokens_per_s, theirs.tokens_per_s)
    totals = (ours.total_tokens_per_s, theirs.total_tokens_per_s)
    return replace(
        row,
        rate_ratio=rates[0][1] / rates[1][1] if rates[0] and rates[1] else None,
        total_ratio=totals[0] / totals[1] if totals[0] and totals[1] else None,
        prefill_ratio=ours.prefill_ms[1] / theirs.prefill_ms[1] * scale,
        cache_ratio=theirs.cache_bytes / ours.cache_bytes / scale,
    )


def _most(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return max(known) if known else None
