"""`python -m research reproduce`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from kvcli.cli.command import Command
from kvcli.cli.output import Output
from kvcli.commands.options import ModelOptions
from kvcli.commands.paths import newest_samples
from kvcli.commands.tables import DataTable
from kvcli.errors import UsageError, suggestion

if TYPE_CHECKING:
    from research.paper_tables import PaperTable, Row

PAPER_TABLES = {
    **dict.fromkeys(("commvq-9", "commvq-10", "commvq-11", "commvq-figure-4"), "research.commvq_tables"),
    "kivi-1": "research.scalar_tables",
    "squat-3": "research.squat_tables",
}
"""Tables of the papers to the modules that have them in `TABLES`."""


def get_paper_table(name: str) -> PaperTable:
    """Loads one table.

    Raises:
        UsageError: no such table; the message lists those that exist.
    """
    if name not in PAPER_TABLES:
        hint = suggestion(name, PAPER_TABLES)
        raise UsageError(f"unknown table '{name}'; the tables are {', '.join(PAPER_TABLES)}{hint}")
    table: PaperTable = import_module(PAPER_TABLES[name]).TABLES[name]
    return table


class ReproduceOptions(ModelOptions):
    """Options of `python -m research reproduce`."""

    table: str | None = Field(default=None, description=f"table or figure of a paper: {', '.join(PAPER_TABLES)}")
    samples: Path | None = Field(
        default=None, description="coding errors: folder of recorded samples; default: the newest below runs/"
    )
    layer: int = Field(default=0, ge=0, description="coding errors: layer that is fitted; the papers' is the first")
    corpus: str = Field(default="builtin:docs", description="quality: built-in text, folder or file to measure on")
    num_sequences: int = Field(default=2, ge=1, description="quality: sequences")
    seq_len: int = Field(default=1024, ge=2, description="quality: tokens per sequence")
    batch_size: int = Field(default=2, ge=1, description="quality: sequences per forward pass")
    chunk: int = Field(default=32, ge=1, description="quality: tokens fed at once")


def run(options: ReproduceOptions, output: Output) -> None:
    """Make a table of one of the papers again, on your model and text, beside the paper's own figures."""
    import torch

    if options.table is None:
        raise UsageError(f"name a table: {', '.join(PAPER_TABLES)}")
    table = get_paper_table(options.table)
    output.settings(options.model_dump(mode="json"))
    with torch.inference_mode():
        made = _errors(table, options) if table.errors is not None else _quality(table, options, output)
        rows: list[dict[str, Any]] = []
        try:
            rows.extend(_with_progress(made, output))
        finally:  # what was measured is shown, also when a later row fails
            if rows:
                cells = [[_shown(cell) for cell in row.values()] for row in rows]
                shown = DataTable(f"{table.title}; paper: {table.paper}", tuple(rows[0]), cells)
                output.result({"table": options.table, "paper": table.paper, "rows": rows}, shown)


def _with_progress(rows: Iterator[dict[str, Any]], output: Output) -> Iterator[dict[str, Any]]:
    for count, row in enumerate(rows, 1):
        output.say(f"row {count} is measured")
        yield row


def _errors(table: PaperTable, options: ReproduceOptions) -> Iterator[Row]:
    from kvcli.artifact.fit import split_samples
    from kvcli.calibrate.recording import Recording
    from research.paper_tables import LayerInputs

    recording = Recording(options.samples or newest_samples())
    if options.layer not in recording.layers:
        raise UsageError(f"--layer {options.layer}: layers {recording.layers[0]}-{recording.layers[-1]} were recorded")
    train, heldout = split_samples(recording, options.layer, 0, options.torch_device())
    assert table.errors is not None
    return table.errors(LayerInputs(recording.spec, train, heldout, options.seed))


def _quality(table: PaperTable, options: ReproduceOptions, output: Output) -> Iterator[Row]:
    from kvcli.calibrate.corpus import token_sequences
    from kvcli.eval.quality import reference_states
    from research.domain_fit import split_documents
    from research.measured_tables import TextInputs, measured_rows

    loaded = options.load(output)
    documents = split_documents(options.corpus, "heldout", options.seed)
    sequences = token_sequences(documents, loaded.tokenizer, options.num_sequences, options.seq_len)
    states = [
        reference_states(loaded.model, batch.to(loaded.model.device)).cpu()
        for batch in sequences.split(options.batch_size)
    ]
    assert table.measurements is not None
    inputs = TextInputs(loaded, sequences, states, options.batch_size, options.chunk)
    return measured_rows(inputs, table.measurements(loaded.spec))


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


EXAMPLE = f"python -m research reproduce {next(iter(PAPER_TABLES))}"
MEMORY = "lower --batch-size, --seq-len or --num-sequences"
COMMAND = Command("reproduce", ReproduceOptions, run, EXAMPLE, ("table",), saves_memory=MEMORY)
