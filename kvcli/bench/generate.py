"""Suites `generate` and `memory`: whole models, timed end to end or asked what fits into a memory budget."""

from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field

from kvcli.bench.suite import BenchRows, BenchSuite, Column, Lengths, WholeModelOptions, bench_table, parse_batches
from kvcli.commands.sizes import parse_size, share, size
from kvcli.commands.suite import Bars, Records, SideBySide
from kvcli.commands.tables import DataTable
from kvcli.errors import UsageError
from kvcli.models.builtin_models import DEFAULT_MODEL
from kvcli.progress import Reporter
from kvcli.registry import UNFITTED_METHOD

MEMORY_SHAPE = "llama-3.1-8b"
FILLED_CHUNK = 4096
PREFILL = {True: "computed", False: "ends computed, middle filled"}
"""How prompts were read, by whether all of a prompt was computed."""


FIGURES = {
    "question": "whether batch and context were options, or which of them was searched for: 0 if nothing fits",
    "new_tokens": "tokens after the prompt",
    "weights_bytes": "of the model",
    **dict.fromkeys(("lse_error", "encoding_gap"), "as in `kvcli.bench.layer.Agreement`"),
    **dict.fromkeys(("cache_bytes", "other_bytes"), "as in `kvcli.bench.model.ModelRun`"),
    **dict.fromkeys(("peak_bytes", "reserved_bytes"), "the same, the most of all runs; None on a CPU"),
    "prefill_ms": "20th, 50th and 80th percentile of the time of the prompt, encoding included",
    "ttft_ms": "median time to the first token",
    "decode": "how the tokens after the first were generated: graphs, steps or passes; fp16: eager or graph of one "
    "length",
    "steady_tokens": "tokens per sequence that `tokens_per_s` is of; None: all after the first, captures included",
    "tokens_per_s": "percentiles of the rate of steady steps, all sequences together; None without a second token",
    "total_tokens_per_s": "median of all new tokens over the whole time, prefill and captures included",
    "repeats": "runs timed",
    "read_bytes": "weights that a decode step reads, and keys and values at the end; None on a CPU",
    "copy_gb_s": "of a device copy, bytes read plus bytes written; None on a CPU",
    "ceiling_tokens_per_s": "rate of steps that take as long as `read_bytes` at `copy_gb_s`",
    "ceiling_share": "median of `tokens_per_s` over `ceiling_tokens_per_s`",
    "rate_ratio": "`tokens_per_s` over that of `fp16`, which is the model without kvcli",
    "total_ratio": "`total_tokens_per_s` over fp16's",
    "prefill_ratio": "prefill time per sequence over fp16's",
    "cache_ratio": "bytes of fp16's cache per sequence over this one's",
}
"""Of both suites; those of time are None in the suite `memory`."""


class GenerateBenchOptions(WholeModelOptions):
    """Options of `kvcli bench generate`."""

    batches: list[str] = Field(
        [], description="sequences, or 'auto' for the largest batch that fits; repeatable; default: 1"
    )
    prompt_tokens: Lengths = Field([], description="prompt lengths; repeatable; default: 512 (CPU: 256)")
    max_new_tokens: int | None = Field(
        None,
        ge=0,
        description="tokens after the prompt; times are of whole rounds of encoding after the first two, or of all "
        "tokens if there are none; default: 513, four rounds of 128 (CPU: 8)",
    )
    repeats: int = Field(3, ge=1, description="runs timed")
    decode: Literal["auto", "graphs", "steps", "passes"] = Field(
        "auto",
        description="how compressed rows make tokens: steps captured as CUDA graphs, the same not captured, or one "
        "forward pass each; auto: graphs on a GPU with kernels, else passes",
    )
    fill_prompt: bool = Field(
        False,
        description="fill the cache between the prompt's first and last chunk with random keys and values; the "
        "prompt's times are then left out",
    )
    memory_budget: str | None = Field(None, description="limit of torch, as 24GiB or 24G; default: none")

    def check(self) -> None:
        super().check()
        parse_batches(self.batches)
        parse_size(self.memory_budget)


