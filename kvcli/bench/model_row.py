"""A row of the suites that run whole models, and the figures that follow from its runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from kvcli.bench.model import Run
from kvcli.bench.rows import Status
from kvcli.bench.timing import percentiles

Question = Literal["given", "largest batch", "longest context"]


@dataclass(frozen=True)
class ModelRow:
    """One line of a table; figures are None unless the status is `ok`, and those of time in the suite `memory`.

    Attributes:
        method: its name; `fp16` is the model without kvcli.
        question: whether batch and context were given, or which of them was searched for.
        context: tokens of the prompt; 0 if not even the shortest one fits.
        new_tokens: tokens chosen after it.
        batch: sequences; 0 if not even one fits.
        impl: attention that ran: sdpa, fused or reference.
        status: `ok`, or why there are no figures.
        note: what went wrong.
        out_error: |out - reference| / |reference| of one layer; None where the reference itself ran.
        lse_error: largest absolute difference of a log-sum-exp.
        encoding_gap: relative difference of the encoding errors of kernels and reference.
        weights_bytes: of the model.
        cache_bytes: bytes allocated by the cache at the end.
        peak_bytes: peak of bytes allocated by torch, weights included.
        reserved_bytes: peak of bytes reserved by torch, which is what a budget limits.
        prefill_ms: 20th, 50th and 80th percentile of the time of the prompt, encoding included.
        ttft_ms: median time to the first token.
        tokens_per_s: percentiles of the rate after the first token, all sequences together; None without such tokens.
        total_tokens_per_s: median of all new tokens over the whole time, prefill included.
        repeats: runs timed.
        rate_ratio: `tokens_per_s` over fp16's.
        total_ratio: `total_tokens_per_s` over fp16's.
        prefill_ratio: prefill time per sequence over fp16's.
        cache_ratio: bytes of fp16's cache per sequence over this one's.
    """

    method: str
    question: Question
    context: int
    new_tokens: int
    batch: int
    impl: str
    status: Status = "ok"
    note: str | None = None
    out_error: float | None = None
    lse_error: float | None = None
    encoding_gap: float | None = None
    weights_bytes: int | None = None
    cache_bytes: int | None = None
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    prefill_ms: tuple[float, float, float] | None = None
    ttft_ms: float | None = None
    tokens_per_s: tuple[float, float, float] | None = None
    total_tokens_per_s: float | None = None
    repeats: int | None = None
    rate_ratio: float | None = None
    total_ratio: float | None = None
    prefill_ratio: float | None = None
    cache_ratio: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain JSON values; the context is also called `prompt_tokens`."""
        return {**asdict(self), "prompt_tokens": self.context}

    def with_memory(self, runs: list[Run]) -> ModelRow:
        """The row with the memory of its runs."""
        return replace(
            self,
            cache_bytes=runs[-1].cache_bytes,
            peak_bytes=max((run.peak_bytes for run in runs if run.peak_bytes is not None), default=None),
            reserved_bytes=max((run.reserved_bytes for run in runs if run.reserved_bytes is not None), default=None),
        )

    def with_times(self, runs: list[Run]) -> ModelRow:
        """The row with the times of its runs."""
        batch, new = self.batch, self.new_tokens
        rates = [batch * (new - 1) / run.decode_s for run in runs] if new > 1 else None
        totals = [batch * new / (run.ttft_s + run.decode_s) for run in runs] if new else None
        return replace(
            self,
            prefill_ms=percentiles([1e3 * run.prefill_s for run in runs]),
            ttft_ms=percentiles([1e3 * run.ttft_s for run in runs])[1],
            tokens_per_s=None if rates is None else percentiles(rates),
            total_tokens_per_s=None if totals is None else percentiles(totals)[1],
            repeats=len(runs),
        )

    def with_ratios(self, baseline: ModelRow) -> ModelRow:
        """The row compared with fp16's, per sequence where batches differ."""
        if not (self.prefill_ms and self.cache_bytes and baseline.prefill_ms and baseline.cache_bytes):
            return self
        scale = baseline.batch / self.batch
        rates, totals = self.tokens_per_s, self.total_tokens_per_s
        return replace(
            self,
            rate_ratio=rates[1] / baseline.tokens_per_s[1] if rates and baseline.tokens_per_s else None,
            total_ratio=totals / baseline.total_tokens_per_s if totals and baseline.total_tokens_per_s else None,
            prefill_ratio=self.prefill_ms[1] / baseline.prefill_ms[1] * scale,
            cache_ratio=baseline.cache_bytes / self.cache_bytes / scale,
        )
