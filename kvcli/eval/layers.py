"""Suite `layers`: KL to the uncompressed model when one layer alone is compressed.

All other layers keep their keys and values in full precision, so a row says what one layer's codes cost. That is what
is needed to give layers bits of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from kvcli.eval.kl import SAVES_MEMORY, QualityRecord, Scorer, TokenOptions, text_title
from kvcli.eval.suite import EvalSuite, Measured, Prepared, interval
from kvcli.options import parse_layers
from kvcli.progress import Reporter
from kvcli.registry import BASELINE, UNFITTED_METHOD
from kvcli.suite import Records
from kvcli.tables import DataTable

if TYPE_CHECKING:
    from kvcli.eval.case import Case
    from kvcli.models import LoadedModel


class LayersOptions(TokenOptions):
    """Options of `kvcli eval layers`."""

    layers: str | None = Field(default=None, description="indices A-B only (inclusive); default: all")


class LayerRecord(QualityRecord):
    """A row: a method that compresses one layer alone, or all of them."""

    suite: Literal["layers"] = "layers"
    layer: int | None


def prepare(options: LayersOptions, loaded: LoadedModel, cases: Sequence[Case], reporter: Reporter) -> Prepared:
    """Rows of methods that compress all layers, then each one."""
    layers = parse_layers(options.layers, range(loaded.spec.num_layers), "are in the model")
    scorer = Scorer(options, loaded, reporter)
    compressing = [case for case in cases if case.method != BASELINE] or list(cases)

    def rows() -> Iterator[Measured]:
        for case in compressing:
            with reporter.progress(case.label, scorer.sequences.numel() * (len(layers) + 1), "tokens") as advance:
                yield scorer.measure(case, f"{case.label} all layers", advance, layer=None)
                for layer in layers:
                    yield scorer.measure(case, f"{case.label} layer {layer}", advance, [layer], layer=layer)

    return Prepared(scorer.protocol, rows())


def table(records: Records, options: LayersOptions) -> DataTable:
    """KL of single layers, and their share of that of all."""
    totals = {(x["method"], x["artifact"]): x["kl_mean"] for x in records if x["layer"] is None}
    rows = []
    for record in records:
        total = totals[record["method"], record["artifact"]]
        of_all = record["layer"] is None or not total
        rows.append(
            {
                "compressed": record["label"],
                "KL mean": f"{record['kl_mean']:.5f}",
                "95 % interval": interval(record, "kl_mean", "{:.5f}"),
                "of all layers": "-" if of_all else f"{100 * record['kl_mean'] / total:.1f} %",
                "flips %": f"{100 * record['flips']:.2f}",
                "KL p99": f"{record['kl_p99']:.3f}",
            }
        )
    title = f"{text_title(records, options)}; the other layers are in full precision"
    return DataTable.of(title, rows, ("KL p99", "flips %"))


SUITE = EvalSuite(
    name="layers",
    help="KL to the uncompressed model when one layer alone is compressed.",
    options=LayersOptions,
    example=f"kvcli eval layers --method {UNFITTED_METHOD} --num-sequences 2 --layers 0-7",
    saves_memory=SAVES_MEMORY,
    record=LayerRecord,
    prepare=prepare,
    tabulate=table,
    rows_per_method=True,
)