class MemoryOptions(WholeModelOptions):
    """Options of `kvcli bench memory`."""

    random_weights: str | None = Field(
        None, description=f"random weights of a shape instead of a model; default: {MEMORY_SHAPE}"
    )
    batches: list[str] = Field(["auto"], description="sequences, or 'auto' for the largest batch that fits; repeatable")
    contexts: Lengths = Field([32768], description="context lengths; repeatable")
    memory_budget: str = Field("24GiB", description="limit of torch, as 24GiB or 24G")
    full_prefill: bool = Field(
        False, description="compute the whole prompt, instead of filling the cache between its ends"
    )
    longest: bool = Field(True, description="also find the longest context of one sequence")

    def check(self) -> None:
        super().check()
        parse_batches(self.batches)
        parse_size(self.memory_budget)


def prepare_generate(
    options: GenerateBenchOptions, reporter: Reporter, make: Callable[..., Any] | None = None
) -> BenchRows:
    """Rows of fp16 and of methods, timed; `make` a `ModelBench` that times more, from the same arguments."""
    import torch

    from kvcli.bench.model_bench import ModelBench
    from kvcli.plan.budget import check_budget, need_gpu

    device = torch.device(options.torch_device())
    gpu = device.type == "cuda"
    cases = options.choices(few=not gpu)
    batches, budget = parse_batches(options.batches), parse_size(options.memory_budget)
    if budget is not None:
        check_budget(budget, device)
    if batches is None:
        need_gpu(device)
    if options.decode == "graphs" and not gpu:
        raise UsageError("CUDA graphs need a GPU; use --decode steps or passes")
    filled = options.fill_prompt
    chunk = options.prefill_chunk or (FILLED_CHUNK if filled else None)
    loaded, shared = options.load_model(options.random_weights, reporter)
    bench = (make or ModelBench)(
        loaded.model,
        cases,
        impl=options.impl,
        seed=options.seed,
        memory_budget=budget,
        prefill_chunk=chunk,
        fill_middle=filled,
        mode=None if options.decode == "auto" else options.decode,
    )
    contexts = options.prompt_tokens or ([512] if gpu else [256])
    new_tokens = options.max_new_tokens if options.max_new_tokens is not None else 513 if gpu else 8
    rows = bench.generate(contexts, batches, new_tokens=new_tokens, repeats=options.repeats)
    shared = {**shared, "memory_budget": budget, "prefill_chunk": chunk, "prefill": PREFILL[not filled]}
    return BenchRows(rows, len(contexts) * len(batches or [0]) * len(cases), shared)


def prepare_memory(options: MemoryOptions, reporter: Reporter) -> BenchRows:
    """Rows of what fits into the budget."""
    import torch

    from kvcli.bench.model_bench import ModelBench
    from kvcli.plan.budget import check_budget

    budget = parse_size(options.memory_budget)
    assert budget is not None
    check_budget(budget, torch.device(options.torch_device()))
    cases = options.choices()
    batches, chunk, full = parse_batches(options.batches), options.prefill_chunk or FILLED_CHUNK, options.full_prefill
    shape = options.random_weights or (MEMORY_SHAPE if options.model == DEFAULT_MODEL else None)
    loaded, shared = options.load_model(shape, reporter)
    limits: dict[str, Any] = {"memory_budget": budget, "prefill_chunk": chunk}
    bench = ModelBench(loaded.model, cases, impl=options.impl, seed=options.seed, fill_middle=not full, **limits)
    rows = bench.memory(options.contexts, batches, longest=options.longest)
    total = len(cases) * (len(options.contexts) * len(batches or [0]) + options.longest)
    return BenchRows(rows, total, {**shared, **limits, "prefill": PREFILL[full]})


