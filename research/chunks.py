"""Suite `chunks`: forward passes over short chunks of a text, as `kvcli eval` runs them, next to stock DynamicCache."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pydantic import Field

from kvcli.bench.suite import BenchRows, BenchSuite, Column, Row, WholeModelOptions, bench_table, run_row
from kvcli.commands.suite import Bars, Records, SideBySide
from kvcli.commands.tables import DataTable
from kvcli.progress import Reporter
from kvcli.registry import BASELINE, UNFITTED_METHOD

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.artifact.choice import MethodChoice

_WARM = 16
"""First passes that do not count: in them, codes begin and graphs are captured."""


class ChunksOptions(WholeModelOptions):
    """Options of `python -m research bench chunks`."""

    prompt_tokens: int = Field(default=1000, ge=1, le=2**24, description="tokens of each sequence before the chunks")
    batch_size: int = Field(default=4, ge=1, description="sequences")
    chunk: int = Field(default=32, ge=1, description="tokens of each sequence per pass")
    passes: int = Field(default=32, ge=4, description=f"passes whose median is taken, after {_WARM} others")


def prepare(options: ChunksOptions, reporter: Reporter) -> BenchRows:
    """Rows of fp16 and of methods, all attached."""
    import torch
    from transformers import DynamicCache

    from kvcli.bench.model import open_session, random_prompt
    from kvcli.bench.timing import synchronized_time
    from kvcli.seam.decoder import backbone
    from kvcli.seam.versions import with_cache

    loaded, shared = options.load_model(options.random_weights, reporter)
    model: Any = loaded.model
    cases, count = options.choices(few=True), _WARM + options.passes
    total = options.prompt_tokens + count * options.chunk
    ids = random_prompt(model, options.batch_size, total, options.seed)

    def read(cache: Any, part: Tensor) -> None:
        backbone(model)(input_ids=part, **with_cache(cache))

    def median_ms(cache: Any, read_chunk: Callable[[Tensor], object]) -> float:
        read(cache, ids[:, : options.prompt_tokens])
        times = [synchronized_time(model.device)]
        for part in ids[:, options.prompt_tokens :].split(options.chunk, dim=1):
            read_chunk(part)
            times.append(synchronized_time(model.device))
        return 1e3 * statistics.median(stop - start for start, stop in pairwise(times[_WARM:]))

    @torch.inference_mode()
    def measure(case: MethodChoice, row: Row) -> Row:
        stock = DynamicCache(config=model.config)
        stock_ms = median_ms(stock, partial(read, stock))
        with open_session(model, case, options.impl, options.seed) as session:
            session.warmup(options.batch_size, chunk=options.chunk)
            cache = session.new_cache(total)
            pass_ms = median_ms(cache, partial(read, cache))
            cache = session.new_cache(total)
            with closing(session.chunks(cache, options.chunk, total - options.prompt_tokens)) as read_chunk:
                ms = median_ms(cache, read_chunk)
                mode, impl = read_chunk.mode, session.backend.impl
        return replace(row, impl=impl).plus(ms=ms, pass_ms=pass_ms, stock_ms=stock_ms, mode=mode)

    empty = partial(Row, context=options.prompt_tokens, batch=options.batch_size, impl="-")
    rows = (run_row(partial(measure, case), empty(case.label)) for case in cases)
    return BenchRows(rows, len(cases), {**shared, "chunk": options.chunk})


def tabulate(records: Records, options: ChunksOptions) -> DataTable:
    """Milliseconds per pass, and ratios to fp16 and to stock DynamicCache."""
    fp16 = {record["dtype"]: record["ms"] for record in records if record["method"] == BASELINE}
    columns: dict[str, Column] = {
        "ms": "{ms:.1f}",
        "fp16 = 1": lambda x: f"{x['ms'] / fp16[x['dtype']]:.2f}" if fp16.get(x["dtype"]) else "-",
        "DynamicCache = 1": lambda x: f"{x['ms'] / x['stock_ms']:.2f}",
        "DynamicCache ms": "{stock_ms:.1f}",
        "ordinary passes ms": "{pass_ms:.1f}",
        "mode": "{mode:s}",
    }
    title = (
        f"{records[0]['model']} {'/'.join(fp16)}, passes of {options.batch_size} x {options.chunk} tokens after "
        f"{options.prompt_tokens}"
    )
    return bench_table(title, records, columns, ("error", "impl", "mode", "ordinary passes ms"))


SUITE = BenchSuite(
    name="chunks",
    help="Passes over short chunks of a text, next to fp16 and to stock DynamicCache.",
    options=ChunksOptions,
    example=f"python -m research bench chunks --random-weights smollm2-135m --method {UNFITTED_METHOD}",
    saves_memory="lower --prompt-tokens or --batch-size",
    prepare=prepare,
    figures={
        "ms": "median of a pass of `Session.chunks`, which are CUDA graphs on a GPU",
        "pass_ms": "of ordinary forward passes with the method attached",
        "stock_ms": "of the model as it is with DynamicCache, measured just before",
        "mode": "how passes of `ms` were made: passes, steps or graphs",
    },
    tabulate=tabulate,
    side_by_side=SideBySide("dtype", ("ms", "fp16 = 1", "DynamicCache = 1", "ordinary passes ms")),
    bars=(Bars("ms", "a pass over a chunk", "ms"),),
)
