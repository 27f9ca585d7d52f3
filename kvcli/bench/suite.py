"""What all suites of `kvcli bench` share: methods with their settings, models of random weights, rows, failures.

A failing method is recorded in its row, and the run goes on.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from kvcli.artifact.choice import MethodChoice, choose
from kvcli.commands.options import IMPL_HELP, Impl, parse_settings
from kvcli.commands.suite import Records, Run, Suite, SuiteOptions, Summary
from kvcli.commands.tables import DataTable
from kvcli.errors import KvcliError, UsageError, error_text
from kvcli.models.builtin_models import DEFAULT_MODEL
from kvcli.models.hub import check_model_name
from kvcli.models.shapes import check_shape
from kvcli.progress import Reporter
from kvcli.registry import BASELINE, DEFAULT_METHOD, METHODS, get_method

if TYPE_CHECKING:
    from kvcli.bench.layer import Agreement
    from kvcli.models.load import LoadedModel

MAX_LENGTH = 2**31 - 1
_OF_ALL = ("method", "context", "batch", "impl", "status", "note", "out_error")
"""Fields of the records of all suites."""

ERRORS = ("mismatch", "failed")
"""Statuses of rows that are errors; `out of memory` and `refused` are results."""


Record = Mapping[str, Any]
"""A record as plain JSON values."""

Column = str | Callable[[Record], str]
"""A template of fields with their formats, whose cell is `-` where one is None; or a function of a row with figures."""


def row_name(record: Record) -> str:
    """The method of a row, and the tokens of a page where its codes are in pages."""
    pages = f", pages of {record['page_size']}" if record.get("page_size") else ""
    return f"{record['method']}{pages}"


Lengths = list[Annotated[int, Field(ge=1, le=MAX_LENGTH)]]
Status = Literal["ok", "mismatch", "out of memory", "refused", "failed"]


class BenchOptions(SuiteOptions):
    """Options of every suite; lists and lengths without a value follow from the device."""

    method: list[str] = Field(
        [],
        description=f"method, such as {DEFAULT_METHOD}-2; repeatable; default: every compared method and number of "
        "bits (generate on a CPU, contexts: one method without an artifact and one with)",
    )
    setting: list[str] = Field([], description="setting of every method that has it, NAME=VALUE; repeatable")
    impl: Impl = Field("auto", description=IMPL_HELP)
    out: Path | None = Field(None, description="append records here; default: runs/bench/SUITE.jsonl")

    def choices(self, *, few: bool = False, kinds_only: bool = False) -> list[MethodChoice]:
        """fp16 and the methods, by default those of `default_methods`; errors as those of `choose`."""
        names = [BASELINE, *(self.method or default_methods(few, kinds_only))]
        found = choose(map(MethodChoice, names), parse_settings(self.setting))
        return list({choice.label: choice for choice in found}.values())


class WholeModelOptions(BenchOptions):
    """And of suites that run whole models."""

    random_weights: str | None = Field(None, description="random weights of a shape instead of a model")
    layers: int | None = Field(None, ge=1, description="layers of the random model; default: all")
    prefill_chunk: int | None = Field(
        None,
        ge=1,
        description="tokens of the whole batch per forward pass; default: the whole prompt (memory, --fill-prompt: "
        "4096)",
    )

    def check(self) -> None:
        if self.model != DEFAULT_MODEL and self.random_weights is not None:
            raise UsageError(f"'{self.model}' or --random-weights, not both")
        if self.random_weights is None and self.layers is not None:
            raise UsageError("--layers goes with --random-weights")
        if self.random_weights is None:
            check_model_name(self.model)
        else:
            check_shape(self.random_weights)

    def load_model(self, shape: str | None, reporter: Reporter) -> tuple[LoadedModel, dict[str, Any]]:
        """The model, or one of a shape with random weights and no tokenizer, and fields of all records that say so."""
        import torch

        from kvcli.bench.model import random_model
        from kvcli.models.load import LoadedModel
        from kvcli.seam.probe import probe

        device = torch.device(self.torch_device())
        if shape is None:
            loaded = self.load(reporter)
        else:
            dtype = self.dtype if self.dtype != "auto" else "bfloat16" if device.type == "cuda" else "float32"
            reporter.say(f"making a model of the shape {shape} with random weights")
            model = random_model(shape, self.layers, device, getattr(torch, dtype), self.seed)
            loaded = LoadedModel(shape, model, None, probe(model).spec, fingerprint="")
        spec = loaded.spec
        return loaded, {
            "model": shape or self.model,
            "weights": "random" if shape else "model",
            "codebooks": "random",
            "num_layers": spec.num_layers,
            "other_layers": spec.other_layers,
            "dtype": str(loaded.model.dtype).removeprefix("torch."),
        }


@dataclass(frozen=True)
class Row:
    """A row of `batch` sequences of `context` tokens, with errors as in `kvcli.bench.layer.Agreement`."""

    method: str
    context: int
    batch: int
    impl: str  # attention that ran: sdpa, fused, reference or another library's
    status: Status = "ok"
    note: str | None = None  # what went wrong, or why it was not faster
    out_error: float | None = None  # None where the reference itself ran
    lse_error: float | None = None  # as the next one, in records of suites that name them
    encoding_gap: float | None = None
    # some of those that the suite names, by name; what is measured only if the status is `ok`
    figures: Mapping[str, Any] = field(default_factory=dict)

    def plus(self, **figures: Any) -> Row:
        """The row with more figures."""
        return replace(self, figures={**self.figures, **figures})

    def checked(self, agreement: Agreement | None) -> Row:
        """The row with the errors of its kernels; None: no kernel runs. NoFigures: they differ from the reference."""
        if agreement is None:
            return self
        row = replace(self, **{name: error for name, error in vars(agreement).items() if name != "tolerance"})
        if not agreement.holds:
            raise NoFigures(replace(row, status="mismatch", note=agreement.describe()))
        return row


class NoFigures(Exception):
    """Ends a measurement with a row whose status says why it has no figures."""

    def __init__(self, row: Row) -> None:
        super().__init__(row.note)
        self.row = row


def run_row(measure: Callable[[Row], Row], empty: Row) -> Row:
    """A measured row: what `measure` makes of the row without figures, or after an error that with status and note.

    Nothing of it stays in the memory of the GPU.
    """
    from kvcli.plan.budget import is_out_of_memory, release_gpu_memory

    try:
        row = measure(empty)
    except NoFigures as end:
        row = end.row
    except UsageError as error:
        row = replace(empty, status="refused", note=str(error))
    except Exception as error:  # a kernel may fail in any way
        frame = traceback.extract_tb(error.__traceback__)[-1]
        note = f"{type(error).__name__}: {error_text(error)} ({Path(frame.filename).name}:{frame.lineno})"
        row = replace(empty, status="failed", note=note)
        if is_out_of_memory(error):
            row = replace(empty, status="out of memory")
    release_gpu_memory()  # outside the handler: there the error still holds the failed run's tensors
    return row


@dataclass(frozen=True)
class BenchRows:
    """Rows, measured while they are iterated over, how many they are, and fields of all records besides theirs."""

    rows: Iterator[Row]
    total: int
    shared: dict[str, Any] = field(default_factory=dict)


class BenchRun(Run):
    """A run of a suite of `kvcli bench`."""

    def __init__(self, suite: BenchSuite, options: BenchOptions) -> None:
        super().__init__(suite, options)
        self.out = options.out or Path("runs") / "bench" / f"{suite.name}.jsonl"
        if options.method:  # the default ones are known when torch is
            choose(map(MethodChoice, options.method), parse_settings(options.setting))

    def records(self, reporter: Reporter) -> Iterator[dict[str, Any]]:
        """Measures rows, one after another."""
        from kvcli.commands.machine import environment_info
        from kvcli.kernels.launch import interpreted

        options, prepared, self.machine = self.options, self.suite.prepare(self.options, reporter), environment_info()
        device = options.torch_device()
        shared = {"device": device, "interpreted": interpreted(), "seed": options.seed}
        if not device.startswith("cuda"):
            what = "Triton's interpreter and PyTorch" if interpreted() else "PyTorch"
            reporter.say(
                f"no GPU: what is measured is {what} on the CPU (the reference, unless --impl says otherwise), "
                "which tells nothing about the speed of the kernels"
            )
        with reporter.progress(self.suite.name, prepared.total, "rows") as advance:
            for row in prepared.rows:
                record = {"suite": self.suite.name, **self.suite.record(row), **prepared.shared, **shared}
                yield {**record, "options": options.model_dump(mode="json"), "machine": self.machine}
                advance(1)

    def summary(self, records: Records) -> Summary:
        """Rows that are errors or refused; a failure after an error, and if every method was refused."""
        rows = [{x: record[x] for x in record if x not in ("options", "machine")} for record in records]
        fields = {"rows": rows, **self.suite.summarize(records), "machine": self.machine}
        notes = [f"records: {self.out}"]
        for record in records:
            if record["status"] in (*ERRORS, "refused"):
                what = "error" if record["status"] in ERRORS else "refused"
                where = f"{record['method']}, {record['context']} tokens, batch {record['batch']}"
                notes.append(f"{what}: {where}: {record['note']}")
        statuses = {record["status"] for record in records if record["method"] != BASELINE}
        failure = None
        if any(record["status"] in ERRORS for record in records):
            failure = KvcliError("kernels or methods failed: see above")
        elif statuses == {"refused"}:
            failure = KvcliError("every method was refused: see above")
        return Summary(fields, notes, failure)


@dataclass(frozen=True, kw_only=True)
class BenchSuite(Suite):
    """A suite of `kvcli bench`."""

    run = BenchRun

    prepare: Callable[[Any, Reporter], BenchRows]
    figures: Mapping[str, str] = field(default_factory=dict)  # of a record, and what they mean; None in rows without
    chart: str = "times"
    # gives fields of the JSON object that are of all records together
    summarize: Callable[[Records], dict[str, Any]] = lambda records: {}

    def record(self, row: Row) -> dict[str, Any]:
        """A row as plain JSON values; KeyError: a figure that the suite does not name."""
        if unknown := row.figures.keys() - self.figures.keys():
            raise KeyError(f"suite {self.name} has no figures {', '.join(unknown)}")
        prompt = {"prompt_tokens": row.context} if issubclass(self.options, WholeModelOptions) else {}
        known = {**vars(row), **row.figures}
        return {name: known.get(name) for name in (*_OF_ALL, *self.figures)} | prompt


def default_methods(few: bool = False, kinds_only: bool = False) -> list[str]:
    """What is measured without --method: what the methods' records name.

    With `kinds_only`, one method that needs no artifact and one that needs one; with `few`, for slow runs, only the
    first number of bits of each.
    """
    methods = [method for method in map(get_method, METHODS) if method.bench]
    if few or kinds_only:
        first = {method.needs_artifact: method for method in reversed(methods)}
        methods = [method for method in methods if first[method.needs_artifact] is method]
    return [name for method in methods for name in (method.bench[:1] if few else method.bench)]


def parse_batches(texts: list[str]) -> list[int] | None:
    """Numbers of sequences, None for `auto`; UsageError for what is neither numbers nor `auto` alone."""
    if texts == ["auto"]:
        return None
    if not all(text.isdecimal() and 1 <= int(text) <= MAX_LENGTH for text in texts):
        raise UsageError(f"--batches takes numbers from 1 to {MAX_LENGTH} or 'auto' alone, not {' '.join(texts)}")
    return [int(text) for text in texts] or [1]


def median_of(record: Record, name: str) -> float | None:
    """A figure, of percentiles the median; None where there is none."""
    value = record.get(name)
    value = value[1] if isinstance(value, (list, tuple)) else value
    return None if value is None else float(value)


def bench_table(title: str, records: Records, columns: Mapping[str, Column], optional: Sequence[str] = ()) -> DataTable:
    """A row per record: its method, `columns`, the error of its kernels, and what ran or why there are no figures."""

    def cell(record: Record, column: Column) -> str:
        if callable(column):
            return column(record) if record["status"] == "ok" else "-"
        try:
            return column.format_map(record)
        except TypeError:  # None has no format
            return "-"

    rows = []
    if any(record["out_error"] is not None for record in records):
        columns = {**columns, "error": "{out_error:.1e}"}
    for record in records:
        status = record["status"]
        why = "" if status == "ok" else f": {status.upper() if status in ERRORS else status}"
        cells = {heading: cell(record, column) for heading, column in columns.items()}
        rows.append({"method": row_name(record), **cells, "impl": f"{record['impl']}{why}"})
    return DataTable.of(title, rows, optional)
