"""Suite `contexts`: loading a context's compressed cache from a file, against reading its prompt again.

It times what users call, `CompressedCache.save` and `Session.load_cache`, checksums included, with fp16 as one of the
methods. Files are read soon after they were written, from the system's page cache, not from the disk.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from kvcli.bench.suite import (
    BenchRows,
    BenchSuite,
    Column,
    Lengths,
    NoFigures,
    Row,
    WholeModelOptions,
    bench_table,
    run_row,
)
from kvcli.commands.sizes import share, size
from kvcli.commands.suite import Bars, Records
from kvcli.commands.tables import DataTable
from kvcli.progress import Reporter
from kvcli.registry import UNFITTED_METHOD

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.artifact.choice import MethodChoice
    from kvcli.attention.session import Session
    from kvcli.cache.compressed import CompressedCache

Times = tuple[float, float, float]
"""20th, 50th and 80th percentile."""

_TOLERANCE, _TOLERANCE_16 = 1e-4, 3e-2
"""Largest allowed `logits_error` of a model in float32, and in 16 bits: sums in another order, rounded per layer."""


class ContextsOptions(WholeModelOptions):
    """Options of `kvcli bench contexts`."""

    prompt_tokens: Lengths = Field(
        [], description="prompt lengths; repeatable; default: 2048, 8192 and 32768, on a CPU 256 and 1024"
    )
    repeats: int = Field(3, ge=1, description="runs timed")
    context_folder: Path | None = Field(
        None, description="folder for files, which are deleted afterwards; default: the system's temporary folder"
    )


def prepare(options: ContextsOptions, reporter: Reporter) -> BenchRows:
    """Rows of fp16 and of methods."""
    import torch

    from kvcli.bench.layer import KernelCheck
    from kvcli.bench.model import open_session, random_prompt

    gpu = torch.device(options.torch_device()).type == "cuda"
    cases = options.choices(kinds_only=True)
    contexts = options.prompt_tokens or ([2048, 8192, 32768] if gpu else [256, 1024])
    if options.context_folder is not None:
        options.context_folder.mkdir(parents=True, exist_ok=True)
    loaded, shared = options.load_model(options.random_weights, reporter)
    model = loaded.model
    check = KernelCheck(model, cases, options.impl, options.seed)

    def measure(case: MethodChoice, row: Row) -> Row:
        row = row.checked(check.agreement(case, row.context, 1))
        ids = random_prompt(model, 1, row.context + 1, options.seed)
        with (
            tempfile.TemporaryDirectory(prefix="kvcli-bench-", dir=options.context_folder) as folder,
            open_session(model, case, options.impl, options.seed) as session,
            torch.inference_mode(),
        ):
            path = Path(folder) / "context.safetensors"
            return timed(session, path, ids, options, replace(row, impl=session.backend.impl))

    rows = (
        run_row(partial(measure, case), Row(case.label, context, 1, check.impl(case)))
        for context, case in product(contexts, cases)
    )
    return BenchRows(rows, len(contexts) * len(cases), {**shared, "prefill_chunk": options.prefill_chunk})


def timed(session: Session, path: Path, ids: Tensor, options: ContextsOptions, row: Row) -> Row:
    """Writes the cache of all but the last token of `ids` [1, time] to a file, then reads the prompt and the file."""
    import torch

    from kvcli.bench.model import prefill_logits
    from kvcli.bench.timing import synchronized_time

    model, device, chunk = session.model, ids.device, options.prefill_chunk
    context, last = ids[:, :-1], ids[:, -1:]
    cache = session.new_cache(ids.shape[1])
    prefill_logits(model, cache, context, chunk)

    other_bytes = cache.memory().other_bytes

    def write(cache: CompressedCache) -> tuple[float, ...]:
        path.unlink(missing_ok=True)
        started = synchronized_time(device)
        cache.save(path, context)
        return (synchronized_time(device) - started,)

    def read_prompt() -> tuple[float, ...]:
        started = synchronized_time(device)
        prefill_logits(model, session.new_cache(ids.shape[1]), ids, chunk).argmax(-1)
        return (synchronized_time(device) - started,)

    def load() -> tuple[float, ...]:
        started = synchronized_time(device)
        cache = session.load_cache(path)
        loaded = synchronized_time(device)
        prefill_logits(model, cache, last, None).argmax(-1)
        return loaded - started, synchronized_time(device) - started

    (write_ms,) = percentiles_ms(partial(write, cache), options.repeats)
    expected = prefill_logits(model, cache, last, None).float()
    del cache
    error = float((prefill_logits(model, session.load_cache(path), last, None) - expected).norm() / expected.norm())
    row = row.plus(logits_error=error)
    if not error <= (_TOLERANCE if model.dtype == torch.float32 else _TOLERANCE_16):
        note = f"logits after loading differ by {error:.1e} from those of the cache that was saved"
        raise NoFigures(replace(row, status="mismatch", note=note))
    (prefill_ms,) = percentiles_ms(read_prompt, options.repeats)
    load_ms, load_token_ms = percentiles_ms(load, options.repeats)
    file_bytes = path.stat().st_size
    fp16_bytes = row.context * session.spec.fp16_bytes_per_token() + other_bytes
    return row.plus(
        file_bytes=file_bytes,
        file_bits=16 * file_bytes / fp16_bytes,
        file_ratio=fp16_bytes / file_bytes,
        prefill_token_ms=prefill_ms,
        write_ms=write_ms,
        load_ms=load_ms,
        load_token_ms=load_token_ms,
        speedup=prefill_ms[1] / load_token_ms[1],
        repeats=options.repeats,
    )


def percentiles_ms(call: Callable[[], tuple[float, ...]], repeats: int) -> list[Times]:
    """Percentiles in milliseconds of each of the times in seconds that a call gives; its first run is left out."""
    from kvcli.bench.timing import percentiles

    runs = [call() for _ in range(repeats + 1)][1:]
    return [percentiles([1e3 * seconds for seconds in times]) for times in zip(*runs, strict=True)]


def break_even(records: Records) -> dict[str, int | None]:
    """By method, the shortest measured context from which on loading was always faster than reading the prompt.

    None where loading the longest one was slower, or nothing was measured.
    """
    shortest: dict[str, int | None] = {record["method"]: None for record in records}
    for method in shortest:
        measured = [record for record in records if record["method"] == method and record["speedup"] is not None]
        for record in sorted(measured, key=lambda record: -record["context"]):
            if record["speedup"] <= 1:
                break
            shortest[method] = record["context"]
    return shortest


def table(records: Records, options: ContextsOptions) -> DataTable:
    """Loading a context compared with reading it."""
    faster_from = break_even(records)
    columns: dict[str, Column] = {
        "context": "{context}",
        "file": lambda x: size(x["file_bytes"]),
        "file / 16 bits": lambda x: share(x["file_ratio"]),
        "prefill+token ms": "{prefill_token_ms[1]:.1f}",
        "load+token ms": "{load_token_ms[1]:.1f}",
        "times faster": "{speedup:.1f}",
        "load ms": "{load_ms[1]:.1f}",
        "write ms": "{write_ms[1]:.1f}",
        "bits": "{file_bits:.2f}",
        "faster from": lambda x: f"{faster_from[x['method']] or '-'}",
    }
    first = records[0]
    title = (
        f"{first['model']}, {first['weights']} weights, {first['num_layers']} layers, {first['dtype']}, one sequence; "
        "medians; files in the page cache; bits: of the whole file per key or value; faster from: the shortest "
        "measured context from which on loading was faster"
    )
    return bench_table(title, records, columns, ("error", "bits", "impl", "write ms", "faster from", "load ms"))


SUITE = BenchSuite(
    name="contexts",
    help="Loading contexts from files against reading them again.",
    options=ContextsOptions,
    example=f"kvcli bench contexts --method {UNFITTED_METHOD} --prompt-tokens 2048",
    saves_memory="lower --prompt-tokens or --prefill-chunk",
    prepare=prepare,
    figures={
        "logits_error": "|logits - those of the cache that was saved| / |those| after loading",
        "file_bytes": "of the file with positions, token ids and metadata",
        "file_bits": "those per key or value",
        "file_ratio": "bytes of keys and values in 16 bits over `file_bytes`",
        "prefill_token_ms": "from an empty cache to the first token after the context and one more token",
        "write_ms": "`save`: copies to the host, checksums, the file, and until it is on the disk",
        "load_ms": "`load_cache`: until a new cache on the device holds the context, checksums verified",
        "load_token_ms": "the same and the pass over one more token",
        "speedup": "median of `prefill_token_ms` over that of `load_token_ms`",
        "repeats": "runs timed",
    },
    tabulate=table,
    bars=(Bars("load_token_ms", "load and a token", "ms"), Bars("prefill_token_ms", "read again and a token", "ms")),
    summarize=lambda records: {"faster_from": break_even(records)},
)
