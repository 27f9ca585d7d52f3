"""`kvcli bench`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from kvcli.cli.bench_options import DEFAULT_MODEL, BenchOptions, check, parse_batches
from kvcli.cli.bench_report import records_path, report_rows
from kvcli.cli.bench_tables import attention_table, contexts_table, generate_table, memory_table
from kvcli.cli.command import command
from kvcli.cli.context_input import check_storable
from kvcli.cli.output import Output, parse_size
from kvcli.errors import UsageError
from kvcli.options import parse_settings
from kvcli.registry import BASELINE, DEFAULT_METHOD, METHODS, get_method

if TYPE_CHECKING:
    import torch

    from kvcli.bench.layer import MethodCase

MEMORY_SHAPE = "llama-3.1-8b"
MEMORY_BUDGET = "24GiB"
FILLED_CHUNK = 4096
PREFILL = {True: "computed", False: "ends computed, middle filled"}
"""How prompts were read, by whether all of a prompt was computed."""


def run(options: BenchOptions, output: Output) -> None:
    """Measure speed and memory of several methods; kernels are checked against the reference first."""
    check(options)
    records_path(options).open("a").close()  # fails before the measurement, not after it
    suites = {
        "attention": run_attention,
        "generate": run_generate,
        "memory": run_memory,
        "contexts": run_contexts,
    }
    suites[options.suite](options, output)


def run_attention(options: BenchOptions, output: Output) -> None:
    """The suite that measures one layer."""
    import torch

    from kvcli.bench.attention import AttentionBench

    device = torch.device(options.torch_device())
    gpu = device.type == "cuda"
    dtype = options.dtype if options.dtype != "auto" else "float16" if gpu else "float32"
    contexts = options.contexts or ([1024, 8192, 32768, 131072] if gpu else [256, 1024])
    batches = parse_batches(options.batches)
    if batches is None:
        raise UsageError("--batches auto goes with --suite generate or memory")
    bench = AttentionBench(
        options.shape,
        [case for case in method_cases(options, default_methods()) if not case.is_baseline],
        impl=options.impl,
        repeats=options.repeats or 50,
        device=device,
        dtype=getattr(torch, dtype),
        seed=options.seed,
        layer_idx=options.layer,
    )
    warn_without_gpu(device, output)
    shared = {"shape": options.shape, "layer": bench.layer_idx, "dtype": dtype, "weights": "random"}
    total = len(contexts) * len(batches) * (1 + len(bench.cases))
    report_rows(options, output, bench.rows(contexts, batches), total, shared, attention_table)


def run_generate(options: BenchOptions, output: Output) -> None:
    """The suite that runs a model end to end."""
    import torch

    from kvcli.attention.compiled import BACKEND
    from kvcli.bench.budget import check_budget, need_gpu
    from kvcli.bench.model_bench import ModelBench

    device = torch.device(options.torch_device())
    gpu = device.type == "cuda"
    cases = method_cases(options, default_methods(few=not gpu), baseline=True)
    batches, budget = parse_batches(options.batches), parse_size(options.memory_budget)
    if budget is not None:
        check_budget(budget, device)
    if batches is None:
        need_gpu(device)
    chunk = options.prefill_chunk or (FILLED_CHUNK if options.fill_prompt else None)
    model, shared = load(options, options.random_weights, output)
    bench = ModelBench(
        model,
        cases,
        impl=options.impl,
        seed=options.seed,
        memory_budget=budget,
        prefill_chunk=chunk,
        decode=options.decode,
        backend=BACKEND if options.compile else None,
    )
    contexts = options.prompt_tokens or ([512] if gpu else [256])
    new_tokens = options.max_new_tokens if options.max_new_tokens is not None else 513 if gpu else 8
    filled = options.fill_prompt
    rows = bench.generate(contexts, batches, new_tokens=new_tokens, repeats=options.repeats or 3, fill_prompt=filled)
    shared = {**shared, "memory_budget": budget, "prefill_chunk": chunk, "prefill": PREFILL[not filled]}
    report_rows(options, output, rows, len(contexts) * len(batches or [0]) * len(cases), shared, generate_table)


def run_memory(options: BenchOptions, output: Output) -> None:
    """The suite that finds what fits into a memory budget."""
    import torch

    from kvcli.bench.budget import check_budget
    from kvcli.bench.model_bench import ModelBench

    budget = parse_size(options.memory_budget or MEMORY_BUDGET)
    assert budget is not None
    check_budget(budget, torch.device(options.torch_device()))
    cases = method_cases(options, default_methods(), baseline=True)
    contexts, batches = options.contexts or [32768], parse_batches(options.batches or ["auto"])
    chunk, full = options.prefill_chunk or FILLED_CHUNK, options.full_prefill
    shape = options.random_weights or (MEMORY_SHAPE if options.model == DEFAULT_MODEL else None)
    model, shared = load(options, shape, output)
    bench = ModelBench(model, cases, impl=options.impl, seed=options.seed, memory_budget=budget, prefill_chunk=chunk)
    rows = bench.memory(contexts, batches, longest=options.longest, full_prefill=full)
    total = len(cases) * (len(contexts) * len(batches or [0]) + options.longest)
    shared = {**shared, "memory_budget": budget, "prefill_chunk": chunk, "prefill": PREFILL[full]}
    report_rows(options, output, rows, total, shared, memory_table)


def run_contexts(options: BenchOptions, output: Output) -> None:
    """The suite that loads contexts from files."""
    import torch

    from kvcli.bench.contexts import ContextBench, break_even
    from kvcli.seam.probe import probe

    gpu = torch.device(options.torch_device()).type == "cuda"
    cases = method_cases(options, default_methods(kinds_only=True), baseline=True)
    contexts = options.prompt_tokens or ([2048, 8192, 32768] if gpu else [256, 1024])
    if options.context_folder is not None:
        options.context_folder.mkdir(parents=True, exist_ok=True)
    model, shared = load(options, options.random_weights, output)
    check_storable(shared["model"], probe(model).spec)
    bench = ContextBench(
        model,
        cases,
        impl=options.impl,
        seed=options.seed,
        prefill_chunk=options.prefill_chunk,
        folder=options.context_folder,
    )
    shared = {**shared, "prefill_chunk": options.prefill_chunk}
    rows, total = bench.rows(contexts, options.repeats or 3), len(contexts) * len(cases)
    report_rows(
        options, output, rows, total, shared, contexts_table, lambda records: {"faster_from": break_even(records)}
    )


def load(options: BenchOptions, shape: str | None, output: Output) -> tuple[Any, dict[str, Any]]:
    """Loads the model, or makes one of a shape with random weights.

    Returns:
        The model, and the fields of all records that describe it.

    Raises:
        UsageError: a number of layers for a model whose weights are not random.
    """
    import torch

    from kvcli.seam.probe import probe

    device = torch.device(options.torch_device())
    warn_without_gpu(device, output)
    if shape is None:
        if options.layers is not None:
            raise UsageError("--layers goes with --random-weights")
        model: Any = options.load(output).model
    else:
        from kvcli.bench.model import random_model
        from kvcli.bench.shapes import shape_spec

        shape_spec(shape)  # raises for an unknown shape before anything is said
        dtype = options.dtype if options.dtype != "auto" else "bfloat16" if device.type == "cuda" else "float32"
        output.say(f"making a model of the shape {shape} with random weights")
        model = random_model(shape, options.layers, device, getattr(torch, dtype), options.seed)
    spec = probe(model).spec
    return model, {
        "model": shape or options.model,
        "weights": "random" if shape else "model",
        "codebooks": "random",
        "num_layers": spec.num_layers,
        "other_layers": spec.other_layers,
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def default_methods(few: bool = False, kinds_only: bool = False) -> list[str]:
    """What is measured unless --method is given: what the methods' records name.

    Args:
        few: one method that needs no artifact and one that needs one, the first number of bits of each, for runs that
            are slow.
        kinds_only: the same two methods with all their numbers of bits.
    """
    methods = [method for method in map(get_method, METHODS) if method.bench]
    if few or kinds_only:
        first = {method.needs_artifact: method for method in reversed(methods)}
        methods = [method for method in methods if first[method.needs_artifact] is method]
    return [name for method in methods for name in (method.bench[:1] if few else method.bench)]


def method_cases(options: BenchOptions, default: list[str], baseline: bool = False) -> list[MethodCase]:
    """The methods with their settings; with `baseline`, fp16 first.

    Raises:
        UsageError: a method that does not exist.
        ConfigError: a setting that no method has, or a value out of range.
    """
    from kvcli.bench.layer import MethodCase, check_settings

    settings = parse_settings(options.setting)
    names = list(dict.fromkeys([*([BASELINE] if baseline else []), *(options.method or default)]))
    cases = [MethodCase.parse(name, settings) for name in names]
    check_settings(cases, settings)
    return cases


def warn_without_gpu(device: torch.device, output: Output) -> None:
    """Says what is measured where there is no GPU."""
    from kvcli.kernels.launch import interpreted

    if device.type != "cuda":
        what = "Triton's interpreter and PyTorch" if interpreted() else "PyTorch"
        output.say(
            f"no GPU: what is measured is {what} on the CPU (the reference, unless --impl says otherwise), "
            "which tells nothing about the speed of the kernels"
        )


def register(app: typer.Typer) -> None:
    """Adds the command."""
    example = f"kvcli bench --shape smollm2-135m --method {DEFAULT_METHOD}-1 --contexts 256 --repeats 5"
    memory = "lower --contexts, --prompt-tokens, --batches or --prefill-chunk"
    command(app, "bench", BenchOptions, example, ("model",), saves_memory=memory)(run)
