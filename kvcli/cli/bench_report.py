"""What `kvcli bench` says of its rows: records as they are measured, the table, the exit code."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvcli.cli.bench_options import BenchOptions
from kvcli.cli.next_command import last_method, model_argument, try_method
from kvcli.cli.output import Output
from kvcli.cli.signals import stop_reason
from kvcli.errors import Terminated
from kvcli.registry import BASELINE

if TYPE_CHECKING:
    from kvcli.bench.rows import Row


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
    summarize: Callable[[list[dict[str, Any]]], dict[str, Any]] = lambda records: {},
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
        summarize: fields of the JSON object that are of all records together.
    """
    from kvcli.bench.rows import ERRORS
    from kvcli.kernels.launch import interpreted
    from kvcli.machine import environment_info
    from kvcli.storage.records import append_record

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
    values = {"suite": options.suite, "rows": records, **summarize(records), "machine": machine}
    # the other suites, and random weights, are of shapes
    models = options.suite in ("generate", "contexts") and options.random_weights is None
    model = model_argument(options.model) if models else ()
    output.result(values, make_table(records), try_method(last_method(records), "eval", model))
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
