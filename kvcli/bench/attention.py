"""Suite `attention`: one query token over the codes of one layer, against fp16 in the same run.

Kernels that differ from the reference on the same codes are not timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

from pydantic import Field

from kvcli.bench.suite import (
    BenchOptions,
    BenchRows,
    BenchSuite,
    Column,
    Lengths,
    Row,
    bench_table,
    parse_batches,
    run_row,
)
from kvcli.commands.suite import Bars, Records, SideBySide
from kvcli.commands.tables import DataTable
from kvcli.errors import UsageError
from kvcli.models.builtin_models import DEFAULT_MODEL
from kvcli.models.shapes import check_shape
from kvcli.progress import Reporter
from kvcli.registry import BASELINE, DEFAULT_METHOD
from kvcli.spec import bits_per_value

if TYPE_CHECKING:
    from kvcli.artifact.choice import MethodChoice
    from kvcli.bench.timing import Timing


class AttentionOptions(BenchOptions):
    """Options of `kvcli bench attention`."""

    shape: str = Field("llama-3.1-8b", description="shape of the layer")
    layer: int | None = Field(None, ge=0, description="its index, for methods whose layers differ; default: the last")
    contexts: Lengths = Field(
        [], description="context lengths; repeatable; default: 1024 to 131072 (CPU: 256 and 1024)"
    )
    batches: list[str] = Field([], description="sequences; repeatable; default: 1")
    page_size: Lengths = Field([], description="tokens of a page, for codes in pages beside those in rows; repeatable")
    repeats: int = Field(50, ge=1, description="calls timed")

    def check(self) -> None:
        if self.model != DEFAULT_MODEL:
            raise UsageError(f"suite attention runs no model; give --shape instead of '{self.model}'")
        if parse_batches(self.batches) is None:
            raise UsageError("--batches auto goes with suite generate or memory")
        check_shape(self.shape)


FIGURES = {
    "lse_error": "as in `kvcli.bench.layer.Agreement`",
    "page_size": "tokens of a page of codes; None for codes in rows",
    "encoded": "tokens per sequence that are codes, complete groups; all for `fp16`, which is SDPA",
    "sdpa_us": "median of SDPA on the same shape",
    "speedup": "that over this one's",
    "stored_bytes": "of keys and values of this layer",
    "true_bits": "those per value",
    "stored_gb_s": "stored bytes over the median",
    **dict.fromkeys(("p20_us", "p50_us", "p80_us", "eager_us", "how", "repeats"), "as in `kvcli.bench.timing.Timing`"),
}


def timed(row: Row, timing: Timing, stored_bytes: int, tokens: int, kv_dim: int) -> Row:
    """The row with its times and the figures that follow from them; without `sdpa_us`, it is SDPA's own."""
    times, sdpa_us = vars(timing), row.figures.get("sdpa_us", timing.p50_us)
    return replace(row, note=timing.note).plus(
        encoded=tokens,
        sdpa_us=sdpa_us,
        speedup=None if sdpa_us is None else sdpa_us / timing.p50_us,
        stored_bytes=stored_bytes,
        true_bits=bits_per_value(stored_bytes, row.batch * tokens * 2 * kv_dim),
        stored_gb_s=stored_bytes / timing.p50_us / 1e3,
        **{name: times[name] for name in FIGURES.keys() & times.keys()},
    )


