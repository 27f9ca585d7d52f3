"""A row of the suites that run whole models, and the figures that follow from its runs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from kvcli.bench.rows import Row
from kvcli.bench.run import Run
from kvcli.bench.timing import percentiles

Question = Literal["given", "largest batch", "longest context"]


@dataclass(frozen=True)
class ModelRow(Row):
    """A row of `Row`'s fields and these; figures of time are None in the suite `memory`.

    `fp16` is the model without kvcli. The context is that of the prompt. A context or batch that was searched for is 0
    if not even the smallest one fits.

    Attributes:
        question: whether batch and context were given, or which of them was searched for.
        new_tokens: tokens chosen after the prompt.
        lse_error: largest absolute difference of a log-sum-exp.
        encoding_gap: relative difference of the encoding errors of kernels and reference.
        weights_bytes: of the model.
        cache_bytes: bytes allocated by the cache at the end.
        other_bytes: bytes of them in layers that do not attend to the whole context, which no method compresses.
        peak_bytes: peak of bytes allocated by torch, weights included.
        reserved_bytes: peak of bytes reserved by torch, which is what a budget limits.
        prefill_ms: 20th, 50th and 80th percentile of the time of the prompt, encoding included.
        ttft_ms: median time to the first token.
        decode: how the tokens after the first were made: graphs, steps or passes; fp16: eager or graph of one length.
        steady_tokens: tokens per sequence that `tokens_per_s` is of; None: all after the first, captures included.
        tokens_per_s: percentiles of the rate of steady steps, all sequences together; None without a second token.
        total_tokens_per_s: median of all new tokens over the whole time, prefill and captures included.
        repeats: runs timed.
        read_bytes: weights that a decode step reads, and the bytes of keys and values at the end; None on a CPU.
        copy_gb_s: a device copy, bytes read plus bytes written; None on a CPU.
        ceiling_tokens_per_s: rate of steps that take as long as `read_bytes` at `copy_gb_s`.
        ceiling_share: median of `tokens_per_s` over `ceiling_tokens_per_s`.
        rate_ratio: `tokens_per_s` over fp16's.
        total_ratio: `total_tokens_per_s` over fp16's.
        prefill_ratio: prefill time per sequence over fp16's.
        cache_ratio: bytes of fp16's cache per sequence over this one's.
    """

    question: Question = field(kw_only=True)
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

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain JSON values; the context is also called `prompt_tokens`."""
        return {**super().to_dict(), "prompt_tokens": self.context}

    def with_memory(self, runs: list[Run]) -> ModelRow:
        """The row with the memory of its runs."""
        return replace(
            self,
            cache_bytes=runs[-1].cache_bytes,
            other_bytes=runs[-1].other_bytes,
            peak_bytes=max((run.peak_bytes for run in runs if run.peak_bytes is not None), default=None),
            reserved_bytes=max((run.reserved_bytes for run in runs if run.reserved_bytes is not None), default=None),
        )

    def with_times(self, runs: list[Run], *, filled: bool = False) -> ModelRow:
        """The row with the times of its runs; only those of decoding if the prompt was `filled` with random tokens."""
        batch, new = self.batch, self.new_tokens
        rates = [batch / _seconds_per_step(run, new) for run in runs] if new > 1 else None
        row = replace(
            self,
            note=next((run.note for run in runs if run.note), self.note),
            decode=runs[-1].how if new > 1 else None,
            steady_tokens=runs[-1].steady and runs[-1].steady[0],
            tokens_per_s=None if rates is None else percentiles(rates),
            repeats=len(runs),
        )
        if filled:
            return row
        totals = [batch * new / (run.ttft_s + run.decode_s) for run in runs] if new else None
        return replace(
            row,
            prefill_ms=percentiles([1e3 * run.prefill_s for run in runs]),
            ttft_ms=percentiles([1e3 * run.ttft_s for run in runs])[1],
            total_tokens_per_s=None if totals is None else percentiles(totals)[1],
        )

    def with_ceiling(self, read_bytes: int, copy_gb_s: float) -> ModelRow:
        """The row compared with the rate at which memory could be read."""
        ceiling = self.batch * copy_gb_s * 1e9 / read_bytes
        return replace(
            self,
            read_bytes=read_bytes,
            copy_gb_s=copy_gb_s,
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


def _seconds_per_step(run: Run, new_tokens: int) -> float:
    """Of the steady steps; without them, of all tokens after the first."""
    steps, seconds = run.steady or (new_tokens - 1, run.decode_s)
    return seconds / steps