def generate_table(records: Records, options: GenerateBenchOptions) -> DataTable:
    """Rates and memory of whole models, compared with fp16."""
    columns: dict[str, Column] = {
        "prompt+new": "{prompt_tokens}+{new_tokens}",
        "batch": "{batch}",
        "x tok/s": "{rate_ratio:.2f}",
        "x total": "{total_ratio:.2f}",
        "prefill / fp16": "{prefill_ratio:.3f}",
        "cache": lambda x: share(x["cache_ratio"]),
        "tok/s": "{tokens_per_s[1]:.1f}",
        "% of ceiling": "{ceiling_share:.0%}",
        "decode": lambda x: f"{x['decode']}{' *' * (x['steady_tokens'] is None)}" if x["decode"] else "-",
        "prefill ms": "{prefill_ms[1]:.1f}",
        "p20-p80": "{prefill_ms[0]:.1f}-{prefill_ms[2]:.1f}",
        "ttft ms": "{ttft_ms:.1f}",
        "peak": lambda x: "-" if x["peak_bytes"] is None else size(x["peak_bytes"]),
    }
    first = records[0]
    budget = "" if first["memory_budget"] is None else f", budget {size(first['memory_budget'])}"
    title = (
        f"{first['model']}, {first['weights']} weights, {_layers(records)}, {first['dtype']}{budget}; "
        f"prompts: {first['prefill']}; x: over fp16, which is transformers' model and SDPA, the faster of its own "
        "cache and, on a GPU, a captured step whose cache does not grow; tok/s: of all sequences, in steady steps (*: "
        "of all tokens after the first)"
    )
    optional = ("p20-p80", "ttft ms", "x total", "error", "prefill ms", "peak", "impl", "cache", "decode", "tok/s")
    return bench_table(title, records, columns, (*optional, "% of ceiling"))


def memory_table(records: Records, options: MemoryOptions) -> DataTable:
    """What fits into the budget."""
    columns: dict[str, Column] = {
        "question": "{question}",
        "context": "{context}",
        "batch": "{batch}",
        "cache": lambda x: size(x["cache_bytes"]),
        "cache / fp16": lambda x: share(x["cache_ratio"]),
        "peak": lambda x: size(x["peak_bytes"]),
        "reserved": lambda x: size(x["reserved_bytes"]),
    }
    first = records[0]
    weights = f"{first['weights']} weights ({size(first['weights_bytes'])})"
    title = (
        f"{first['model']}, {weights}, {_layers(records)}, {first['dtype']}, budget {size(first['memory_budget'])};"
        f" prompts in chunks of {first['prefill_chunk']} tokens, {first['prefill']}; one decode step"
    )
    return bench_table(title, records, columns, ("reserved", "error", "impl", "peak"))


def _layers(records: Records) -> str:
    """How many layers are compressed, and their share of fp16's cache where there are others."""
    count, others = records[0]["num_layers"], records[0]["other_layers"]
    if not others:
        return f"{count} layers"
    text = f"{count} of {count + others} layers compressed"
    baseline = next((x for x in records if x["impl"] == "sdpa" and x["cache_bytes"]), None)
    if baseline is None:
        return text
    return f"{text} ({100 * (1 - baseline['other_bytes'] / baseline['cache_bytes']):.0f} % of fp16's cache)"


SUITE = BenchSuite(
    name="generate",
    help="A model end to end: prompt, decoding and memory of methods, next to fp16.",
    options=GenerateBenchOptions,
    example=f"kvcli bench generate --method {UNFITTED_METHOD} --prompt-tokens 1024",
    saves_memory="lower --prompt-tokens, --batches or --prefill-chunk",
    prepare=prepare_generate,
    figures=FIGURES,
    tabulate=generate_table,
    side_by_side=SideBySide("context", ("tok/s", "x tok/s")),
    bars=(
        Bars("tokens_per_s", "decoding", "tokens/s"),
        Bars("ttft_ms", "first token", "ms"),
        Bars("cache_bytes", "cache", "GiB", 2**30),
        Bars("peak_bytes", "peak memory", "GiB", 2**30),
    ),
)

MEMORY = BenchSuite(
    name="memory",
    help="The largest batch and the longest context that fit into a memory budget.",
    options=MemoryOptions,
    example=f"kvcli bench memory --memory-budget 24GiB --method {UNFITTED_METHOD}",
    saves_memory="lower --contexts, --batches or --prefill-chunk",
    prepare=prepare_memory,
    figures=FIGURES,
    tabulate=memory_table,
    chart="capacity",
)
