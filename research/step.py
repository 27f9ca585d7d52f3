"""Suite `step`: where the time of a decode step goes, by the kernels of a CUDA graph that is replayed.

The cache is filled with random keys and values between the first and the last chunk of the prompt. fp16 is the step of
`kvcli.bench.fixed_length`, in its faster way.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pydantic import Field

from kvcli.bench.suite import BenchRows, BenchSuite, Column, Lengths, Row, WholeModelOptions, bench_table, run_row
from kvcli.commands.suite import Bars, Records, SideBySide
from kvcli.commands.tables import DataTable
from kvcli.errors import UsageError
from kvcli.progress import Reporter
from kvcli.registry import UNFITTED_METHOD

if TYPE_CHECKING:
    from kvcli.artifact.choice import MethodChoice

CHUNK = 4096
STEPS = 24
"""Tokens that are made, of which the first is no step and the next is not replayed."""

_PRODUCTS = re.compile(r"^_(linear|gated)_kernel|gemm|nvjet|cutlass|cublas|splitKreduce", re.IGNORECASE)
_OTHERS = re.compile(r"^_rms_norm_kernel")
_ATTENTION = re.compile(r"^_\w+_kernel|flash|fmha|attention", re.IGNORECASE)


class StepOptions(WholeModelOptions):
    """Options of `python -m research bench step`."""

    prompt_tokens: Lengths = Field(default=[8192], description="prompt lengths; repeatable")
    batch_size: int = Field(default=1, ge=1, description="sequences")


def kind_of(kernel: str) -> str:
    """`products`, `attention` or `others`, by a kernel's name; those of kvcli are Triton's, called `_NAME_kernel`."""
    if _PRODUCTS.search(kernel):
        return "products"
    return "attention" if _ATTENTION.search(kernel) and not _OTHERS.search(kernel) else "others"


def figures_of(kernels: Sequence[tuple[str, float, float]], layers: int) -> dict[str, float]:
    """Figures of a step per layer, in microseconds, from names, starts and ends of its kernels.

    A kernel that is launched while another one ends (PDL) counts from that end, so kinds do not overlap; `between` is
    when none ran.
    """
    times, end = Counter[str](), 0.0
    for name, start, stop in sorted(kernels, key=lambda x: x[2]):
        times[kind_of(name)] += max(0.0, stop - max(start, end))
        end = max(end, stop)
    span = end - min(start for _, start, _ in kernels)
    parts = {name: times[name] / layers for name in ("products", "attention", "others")}
    return {"launches": len(kernels) / layers, **parts, "between": (span - times.total()) / layers}


def profiled(replay: Any) -> list[tuple[str, float, float]]:
    """Names, starts and ends of the kernels of a call, in microseconds."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        replay()
        torch.cuda.synchronize()
    on_gpu = [x for x in profile.events() if x.device_type == torch.autograd.DeviceType.CUDA]
    return [(x.name, x.time_range.start, x.time_range.end) for x in on_gpu]


@contextmanager
def watched() -> Iterator[tuple[list[Any], list[Any]]]:
    """Events after each replay of a pass inside the block, and the kernels of one of them."""
    import torch

    from kvcli.attention.graphs import Graphs

    events, kernels, own = list[Any](), list[Any](), Graphs.call

    def call(graphs: Graphs, key: Any, function: Any) -> None:
        graph = graphs._graphs.get(key) if key == "pass" else None
        if graph is None:
            own(graphs, key, function)
        else:
            if len(events) == STEPS - 4:
                kernels.extend(profiled(graph.replay))
            else:
                graph.replay()
            events.append(torch.cuda.Event(enable_timing=True))
            events[-1].record()

    Graphs.call = call  # type: ignore[method-assign]
    try:
        yield events, kernels
    finally:
        Graphs.call = own  # type: ignore[method-assign]


