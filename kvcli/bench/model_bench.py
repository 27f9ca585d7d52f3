"""Whole models with each method's cache: speed of given prompts, and what fits into a memory budget.

The suites `generate` and `memory` of `kvcli bench`. Both read a prompt and decode after it; `generate` times that, and
`memory` asks for the largest batch at a context or the longest context of one sequence, found by allocating. Before a
method is run, its kernels are checked against the reference on one layer of the model's shape.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kvcli.attention.session import Session
from kvcli.bench.budget import attempt, check_budget, largest_by_peak, memory_limit, need_gpu, release_gpu_memory
from kvcli.bench.check import KernelCheck
from kvcli.bench.decode import DecodeMode, round_tokens
from kvcli.bench.fixed_length import with_fixed_length
from kvcli.bench.layer import MethodCase
from kvcli.bench.model import attached, random_prompt, run_model
from kvcli.bench.model_row import ModelRow, Question
from kvcli.bench.rows import run_row
from kvcli.bench.run import Run, step_weights_bytes
from kvcli.bench.timing import copy_bandwidth
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


class ModelBench:
    """Measures methods on one model.

    Args:
        model: a causal language model, detached.
        cases: the methods; the first is fp16.
        impl: attention over codes, as in `kvcli.attach`.
        seed: of prompts and codebooks.
        memory_budget: bytes that torch may reserve, weights included; None: all there are.
        prefill_chunk: tokens of the whole batch per forward pass of the prompt; None: all.
        decode: how tokens are made with a compressed cache.
        backend: of `torch.compile`, which compiles the layers for decode steps, fp16's too; None: they run as they are.

    Raises:
        UsageError: no such implementation, compiled passes, graphs without a GPU, or a budget without a GPU or larger
            than it.
    """

    def __init__(
        self,
        model: Any,
        cases: list[MethodCase],
        *,
        impl: str,
        seed: int,
        memory_budget: int | None = None,
        prefill_chunk: int | None = None,
        decode: DecodeMode = "auto",
        backend: str | None = None,
    ) -> None:
        self.model, self.cases, self.impl, self.seed = model, cases, impl, seed
        self.memory_budget, self.prefill_chunk = memory_budget, prefill_chunk
        self.decode, self.backend = decode, backend
        self.device: torch.device = model.device
        if decode == "graphs" and self.device.type != "cuda":
            raise UsageError("CUDA graphs need a GPU; use --decode steps or passes")
        if decode == "passes" and backend is not None:
            raise UsageError("layers are compiled for decode steps: use --decode graphs or steps with --compile")
        if memory_budget is not None:
            check_budget(memory_budget, self.device)
        self.check = KernelCheck(model, cases, impl, seed)
        self.spec = self.check.spec
        self.weights_bytes = sum(weight.nbytes for weight in model.parameters())

    def generate(
        self,
        contexts: list[int],
        batches: list[int] | None,
        *,
        new_tokens: int,
        repeats: int,
        fill_prompt: bool = False,
    ) -> Iterator[ModelRow]:
        """Times every method at every prompt length and batch, fp16 first.

        Args:
            contexts: lengths of the prompt.
            batches: sequences; None: the largest batch that fits, for each method its own.
            new_tokens: tokens chosen after the prompt; 0 reads the prompt only.
            repeats: runs timed.
            fill_prompt: whether only the first and the last chunk of a prompt are computed; its times are then None.

        Yields:
            A row per method, length and batch.

        Raises:
            UsageError: the largest batch without a GPU.
        """
        if batches is None:
            need_gpu(self.device)
        copy_gb_s = None
        if self.device.type == "cuda":
            copy_gb_s = copy_bandwidth(self.device, 10)
            release_gpu_memory()
        for context in contexts:
            for batch in [None] if batches is None else batches:
                baseline: ModelRow | None = None
                for case in self.cases:
                    measure = partial(self._times, case, repeats, fill_prompt, copy_gb_s)
                    row = self._run_row(measure, case, context, batch, new_tokens)
                    baseline = baseline or row
                    yield row.with_ratios(baseline)

    def memory(
        self, contexts: list[int], batches: list[int] | None, *, longest: bool, full_prefill: bool
    ) -> Iterator[ModelRow]:
        """Tries what fits into the budget: every method at every context, then its longest context.

        Args:
            contexts: lengths of the prompt.
            batches: sequences; None: the largest batch that fits, for each method and context.
            longest: whether to search for the longest context of one sequence too.
            full_prefill: whether the model computes the whole prompt, instead of its first and last chunk.

        Yields:
            A row per method and question.

        Raises:
            UsageError: no GPU.
        """
        need_gpu(self.device)
        for case in self.cases:
            measure = partial(self._memory, case, full_prefill)
            for context in contexts:
                for batch in [None] if batches is None else batches:
                    yield self._run_row(measure, case, context, batch, 2)
            if longest:
                yield self._run_row(measure, case, None, 1, 2)

    def _run_row(
        self,
        measure: Callable[[ModelRow], ModelRow],
        case: MethodCase,
        context: int | None,
        batch: int | None,
        new_tokens: int,
    ) -> ModelRow:
        """A measured row; None for the size that is searched for."""
        question: Question = "longest context" if context is None else "largest batch" if batch is None else "given"
        empty = ModelRow(
            case.name,
            context or 0,
            batch or 0,
            self.check.attends[case.name][0],
            question=question,
            new_tokens=new_tokens,
            weights_bytes=self.weights_bytes,
        )
        row = run_row(partial(measure, empty), empty)
        release_gpu_memory()
        return row

    def _times(
        self, case: MethodCase, repeats: int, fill_prompt: bool, copy_gb_s: float | None, row: ModelRow
    ) -> ModelRow:
        """Finds the batch if none is given, checks the kernels at this shape, and times runs."""
        bounded = self.memory_budget is not None or not row.batch
        if not row.batch:
            row, _ = self._search(case, row, fill_middle=fill_prompt)
        if row.status == "ok":
            tokens = max(_CHECKED_TOKENS, row.context + row.new_tokens)
            row = row.checked(self.check.agreement(case, tokens, row.batch))
        if row.status != "ok":
            return row
        with self._attached(case) as session:
            run = partial(self._run, session, row.batch, row.context, fill_middle=fill_prompt)
            if case.is_baseline:
                end = time.perf_counter() + _WARM_SECONDS.get(self.device.type, 0.0)
                while time.perf_counter() < end:
                    run(0)
            run(min(row.new_tokens, _WARM_TOKENS + round_tokens(case.method, case.config)))
            runs = []
            for _ in range(repeats):
                if bounded:
                    release_gpu_memory()  # a run that fitted in the search began with no memory reserved
                runs.append(run(row.new_tokens))
            row = row.with_memory(runs)
            if case.is_baseline and not self.spec.other_layers:  # a cache of fixed length has full attention only
                runs = with_fixed_length(self.model, runs, row.batch, row.context, row.new_tokens, self.backend)
        row = row.with_times(runs, filled=fill_prompt)
        return row.with_ceiling(step_weights_bytes(self.model) + runs[-1].used_bytes, copy_gb_s) if copy_gb_s else row

    def _memory(self, case: MethodCase, full_prefill: bool, row: ModelRow) -> ModelRow:
        """Checks the kernels, once per method, and answers the question."""
        row = row.checked(self.check.agreement(case, _CHECKED_CONTEXT, 1))
        if row.status != "ok":
            return row
        row, run = self._search(case, row, fill_middle=not full_prefill)
        if run is None:
            return row
        fp16_bytes = row.batch * (row.context + 1) * self.spec.fp16_bytes_per_token()
        return replace(row.with_memory([run]), cache_ratio=(fp16_bytes + run.other_bytes) / run.cache_bytes)

    def _search(self, case: MethodCase, row: ModelRow, *, fill_middle: bool = False) -> tuple[ModelRow, Run | None]:
        """Tries sizes until the row's question is answered.

        Returns:
            The row with batch and context, and the run of that size; None if nothing fits.
        """
        runs: dict[int, Run] = {}
        budget = self.memory_budget or torch.cuda.get_device_properties(self.device).total_memory
        with self._attached(case) as session:

            def peak(size: int) -> int | None:
                """Peak in bytes of a batch, or of a context in units."""
                batch, context = (size, row.context) if row.context else (1, size * _CONTEXT_UNIT)
                fits = attempt(
                    lambda: runs.update(
                        {size: self._run(session, batch, context, row.new_tokens, fill_middle=fill_middle)}
                    )
                )
                return (runs[size].peak_bytes or 0) if fits else None

            if row.question == "given":
                size = row.batch if peak(row.batch) is not None else 0
            else:
                size = largest_by_peak(peak, budget)
        if row.question == "largest batch":
            row = replace(row, batch=size)
        elif row.question == "longest context":
            row = replace(row, context=size * _CONTEXT_UNIT)
        return (row, runs[size]) if size else (replace(row, status="out of memory"), None)

    def _run(
        self, session: Session | None, batch: int, context: int, new_tokens: int, *, fill_middle: bool = False
    ) -> Run:
        ids = random_prompt(self.spec, batch, context, self.device, self.seed)
        return run_model(
            self.model,
            session,
            ids,
            new_tokens,
            self.prefill_chunk,
            fill_middle=fill_middle,
            decode=self.decode,
            backend=self.backend,
        )

    @contextmanager
    def _attached(self, case: MethodCase) -> Iterator[Session | None]:
        """Attaches a method within the memory budget, inside the block."""
        with memory_limit(self.memory_budget, self.device), attached(self.model, case, self.impl, self.seed) as session:
            yield session
