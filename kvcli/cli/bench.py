"""`kvcli bench`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import typer

from kvcli.cli.bench_options import DEFAULT_MODEL, BenchOptions, check, parse_batches
from kvcli.cli.bench_tables import attention_table, generate_table, memory_table
from kvcli.cli.command import command
from kvcli.cli.output import Output, parse_size
from kvcli.cli.start import stop_reason
from kvcli.cli.values import parse_settings
from kvcli.errors import Terminated, UsageError
from kvcli.registry import BASELINE, DEFAULT_METHOD, METHODS, get_method

if TYPE_CHECKING:
    import torch

    from kvcli.bench.layer import MethodCase

MEMORY_SHAPE = "llama-3.1-8b"
MEMORY_BUDGET = "24GiB"
FILLED_CHUNK = 4096
PREFILL = {True: "computed", False: "ends computed, middle filled"}
"""How prompts were read, by whether all of a prompt was computed."""


class Row(Protocol):
    """One line of a suite's table."""

    @property
    def status(self) -> str:
        """`ok`, or why there are no figures."""

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain JSON values."""


def run(options: BenchOptions, output: Output) -> None:
    """Measure speed and memory of several methods; kernels are checked against the reference first."""
    check(options)
    records_path(options).open("a").close()  # fails before the measurement, not after it
    {"attention": run_attention, "generate": run_generate, "memory": run_memory}[options.suite](options, output)


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


def load(options: BenchOptions, shape: str | None, output: Output) -> tuple[Any, dict[str, Any]]:
    """Loads the model, or makes one of a shape with random weights.

    Returns:
        The model, and the fields of all records that describe it.

    Raises:
        UsageError: a number of layers for a model whose weights are not random.
    """
    import torch

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
    return model, {
        "model": shape or options.model,
        "weights": "random" if shape else "model",
        "codebooks": "random",
        "num_layers": model.config.num_hidden_layers,
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def default_methods(few: bool = False) -> list[str]:
    """What is measured unless --method is given: what the methods' records name.

    Args:
        few: one method that needs no artifact and one that needs one, for runs that are slow.
    """
    methods = [method for method in map(get_method, METHODS) if method.bench]
    if few:
        first = {method.needs_artifact: method for method in reversed(methods)}
        return [method.bench[0] for method in methods if first[method.needs_artifact] is method]
    return [name for method in methods for name in method.bench]


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


def records_path(options: BenchOptions) -> Path:
    """Where records are appended; makes the folder."""
    path = options.out or Path("runs") / "bench" / f"{options.suite}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def report_rows(
    options: BenchOptions,
    output: Output,
    rows: Iterable[Row],
    total: int,
    shared: dict[str, Any],
    make_table: Callable[[list[dict[str, Any]]], Any],
) -> None:
    """Appends a record per row as it is measured, then shows the table; after an interruption, of the rows so far.

    The command ends with code 1 after a mismatch or a failure, and if every method was refused.

    Args:
        options: of the command.
        output: where the table goes.
        rows: measured while they are iterated over.
        total: number of rows.
        shared: fields of all records besides the row's own.
        make_table: makes the table of the records.
    """
    from kvcli.bench.rows import ERRORS
    from kvcli.files import append_record
    from kvcli.kernels.launch import interpreted
    from kvcli.machine import environment_info

    path = records_path(options)
    stopped: KeyboardInterrupt | None = None
    shared = {**shared, "device": options.torch_device(), "interpreted": interpreted(), "seed": options.seed}
    machine, records = environment_info(), []
    with output.progress(options.suite, total, "rows") as advance:
        try:
            for row in rows:
                records.append({"suite": options.suite, **row.to_dict(), **shared})
                append_record(path, {**records[-1], "options": options.model_dump(mode="json"), "machine": machine})
                advance(1)
        except KeyboardInterrupt as error:
            stopped = stop_reason() or error
    code = getattr(stopped, "exit_code", 130)
    if stopped:
        what = "terminated" if isinstance(stopped, Terminated) else "interrupted"
        output.error(f"{what} after {len(records)} of {total} rows")
        if not records:
            raise typer.Exit(code)
    output.result({"suite": options.suite, "rows": records, "machine": machine}, make_table(records))
    output.say(f"records: {path}")
    for record in records:
        if record["status"] in (*ERRORS, "refused"):
            where = f"{record['method']}, {record['context']} tokens, batch {record['batch']}"
            output.warn(f"{'error' if record['status'] in ERRORS else 'refused'}: {where}: {record['note']}")
    if stopped:
        raise typer.Exit(code)
    statuses = [record["status"] for record in records if record["method"] != BASELINE]
    if any(record["status"] in ERRORS for record in records) or (statuses and set(statuses) == {"refused"}):
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    """Adds the command."""
    example = f"kvcli bench --shape smollm2-135m --method {DEFAULT_METHOD}-1 --contexts 256 --repeats 5"
    memory = "lower --contexts, --prompt-tokens, --batches or --prefill-chunk"
    command(app, "bench", BenchOptions, example, ("model",), saves_memory=memory)(run)
