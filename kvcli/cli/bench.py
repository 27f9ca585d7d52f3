"""`kvcli bench`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import typer
from pydantic import Field

from kvcli.cli.bench_tables import attention_table
from kvcli.cli.options import ModelOptions, command, parse_settings
from kvcli.cli.output import Output
from kvcli.errors import UsageError

if TYPE_CHECKING:
    import torch

    from kvcli.bench.layer import Subject

METHODS = ["kivi-2", "kivi-4", "squat-2", "squat-pre-2", "qjl", "commvq-1", "commvq-2"]


class BenchOptions(ModelOptions):
    """Options of `kvcli bench`."""

    suite: Literal["attention"] = Field(
        default="attention", description="attention: one layer, one query token, against fp16 SDPA"
    )
    methods: list[str] = Field(default=[], description=f"methods; repeatable; default: {', '.join(METHODS)}")
    settings: list[str] = Field(default=[], description="setting of every method that has it, NAME=VALUE; repeatable")
    contexts: list[int] = Field(
        default=[], description="context lengths; repeatable; default: 1024 to 131072 on a GPU, 256 and 1024 on a CPU"
    )
    batches: list[int] = Field(default=[1], description="sequences; repeatable")
    impl: str = Field(default="auto", description="form of attention over codes: auto, fused, reference, reordered")
    shape: str = Field(default="llama-3.1-8b", description="shape of the attention suite's layer")
    layer: int | None = Field(
        default=None, ge=0, description="its index in the model, for methods whose layers differ; default: the last"
    )
    repeats: int = Field(default=50, ge=1, description="calls timed")
    out: Path | None = Field(default=None, description="append records here; default: runs/bench/SUITE.jsonl")


class Row(Protocol):
    """One line of a suite's table."""

    @property
    def status(self) -> str:
        """`ok`, or why there are no figures."""

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain JSON values."""


def run(options: BenchOptions, output: Output) -> None:
    """Measure speed and memory, methods side by side; every form is checked against the reference first."""
    for name in ("contexts", "batches"):
        if any(value < 1 for value in getattr(options, name)):
            raise UsageError(f"--{name} takes positive numbers")
    bench_attention(options, output)


def bench_attention(options: BenchOptions, output: Output) -> None:
    """The attention suite."""
    import torch

    from kvcli.bench.attention import AttentionConfig, bench_attention
    from kvcli.bench.shapes import shape_spec

    device = torch.device(options.torch_device())
    dtype = options.dtype if options.dtype != "auto" else "float16" if device.type == "cuda" else "float32"
    contexts = options.contexts or ([1024, 8192, 32768, 131072] if device.type == "cuda" else [256, 1024])
    layer = shape_spec(options.shape).num_layers - 1 if options.layer is None else options.layer
    config = AttentionConfig(
        shape=options.shape,
        subjects=subjects(options),
        contexts=contexts,
        batches=options.batches,
        impl=options.impl,
        repeats=options.repeats,
        device=device,
        dtype=getattr(torch, dtype),
        seed=options.seed,
        layer_idx=layer,
    )
    say_device(device, output)
    shared = {"shape": options.shape, "layer": layer, "dtype": dtype, "weights": "random"}
    total = len(contexts) * len(options.batches) * (1 + len(config.subjects))
    collect(options, output, bench_attention(config), total, shared, attention_table)


def subjects(options: BenchOptions) -> list[Subject]:
    """The methods with their settings.

    Raises:
        UsageError: a method that does not exist.
        ConfigError: a setting that no method has, or a value out of range.
    """
    from kvcli.bench.layer import Subject, check_settings

    settings = parse_settings(options.settings)
    found = [Subject.parse(name, settings) for name in options.methods or METHODS]
    check_settings(found, settings)
    return found


def say_device(device: torch.device, output: Output) -> None:
    """Says what is measured where there is no GPU."""
    if device.type != "cuda":
        output.say(
            "no GPU: measuring the PyTorch reference on the CPU, which says nothing about the speed of the kernels"
        )


def collect(
    options: BenchOptions,
    output: Output,
    rows: Iterable[Row],
    total: int,
    shared: dict[str, Any],
    make_table: Callable[[list[dict[str, Any]]], Any],
) -> None:
    """Writes a record a row as it comes, shows the table, and ends with code 1 after a mismatch.

    Args:
        options: of the command.
        output: where the table goes.
        rows: measured as they are asked for.
        total: how many there will be.
        shared: what all records say beside the row's own figures.
        make_table: the table of the records.
    """
    from kvcli.files import append_record
    from kvcli.machine import facts

    path = options.out or Path("runs") / "bench" / f"{options.suite}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.open("a").close()  # better now than after the measurement
    shared = {**shared, "device": options.torch_device(), "seed": options.seed}
    machine, records = facts(), []
    with output.progress(options.suite, total, "rows") as advance:
        for row in rows:
            records.append({"suite": options.suite, **row.to_dict(), **shared})
            append_record(path, {**records[-1], "options": options.model_dump(mode="json"), "machine": machine})
            advance(1)
    output.result({"suite": options.suite, "rows": records, "machine": machine}, make_table(records))
    output.say(f"records: {path}")
    wrong = [record for record in records if record["status"] == "mismatch"]
    for record in wrong:
        output.say(
            f"error: {record['method']} at {record['context']} tokens, batch {record['batch']}: {record['note']}"
        )
    if wrong:
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    """Adds the command."""
    example = "kvcli bench --suite attention --methods kivi-2 --contexts 256 --repeats 5"
    command(app, "bench", BenchOptions, example, ("model",))(run)
