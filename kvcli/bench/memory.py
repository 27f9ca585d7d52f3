"""What fits into a memory budget, found by allocating it: the largest batch at a context, the longest context alone.

A probe reads a prompt in chunks and takes one decode step, with torch limited to the budget, so the peak of a prefill
counts. Unless the whole prompt is asked for, the middle of a long one is filled in: the cache encodes and allocates
random keys and values, while the model computes the first and the last chunk, where its peak is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from kvcli.bench.budget import attempt, free, largest_by_peak, memory_limit, need_gpu
from kvcli.bench.check import Agreement, ModelCheck
from kvcli.bench.layer import Subject
from kvcli.bench.model import (
    NewCache,
    cache_bytes,
    chunk_length,
    fill,
    opened,
    peak_memory,
    prefill,
    random_prompt,
    reset_peak_memory,
    step,
)
from kvcli.bench.rows import Status, guarded

_CONTEXT_UNIT = 4096
_CHECKED_TOKENS = 4096

Question = Literal["given", "largest batch", "longest context"]


@dataclass(frozen=True)
class MemoryConfig:
    """What is tried.

    Attributes:
        model: a causal language model, detached.
        subjects: the methods; the first is fp16.
        contexts: prompt lengths.
        batches: sequences; None: the largest batch that fits, for each method and context.
        longest: whether to look for the longest context of one sequence too.
        memory_budget: bytes that torch may take, weights included.
        prefill_chunk: tokens of the whole batch that are read at once.
        full_prefill: whether the model computes the whole prompt.
        impl: form of attention, as in `kvcli.attach`.
        seed: of prompts and codebooks.
    """

    model: Any
    subjects: list[Subject]
    contexts: list[int]
    batches: list[int] | None
    longest: bool
    memory_budget: int
    prefill_chunk: int
    full_prefill: bool
    impl: str
    seed: int


@dataclass(frozen=True)
class MemoryRow:
    """One line of the table.

    Attributes:
        method: its name; `fp16` is the model without kvcli.
        question: whether batch and context were given, or one of them was looked for.
        context: tokens of the prompt; 0 when not even one sequence of a unit fits.
        batch: sequences; 0 when not even one fits.
        impl: the form of attention that ran.
        status: `ok` if it fits.
        note: what went wrong.
        out_error: |out - reference| / |reference| of one layer; None where the reference itself ran.
        cache_bytes: what the cache had allocated in the end.
        peak_bytes: most that torch had allocated, weights included.
        reserved_bytes: most that torch had taken from the GPU, which is what the budget limits.
        weights_bytes: of the model.
        cache_ratio: fp16's bytes for these tokens over the cache's.
    """

    method: str
    question: Question
    context: int
    batch: int
    impl: str
    status: Status = "ok"
    note: str | None = None
    out_error: float | None = None
    cache_bytes: int | None = None
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    weights_bytes: int | None = None
    cache_ratio: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Probe:
    """What a prompt and a decode step took that fitted."""

    cache_bytes: int
    peak_bytes: int
    reserved_bytes: int


def bench_memory(config: MemoryConfig) -> Iterator[MemoryRow]:
    """Tries every method at every context, then its longest context.

    Raises:
        UsageError: no GPU, a budget larger than it, or a form of attention that a method does not have.
    """
    need_gpu(config.model.device)
    with memory_limit(config.memory_budget, config.model.device):
        bench = _Bench(config)
        batches: list[int | None] = [None] if config.batches is None else [*config.batches]
        for subject in config.subjects:
            for context in config.contexts:
                for batch in batches:
                    yield bench.row(subject, context, batch)
            if config.longest:
                yield bench.row(subject, None, 1)


class _Bench:
    """One model and what all rows share."""

    def __init__(self, config: MemoryConfig) -> None:
        self.config, self.model = config, config.model
        self.check = ModelCheck(config.model, config.subjects, config.impl, config.seed)
        self.weights_bytes = sum(weight.nbytes for weight in config.model.parameters())
        self.agreements: dict[str, Agreement | None] = {}

    def row(self, subject: Subject, context: int | None, batch: int | None) -> MemoryRow:
        """Answers one question about one method; trouble of its own becomes its status."""
        question: Question = "longest context" if context is None else "largest batch" if batch is None else "given"
        impl, weights = self.check.impl(subject), self.weights_bytes
        row = MemoryRow(subject.name, question, context or 0, batch or 0, impl, weights_bytes=weights)
        found = guarded(partial(self._measured, subject, row), row)
        free()
        return found

    def _measured(self, subject: Subject, row: MemoryRow) -> MemoryRow:
        """Checks the method's kernels, once for all its rows, and answers."""
        if subject.name not in self.agreements:
            self.agreements[subject.name] = self.check.agreement(subject, _CHECKED_TOKENS, 1)
        agreement = self.agreements[subject.name]
        if agreement is not None:
            row = replace(row, out_error=agreement.out_error)
            if not agreement.holds:
                return replace(row, status="mismatch", note=agreement.describe())
        with opened(self.model, subject, self.config.impl, self.config.seed) as new_cache:
            return self._answered(new_cache, row)

    def _answered(self, new_cache: NewCache, row: MemoryRow) -> MemoryRow:
        """Tries sizes until the question is answered."""
        found: dict[int, Probe] = {}

        def peak(size: int) -> int | None:
            """Bytes of a batch, or of a context in units."""
            context, batch = (row.context, size) if row.context else (size * _CONTEXT_UNIT, 1)
            attempt(lambda: found.update({size: self.probe(new_cache, context, batch)}))
            return found[size].peak_bytes if size in found else None

        if row.question == "given":
            size = row.batch if peak(row.batch) is not None else 0
        else:
            size = largest_by_peak(peak, self.config.memory_budget)
            row = replace(row, batch=size) if row.context else replace(row, context=size * _CONTEXT_UNIT)
        if not size:
            return replace(row, status="out of memory")
        probe = found[size]
        return replace(
            row,
            cache_bytes=probe.cache_bytes,
            peak_bytes=probe.peak_bytes,
            reserved_bytes=probe.reserved_bytes,
            cache_ratio=row.batch * (row.context + 1) * self.check.spec.fp16_bytes_per_token() / probe.cache_bytes,
        )

    def probe(self, new_cache: NewCache, context: int, batch: int) -> Probe:
        """Reads a prompt and takes one decode step."""
        device, chunk = self.model.device, self.config.prefill_chunk
        reset_peak_memory(device)
        with torch.inference_mode():
            cache = new_cache()
            ids = random_prompt(self.check.spec, batch, context, device, self.config.seed)
            length = chunk_length(chunk, batch, context)
            middle = 0 if self.config.full_prefill else max(0, context - 2 * length)
            if middle:
                prefill(self.model, cache, ids[:, :length], chunk)
                fill(self.model, cache, batch, middle, chunk)
                ids = ids[:, length + middle :]
            token = prefill(self.model, cache, ids, chunk).argmax(-1)
            step(self.model, cache, token)
        allocated, reserved = peak_memory(device)
        return Probe(cache_bytes(cache), allocated or 0, reserved or 0)
