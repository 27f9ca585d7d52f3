"""Contexts in files: reading a prompt again against loading its compressed cache.

The suite `contexts` of `kvcli bench`. It times what users call, `CompressedCache.save` and `Session.load_cache`,
checksums included, with fp16 as one of the methods. Files are read soon after they were written, so their content comes
from the system's page cache, not from the disk.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvcli.attention.session import Session
from kvcli.bench.budget import release_gpu_memory
from kvcli.bench.check import TOLERANCE, KernelCheck
from kvcli.bench.decode import synchronized_time
from kvcli.bench.layer import MethodCase
from kvcli.bench.model import open_session, prefill, random_prompt
from kvcli.bench.rows import Row, run_row
from kvcli.bench.timing import percentiles
from kvcli.cache.compressed import CompressedCache

Times = tuple[float, float, float]
"""20th, 50th and 80th percentile."""

_CHECKED_TOKENS = 256
"""Fewest tokens on which kernels are checked: a short context may have no codes."""

_TOLERANCE_16 = 3e-2
"""Largest allowed `logits_error` of a model in 16 bits: sums in another order, rounded in every layer."""


@dataclass(frozen=True)
class ContextRow(Row):
    """A row of `Row`'s fields and these; the batch is always 1, and `fp16` is kvcli's cache, too.

    Attributes:
        logits_error: |logits - those of the cache that was saved| / |those| after loading.
        file_bytes: of the file, with positions, token ids and metadata.
        file_bits: bits of the file per key or value.
        file_ratio: bytes of keys and values in 16 bits over `file_bytes`.
        prefill_token_ms: from an empty cache to the first token after the context and one more token.
        write_ms: `save`: copies to the host, checksums, the file, and until it is on the disk.
        load_ms: `load_cache`: until a new cache on the device holds the context, checksums verified.
        load_token_ms: the same and the pass over one more token.
        speedup: median of `prefill_token_ms` over that of `load_token_ms`.
        repeats: runs timed.
    """

    logits_error: float | None = None
    file_bytes: int | None = None
    file_bits: float | None = None
    file_ratio: float | None = None
    prefill_token_ms: Times | None = None
    write_ms: Times | None = None
    load_ms: Times | None = None
    load_token_ms: Times | None = None
    speedup: float | None = None
    repeats: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain JSON values; the context is also called `prompt_tokens`."""
        return {**super().to_dict(), "prompt_tokens": self.context}


class ContextBench:
    """Measures methods on one model and one sequence.

    Args:
        model: a causal language model, detached.
        cases: the methods.
        impl: attention over codes, as in `kvcli.attach`.
        seed: of prompts and codebooks.
        prefill_chunk: tokens per forward pass of the prompt; None: all.
        folder: where a temporary folder for the files is made; None: the system's.

    Raises:
        UsageError: no such implementation.
    """

    def __init__(
        self,
        model: Any,
        cases: list[MethodCase],
        *,
        impl: str,
        seed: int,
        prefill_chunk: int | None = None,
        folder: Path | None = None,
    ) -> None:
        self.model, self.cases, self.impl, self.seed = model, cases, impl, seed
        self.prefill_chunk, self.folder = prefill_chunk, folder
        self.check = KernelCheck(model, cases, impl, seed)

    def rows(self, contexts: list[int], repeats: int) -> Iterator[ContextRow]:
        """Times every method at every length.

        Args:
            contexts: tokens of the context.
            repeats: runs timed, after one that is not.

        Yields:
            A row per length and method.
        """
        for context in contexts:
            for case in self.cases:
                empty = ContextRow(case.name, context, 1, self.check.attends[case.name][0])
                yield run_row(partial(self._measure, case, repeats, empty), empty)
                release_gpu_memory()

    def _measure(self, case: MethodCase, repeats: int, row: ContextRow) -> ContextRow:
        row = row.checked(self.check.agreement(case, max(_CHECKED_TOKENS, row.context), 1))
        if row.status != "ok":
            return row
        ids = random_prompt(self.check.spec, 1, row.context + 1, self.model.device, self.seed)
        with (
            tempfile.TemporaryDirectory(prefix="kvcli-bench-", dir=self.folder) as folder,
            open_session(self.model, case, self.impl, self.seed) as session,
            torch.inference_mode(),
        ):
            row = replace(row, impl=session.backend.impl)
            return self._timed(session, Path(folder) / "context.safetensors", ids, repeats, row)

    def _timed(self, session: Session, path: Path, ids: Tensor, repeats: int, row: ContextRow) -> ContextRow:
        """Writes a file, then reads the prompt and the file again."""
        device = ids.device
        context, last = ids[:, :-1], ids[:, -1:]

        def write(cache: CompressedCache) -> tuple[float, ...]:
            path.unlink(missing_ok=True)
            started = synchronized_time(device)
            cache.save(path, context)
            return (synchronized_time(device) - started,)

        def read_prompt() -> tuple[float, ...]:
            started = synchronized_time(device)
            prefill(self.model, session.new_cache(), ids, self.prefill_chunk).argmax(-1)
            return (synchronized_time(device) - started,)

        def load() -> tuple[float, ...]:
            started = synchronized_time(device)
            cache = session.load_cache(path)
            loaded = synchronized_time(device)
            prefill(self.model, cache, last, None).argmax(-1)
            return loaded - started, synchronized_time(device) - started

        cache = session.new_cache()
        prefill(self.model, cache, context, self.prefill_chunk)
        (write_ms,) = _percentiles_ms(partial(write, cache), repeats)
        expected = prefill(self.model, cache, last, None).float()
        del cache
        error = float((prefill(self.model, session.load_cache(path), last, None) - expected).norm() / expected.norm())
        row = replace(row, logits_error=error)
        if not error <= TOLERANCE.get(self.model.dtype, _TOLERANCE_16):
            note = f"logits after loading differ by {error:.1e} from those of the cache that was saved"
            return replace(row, status="mismatch", note=note)
        (prefill_ms,) = _percentiles_ms(read_prompt, repeats)
        load_ms, load_token_ms = _percentiles_ms(load, repeats)
        file_bytes, fp16_bytes = path.stat().st_size, row.context * self.check.spec.fp16_bytes_per_token()
        return replace(
            row,
            file_bytes=file_bytes,
            file_bits=16 * file_bytes / fp16_bytes,
            file_ratio=fp16_bytes / file_bytes,
            prefill_token_ms=prefill_ms,
            write_ms=write_ms,
            load_ms=load_ms,
            load_token_ms=load_token_ms,
            speedup=prefill_ms[1] / load_token_ms[1],
            repeats=repeats,
        )


def _percentiles_ms(call: Callable[[], tuple[float, ...]], repeats: int) -> list[Times]:
    """Percentiles in milliseconds of each of the times in seconds that a call gives; its first run is left out."""
    runs = [call() for _ in range(repeats + 1)][1:]
    return [percentiles([1e3 * seconds for seconds in times]) for times in zip(*runs, strict=True)]