def prepare(options: AttentionOptions, reporter: Reporter) -> BenchRows:
    """Rows of SDPA and of methods."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from kvcli.attention.backend import choose_backend
    from kvcli.attention.reference import attend_codes as reference_attend
    from kvcli.bench.layer import compare_attention, encoded_layer, shape_rope, uncompressed_layer
    from kvcli.bench.timing import copy_bandwidth, time_call
    from kvcli.models.shapes import shape_spec

    device = torch.device(options.torch_device())
    gpu = device.type == "cuda"
    name = options.dtype if options.dtype != "auto" else "float16" if gpu else "float32"
    dtype: torch.dtype = getattr(torch, name)
    contexts = options.contexts or ([1024, 8192, 32768, 131072] if gpu else [256, 1024])
    batches = parse_batches(options.batches) or [1]
    cases = [case for case in options.choices() if not case.is_baseline]
    spec = shape_spec(options.shape)
    layer_idx = spec.num_layers - 1 if options.layer is None else options.layer
    if layer_idx >= spec.num_layers:
        raise UsageError(f"shape {options.shape} has layers 0 to {spec.num_layers - 1}, not {layer_idx}")
    impls = {case.label: choose_backend(case.record, [], options.impl, device).impl for case in cases}
    rope = shape_rope(options.shape, device)
    uncompressed = partial(uncompressed_layer, spec, device=device, dtype=dtype, seed=options.seed)
    encoded = partial(encoded_layer, layer_idx=layer_idx, device=device, dtype=dtype, seed=options.seed)

    def measure_sdpa(row: Row) -> Row:
        query, key, value = uncompressed(row.batch, row.context)
        attend = partial(scaled_dot_product_attention, query, key, value, enable_gqa=spec.num_kv_groups > 1)
        return timed(row, time_call(attend, device, options.repeats), 2 * key.nbytes, row.context, spec.kv_dim)

    def measure_method(case: MethodChoice, row: Row) -> Row:
        """Checks a method's kernels, and times them if they are right."""
        layer = encoded(case, spec, rope, context=row.context, batch=row.batch).in_pages(row.figures["page_size"])
        backend = choose_backend(case.record, [layer.codec], options.impl, device)
        layer.codec.use_kernels(backend.impl == "fused")
        graph = backend.attend_codes is not reference_attend
        with torch.inference_mode():
            row = replace(row, impl=backend.impl)
            row = row.checked(compare_attention(layer, backend.attend_codes) if graph else None)
            attend = partial(layer.attend, backend.attend_codes, layer.encoded_tokens())
            timing = time_call(attend, device, options.repeats, graph=graph)
        return timed(row, timing, layer.stored_bytes, layer.num_tokens, spec.kv_dim)

    def rows() -> Iterator[Row]:
        for batch, context in product(batches, contexts):
            yield (sdpa := run_row(measure_sdpa, Row(BASELINE, context, batch, "sdpa")))
            figures = {"sdpa_us": sdpa.figures.get("sdpa_us")}
            for case, pages in product(cases, [None, *options.page_size]):
                row = Row(case.label, context, batch, impls[case.label], figures={**figures, "page_size": pages})
                yield run_row(partial(measure_method, case), row)

    total = len(contexts) * len(batches) * (1 + len(cases) * (1 + len(options.page_size)))
    shared = {"shape": options.shape, "layer": layer_idx, "dtype": name, "weights": "random"}
    return BenchRows(rows(), total, {**shared, "copy_gb_s": copy_bandwidth(device, min(options.repeats, 10))})


def table(records: Records, options: AttentionOptions) -> DataTable:
    """Times of one layer, compared with SDPA."""
    columns: dict[str, Column] = {
        "context": "{context}",
        "batch": "{batch}",
        "x SDPA": "{speedup:.2f}",
        "p50 us": "{p50_us:.1f}",
        "p20-p80": "{p20_us:.1f}-{p80_us:.1f}",
        "eager us": "{eager_us:.1f}",
        "how": "{how:s}",
        "GB/s": "{stored_gb_s:.0f}",
        "bits": "{true_bits:.2f}",
    }
    first = records[0]
    title = (
        f"{first['shape']}, layer {first['layer']}, one query token, {first['dtype']}, random codes; "
        f"x SDPA: SDPA's time over this one's; device copy {first['copy_gb_s']:.0f} GB/s"
    )
    return bench_table(title, records, columns, ("how", "eager us", "GB/s", "p20-p80", "error", "bits", "impl"))


SUITE = BenchSuite(
    name="attention",
    help="One layer and one query token against fp16 SDPA; kernels are checked against the reference first.",
    options=AttentionOptions,
    example=f"kvcli bench --shape smollm2-135m --method {DEFAULT_METHOD}-1 --contexts 256 --repeats 5",
    saves_memory="lower --contexts or --batches",
    prepare=prepare,
    figures=FIGURES,
    tabulate=table,
    side_by_side=SideBySide("context", ("p50 us",), ("bits", "x SDPA", "GB/s")),
    bars=(Bars("p50_us", "one layer, one token", "microseconds"),),
)
