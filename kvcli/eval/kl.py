"""Suites `kl` and `layers`: KL divergence to the uncompressed model, flips and perplexity (see `kvcli.eval.quality`).

`layers` compresses one layer alone; the others keep their keys and values in full precision. A row says what one
layer's codes cost, which is needed to give layers bits of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import Field

from kvcli.commands.options import parse_layers
from kvcli.commands.sizes import number, share
from kvcli.commands.suite import Records
from kvcli.commands.tables import DataTable
from kvcli.eval.records import STAR, UNCOMPRESSED, EvalRecord, Figure, Unit, compared_with, difference, interval
from kvcli.eval.suite import Case, ComparedOptions, CorpusOptions, EvalSuite, Measured, Prepared
from kvcli.progress import Reporter
from kvcli.registry import BASELINE, DEFAULT_METHOD, UNFITTED_METHOD
from kvcli.spec import coverage
from kvcli.storage.ranks import joined_ranks

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.eval.quality import QualityReport
    from kvcli.models.load import LoadedModel

SAVES_MEMORY = "lower --batch-size, --chunk, --seq-len or --num-sequences"


class ScoredOptions(CorpusOptions):
    """Options of suites that score tokens one by one."""

    num_sequences: int = Field(8, ge=1, description="sequences")
    batch_size: int = Field(4, ge=1, description="sequences per batch")
    chunk: int = Field(32, ge=1, description="tokens fed at once; attention within a chunk is in full precision")
    max_kld: float | None = Field(None, ge=0, description="exit code 3 if a row's mean KL is higher, nats per token")
    max_flips: float | None = Field(None, ge=0, description="exit code 3 if more top tokens of a row change, percent")


class TokenOptions(ScoredOptions):
    """Options of suites that score every token of a text."""

    seq_len: int = Field(2048, ge=2, description="tokens per sequence")


class KLOptions(TokenOptions, ComparedOptions):
    """Options of `kvcli eval kl`."""


class LayersOptions(TokenOptions):
    """Options of `kvcli eval layers`."""

    layers: str | None = Field(None, description="indices A-B only (inclusive); default: all")


class TokenBlock(Unit):
    """Consecutive tokens of a sequence, with means over them."""

    kind = "block of 256 tokens"
    figures = (
        Figure("kl_mean", "kl", "lower", "tokens"),
        Figure("flips", "flips", "lower", "tokens"),
        Figure("nll", "nll", "lower", "predicted", gated=False),
    )

    sequence: int
    start: int
    tokens: int
    predicted: int
    kl: float
    flips: float
    nll: float
    reference_nll: float


class QualityRecord(EvalRecord):
    """A row, with figures over all tokens as `kvcli.eval.quality.QualityReport` has them."""

    kl_mean: float
    kl_p99: float
    flips: float
    perplexity: float | None
    reference_perplexity: float | None
    num_tokens: int


class LayerRecord(QualityRecord):
    """A row: a method that compresses one layer alone, or all of them."""

    layer: int | None


def scored(
    options: Any, loaded: LoadedModel, sequences: Tensor, reporter: Reporter
) -> Callable[[Case, Collection[int] | None, Callable[[int], None]], QualityReport]:
    """What measures a case that compresses some layers, or all, on token ids int64 [num_sequences, seq_len].

    The uncompressed model runs once, here. The options have `chunk` and `batch_size`; ranks share the batches.
    """
    from kvcli.eval.quality import measure, reference_states

    chunk, batch, ranks = options.chunk, options.batch_size, joined_ranks()
    states: dict[int, Tensor] = {}
    with reporter.progress(UNCOMPRESSED, sequences.numel(), "tokens") as advance:

        def run(item: tuple[int, Tensor]) -> None:
            index, part = item
            states[index] = reference_states(loaded.model, part.to(loaded.model.device)).cpu()
            advance(part.numel() * ranks.count)

        ranks.each([*enumerate(sequences.split(batch))], run)

    def report(case: Case, layers: Collection[int] | None, advance: Callable[[int], None]) -> QualityReport:
        attach = partial(case.attach, loaded, reporter, layers, batch, chunk)
        pace: dict[str, Any] = {"chunk": chunk, "batch_size": batch, "warn": reporter.warn}
        return measure(
            loaded.model, attach, sequences, states, **pace, advance=lambda tokens: advance(tokens * ranks.count)
        )

    return report


def prepare(options: TokenOptions, loaded: LoadedModel, cases: Sequence[Case], reporter: Reporter) -> Prepared:
    """Rows of methods; in the suite `layers`, each compresses all layers, then each one alone."""
    layers: list[int] = []
    if by_layer := isinstance(options, LayersOptions):
        layers = parse_layers(options.layers, range(loaded.spec.num_layers), "are in the model")
        cases = [case for case in cases if not case.choice.is_baseline] or cases
    sequences = options.sequences(loaded, options.num_sequences, options.seq_len, reporter)
    report_of = scored(options, loaded, sequences, reporter)

    def row(case: Case, advance: Any, compressed: list[int] | None, label: str, fields: dict[str, Any]) -> Measured:
        report = report_of(case, compressed, advance)
        units = [TokenBlock(**block) for block in report.scores.blocks()]
        return Measured(case, units, report.memory, {**report.figures, **fields}, label)

    def rows() -> Iterator[Measured]:
        for case in cases:
            with reporter.progress(case.label, sequences.numel() * (len(layers) + 1), "tokens") as advance:
                suffix, fields = (" all layers", {"layer": None}) if by_layer else ("", {})
                yield row(case, advance, None, case.label + suffix, fields)
                for layer in layers:
                    yield row(case, advance, [layer], f"{case.label} layer {layer}", {"layer": layer})

    return Prepared({"tokens": sequences.tolist(), "chunk": options.chunk}, rows())


def text_title(records: Records, options: TokenOptions) -> str:
    """The text and the window of a run."""
    memory: dict[str, Any] = records[0].get("memory") or {}
    layers, others = memory.get("layers", 0), memory.get("other_layers", 0)
    return (
        f"{options.model}: {records[0]['num_tokens']} tokens in sequences of {options.seq_len}, chunk {options.chunk}, "
        f"residual {options.residual_length}, sinks {options.sink_length}"
        f"{f'; {coverage(layers, others)} compressed' if others else ''}"
    )


def quality_table(records: Records, options: TokenOptions) -> DataTable:
    """KL, flips, perplexity and bits of methods."""
    compared = compared_with(records, "kl_mean")
    rows = [
        {
            "method": record["label"],
            "bits K": f"{memory['key_bits']:.3f}",
            "bits V": f"{memory['value_bits']:.3f}",
            "bits mean": f"{memory['true_bits']:.3f}",
            "KL mean": number(record["kl_mean"]),
            "95 % interval": interval(record, "kl_mean", "{:.4f}"),
            **({f"KL - {compared}": difference(record, "kl_mean", "{:+.4f}")} if compared else {}),
            "KL p99": f"{record['kl_p99']:.3f}",
            "flips %": f"{100 * record['flips']:.2f}",
            "perplexity": _perplexity(record["perplexity"]),
            "cache / fp16": share(memory.get("whole_ratio", memory["ratio"])),
        }
        for record, memory in ((x, x["memory"]) for x in records)
    ]
    reference = _perplexity(records[0]["reference_perplexity"])
    title = f"{text_title(records, options)}; uncompressed perplexity {reference}{f'; {STAR}' if compared else ''}"
    return DataTable.of(title, rows, ("KL p99", "bits mean", "perplexity", "cache / fp16", "bits V", "bits K"))


def _perplexity(value: float | None) -> str:
    return "inf" if value is None else f"{value:.2f}"


def layers_table(records: Records, options: LayersOptions) -> DataTable:
    """KL of single layers, and their share of that of all."""
    totals = {(x["method"], x["artifact"]): x["kl_mean"] for x in records if x["layer"] is None}
    rows = []
    for record in records:
        total = totals[record["method"], record["artifact"]]
        of_all = record["layer"] is None or not total
        rows.append(
            {
                "compressed": record["label"],
                "KL mean": number(record["kl_mean"], "{:.5f}"),
                "95 % interval": interval(record, "kl_mean", "{:.5f}"),
                "of all layers": "-" if of_all else f"{100 * record['kl_mean'] / total:.1f} %",
                "flips %": f"{100 * record['flips']:.2f}",
                "KL p99": f"{record['kl_p99']:.3f}",
            }
        )
    title = f"{text_title(records, options)}; the other layers are in full precision"
    return DataTable.of(title, rows, ("KL p99", "flips %"))


SUITE = EvalSuite(
    name="kl",
    help="KL to the uncompressed model, flips and perplexity, teacher-forced through the real cache.",
    options=KLOptions,
    example=f"kvcli eval --method {BASELINE} --artifact runs/smollm2-135m/{DEFAULT_METHOD}-2bit --num-sequences 4",
    saves_memory=SAVES_MEMORY,
    unit=TokenBlock,
    record=QualityRecord,
    prepare=prepare,
    tabulate=quality_table,
    chart="loss_by_size",
)

LAYERS = dataclasses.replace(
    SUITE,
    name="layers",
    help="KL to the uncompressed model when one layer alone is compressed.",
    options=LayersOptions,
    example=f"kvcli eval layers --method {UNFITTED_METHOD} --num-sequences 2 --layers 0-7",
    record=LayerRecord,
    tabulate=layers_table,
    chart="loss_by_layer",
    rows_per_method=True,
)
