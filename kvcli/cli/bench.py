"""`kvcli bench`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import typer

from kvcli.cli.bench_options import CPU_METHODS, DEFAULT_MODEL, METHODS, BenchOptions, check, parse_batches
from kvcli.cli.bench_tables import attention_table, generate_table, memory_table
from kvcli.cli.options import command, parse_settings
from kvcli.cli.output import Output, parse_size
from kvcli.errors import UsageError

if TYPE_CHECKING:
    import torch

    from kvcli.bench.layer import Subject

MEMORY_SHAPE = "llama-3.1-8b"


class Row(Protocol):
    """One line of a suite's table."""

    @property
    def status(self) -> str:
        """`ok`, or why there are no figures."""

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain JSON values."""


def run(options: BenchOptions, output: Output) -> None:
    """Measure speed and memory, methods side by side; kernels are checked against the reference first."""
    check(options)
    records_path(options).open("a").close()  # better now than after the measurement
    {"attention": bench_attention, "generate": bench_generate, "memory": bench_memory}[options.suite](options, output)


def bench_attention(options: BenchOptions, output: Output) -> None:
    """The attention suite."""
    import torch

    from kvcli.bench.attention import AttentionConfig, bench_attention
    from kvcli.bench.shapes import shape_spec

    device = torch.device(options.torch_device())
    gpu = device.type == "cuda"
    dtype = options.dtype if options.dtype != "auto" else "float16" if gpu else "float32"
    batches = parse_batches(options.batches)
    if batches is None:
        raise UsageError("--batches auto goes with --suite generate or memory")
    config = AttentionConfig(
        shape=options.shape,
        subjects=[subject for subject in subjects(options, METHODS) if not subject.is_baseline],
        contexts=options.contexts or ([1024, 8192, 32768, 131072] if gpu else [256, 1024]),
        batches=batches,
        impl=options.impl,
        repeats=options.repeats or 50,
        device=device,
        dtype=getattr(torch, dtype),
        seed=options.seed,
        layer_idx=shape_spec(options.shape).num_layers - 1 if options.layer is None else options.layer,
    )
    say_device(device, output)
    shared = {"shape": options.shape, "layer": config.layer_idx, "dtype": dtype, "weights": "random"}
    total = len(config.contexts) * len(batches) * (1 + len(config.subjects))
    collect(options, output, bench_attention(config), total, shared, attention_table)


def bench_generate(options: BenchOptions, output: Output) -> None:
    """The suite that runs a model end to end."""
    import torch

    from kvcli.bench.budget import need_gpu
    from kvcli.bench.generate import GenerateConfig, bench_generate

    gpu = options.torch_device().startswith("cuda")
    chosen = subjects(options, METHODS if gpu else CPU_METHODS, baseline=True)
    batches, budget = parse_batches(options.batches), parse_size(options.memory_budget)
    if batches is None or budget is not None:
        need_gpu(torch.device(options.torch_device()))
    model, shared = load(options, options.random_weights, output)
    config = GenerateConfig(
        model=model,
        subjects=chosen,
        prompt_tokens=options.prompt_tokens or ([512] if gpu else [256]),
        new_tokens=options.new_tokens if options.new_tokens is not None else 64 if gpu else 8,
        batches=batches,
        memory_budget=budget,
        prefill_chunk=options.prefill_chunk,
        impl=options.impl,
        repeats=options.repeats or 3,
        seed=options.seed,
    )
    total = len(config.prompt_tokens) * len(batches or [0]) * len(chosen)
    shared = {**shared, "memory_budget": budget, "prefill_chunk": config.prefill_chunk}
    collect(options, output, bench_generate(config), total, shared, generate_table)


def bench_memory(options: BenchOptions, output: Output) -> None:
    """The suite that finds out what fits."""
    import torch

    from kvcli.bench.budget import need_gpu
    from kvcli.bench.memory import MemoryConfig, bench_memory

    need_gpu(torch.device(options.torch_device()))
    chosen = subjects(options, METHODS, baseline=True)
    batches, budget = parse_batches(options.batches or ["auto"]), parse_size(options.memory_budget or "24GiB")
    assert budget is not None
    shape = options.random_weights or (MEMORY_SHAPE if options.model == DEFAULT_MODEL else None)
    model, shared = load(options, shape, output)
    config = MemoryConfig(
        model=model,
        subjects=chosen,
        contexts=options.contexts or [32768],
        batches=batches,
        longest=options.longest,
        memory_budget=budget,
        prefill_chunk=options.prefill_chunk or 4096,
        full_prefill=options.full_prefill,
        impl=options.impl,
        seed=options.seed,
    )
    total = len(chosen) * (len(config.contexts) * len(batches or [0]) + config.longest)
    prefill = "computed" if config.full_prefill else "ends computed, middle filled"
    shared = {**shared, "memory_budget": budget, "prefill_chunk": config.prefill_chunk, "prefill": prefill}
    collect(options, output, bench_memory(config), total, shared, memory_table)


def load(options: BenchOptions, shape: str | None, output: Output) -> tuple[Any, dict[str, Any]]:
    """The model to run, and what all records say of it.

    Raises:
        UsageError: a number of layers for a model whose weights are not random.
    """
    import torch

    device = torch.device(options.torch_device())
    say_device(device, output)
    if shape is None:
        if options.layers is not None:
            raise UsageError("--layers goes with --random-weights")
        model: Any = options.load(output).model
    else:
        from kvcli.bench.model import random_model
        from kvcli.bench.shapes import shape_spec

        shape_spec(shape)  # better now than after what follows is said
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


def subjects(options: BenchOptions, default: list[str], baseline: bool = False) -> list[Subject]:
    """The methods with their settings; with `baseline`, fp16 first.

    Raises:
        UsageError: a method that does not exist.
        ConfigError: a setting that no method has, or a value out of range.
    """
    from kvcli.bench.layer import Subject, check_settings

    settings = parse_settings(options.settings)
    names = list(dict.fromkeys([*(["fp16"] if baseline else []), *(options.methods or default)]))
    found = [Subject.parse(name, settings) for name in names]
    check_settings(found, settings)
    return found


def say_device(device: torch.device, output: Output) -> None:
    """Says what is measured where there is no GPU."""
    from kvcli.kernels.launch import interpreted

    if device.type != "cuda":
        what = "Triton's interpreter and PyTorch" if interpreted() else "PyTorch"
        output.say(
            f"no GPU: what is measured is {what} on the CPU (the reference, unless --impl says otherwise), "
            "which tells nothing about the speed of the kernels"
        )


def records_path(options: BenchOptions) -> Path:
    """Where records go; makes the folder."""
    path = options.out or Path("runs") / "bench" / f"{options.suite}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def collect(
    options: BenchOptions,
    output: Output,
    rows: Iterable[Row],
    total: int,
    shared: dict[str, Any],
    make_table: Callable[[list[dict[str, Any]]], Any],
) -> None:
    """Writes a record a row as it comes and shows the table, also of what there was when it was interrupted.

    The command ends with code 1 after a mismatch or a failure, and if every method was refused.

    Args:
        options: of the command.
        output: where the table goes.
        rows: measured as they are asked for.
        total: how many there will be.
        shared: what all records say beside the row's own figures.
        make_table: the table of the records.
    """
    from kvcli.bench.rows import ERRORS
    from kvcli.files import append_record
    from kvcli.kernels.launch import interpreted
    from kvcli.machine import environment_info

    path, interrupted = records_path(options), False
    shared = {**shared, "device": options.torch_device(), "interpreted": interpreted(), "seed": options.seed}
    machine, records = environment_info(), []
    with output.progress(options.suite, total, "rows") as advance:
        try:
            for row in rows:
                records.append({"suite": options.suite, **row.to_dict(), **shared})
                append_record(path, {**records[-1], "options": options.model_dump(mode="json"), "machine": machine})
                advance(1)
        except KeyboardInterrupt:
            interrupted = True
    if interrupted:
        output.say(f"error: interrupted after {len(records)} of {total} rows")
        if not records:
            raise typer.Exit(130)
    output.result({"suite": options.suite, "rows": records, "machine": machine}, make_table(records))
    output.say(f"records: {path}")
    for record in records:
        if record["status"] in (*ERRORS, "refused"):
            tokens = record.get("context", record.get("prompt_tokens"))
            where = f"{record['method']}, {tokens} tokens, batch {record['batch']}"
            output.say(f"{'error' if record['status'] in ERRORS else 'refused'}: {where}: {record['note']}")
    if interrupted:
        raise typer.Exit(130)
    asked = [record["status"] for record in records if record["method"] != "fp16"]
    if any(record["status"] in ERRORS for record in records) or (asked and set(asked) == {"refused"}):
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    """Adds the command."""
    example = "kvcli bench --suite attention --methods kivi-2 --contexts 256 --repeats 5"
    command(app, "bench", BenchOptions, example, ("model",))(run)