def prepare(options: StepOptions, reporter: Reporter) -> BenchRows:
    """Rows of fp16 and of methods."""
    import torch

    from kvcli.bench.fixed_length import replay_step, ways_of_modules
    from kvcli.bench.model import fill, open_session, prefill_logits, random_prompt, step_weights_bytes
    from kvcli.bench.model_bench import with_ceiling
    from kvcli.bench.timing import copy_bandwidth

    if torch.device(options.torch_device()).type != "cuda":
        raise UsageError("a step is profiled as a CUDA graph, which needs a GPU")
    loaded, shared = options.load_model(options.random_weights, reporter)
    model, cases, batch = loaded.model, options.choices(), options.batch_size
    copied = copy_bandwidth(model.device, 10)

    def finished(row: Row, seconds: Sequence[float], cache_bytes: int, figures: dict[str, float]) -> Row:
        median = statistics.median(seconds)
        row = row.plus(ms=1e3 * median, tokens_per_s=batch / median, **figures)
        return with_ceiling(row, step_weights_bytes(model) + cache_bytes, copied)

    def baseline(row: Row) -> Row:
        runs = []
        for how, modules in ways_of_modules(model):
            found: list[Any] = []
            seconds, held, note = replay_step(model, batch, row.context, 1, STEPS, modules, on_graph=found.append)
            if note is not None:
                raise RuntimeError(note)
            kernels = profiled(found[0].replay)
            runs.append((statistics.median(seconds), how, seconds, held, figures_of(kernels, loaded.spec.num_layers)))
        _, how, *run = min(runs, key=lambda x: x[0])
        return finished(row.plus(how=how), *run)

    @torch.inference_mode()
    def measure(case: MethodChoice, row: Row) -> Row:
        if case.is_baseline:
            return baseline(row)
        ids = random_prompt(model, batch, row.context, options.seed)
        with open_session(model, case, options.impl, options.seed) as session:
            session.warmup(batch)
            cache = session.new_cache(row.context + STEPS)
            prefill_logits(model, cache, ids[:, : min(CHUNK, row.context // 2)], CHUNK)
            between = row.context - 1 - cache.get_seq_length() - min(CHUNK, row.context // 4)
            fill(model, cache, session, batch, between, CHUNK)
            with watched() as (events, kernels):
                made = session.generate(ids, cache=cache, max_new_tokens=STEPS, eos_token_id=[], prefill_chunk=CHUNK)
                torch.cuda.synchronize()
            if made.note or not kernels:
                raise RuntimeError(made.note or f"steps are {made.mode}, not graphs")
            seconds = [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)]
            figures = figures_of(kernels, loaded.spec.num_layers)
            return finished(row.plus(how=made.mode), seconds, cache.memory().cache_bytes, figures)

    rows = (
        run_row(partial(measure, case), Row(case.label, context, batch, options.impl))
        for context in options.prompt_tokens
        for case in cases
    )
    return BenchRows(rows, len(cases) * len(options.prompt_tokens), shared)


def tabulate(records: Records, options: StepOptions) -> DataTable:
    """Figures of a step, per layer."""
    columns: dict[str, Column] = {
        "tokens": "{context}",
        "ms": "{ms:.2f}",
        "launches": "{launches:.1f}",
        **{f"{name} us": f"{{{name}:.0f}}" for name in ("products", "attention", "others", "between")},
        "% of ceiling": lambda x: f"{100 * x['ceiling_share']:.0f}",
    }
    return bench_table(f"{records[0]['model']}, a step, per layer", records, columns, ("error",))


SUITE = BenchSuite(
    name="step",
    help="Where the time of a decode step goes, by the kernels of a replayed CUDA graph.",
    options=StepOptions,
    example=f"python -m research bench step --random-weights llama-3.1-8b --method {UNFITTED_METHOD}",
    saves_memory="lower --prompt-tokens",
    prepare=prepare,
    figures={
        "ms": "median of replayed steps",
        "launches": "kernels per layer, those of the rest of a step among them",
        "tokens_per_s": "sequences over the median",
        "products": "microseconds per layer of kernels that multiply with weights",
        "attention": "of kernels that attend to, append to or encode the cache",
        "others": "of all others",
        "between": "microseconds per layer in which no kernel ran",
        "how": "graphs; of fp16, which modules the step of one length has",
        "read_bytes": "weights and cache that a step reads",
        "copy_gb_s": "rate of a copy within the device's memory, read and written bytes",
        "ceiling_tokens_per_s": "sequences times that over read_bytes",
        "ceiling_share": "tokens_per_s over that",
    },
    tabulate=tabulate,
    side_by_side=SideBySide("context", ("ms", "launches", "% of ceiling")),
    bars=(Bars("ms", "a step", "ms"),),
)
