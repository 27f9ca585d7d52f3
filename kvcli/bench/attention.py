"""Suite `attention`: one layer and one query token over its codes, against fp16 SDPA in the same run."""

from __future__ import annotations

from pydantic import Field

from kvcli.bench.suite import (
    DEFAULT_MODEL,
    BenchOptions,
    BenchSuite,
    Lengths,
    Prepared,
    default_methods,
    method_cases,
    parse_batches,
    status,
    warn_without_gpu,
)
from kvcli.errors import UsageError
from kvcli.progress import Reporter
from kvcli.registry import DEFAULT_METHOD
from kvcli.suite import Records
from kvcli.tables import DataTable


class AttentionOptions(BenchOptions):
    """Options of `kvcli bench attention`."""

    shape: str = Field(default="llama-3.1-8b", description="shape of the layer")
    layer: int | None = Field(
        default=None, ge=0, description="its index, for methods whose layers differ; default: the last"
    )
    contexts: Lengths = Field(
        default=[], description="context lengths; repeatable; default: 1024 to 131072 (CPU: 256 and 1024)"
    )
    batches: list[str] = Field(default=[], description="sequences; repeatable; default: 1")
    repeats: int = Field(default=50, ge=1, description="calls timed")


def check(options: AttentionOptions) -> None:
    """Raises UsageError for a model, or batches that are no numbers."""
    if options.model != DEFAULT_MODEL:
        raise UsageError(f"suite attention runs no model; give --shape instead of '{options.model}'")
    if parse_batches(options.batches) is None:
        raise UsageError("--batches auto goes with suite generate or memory")


def prepare(options: AttentionOptions, reporter: Reporter) -> Prepared:
    """Rows of SDPA and of methods."""
    import torch

    from kvcli.bench.attention_bench import AttentionBench

    device = torch.device(options.torch_device())
    gpu = device.type == "cuda"
    dtype = options.dtype if options.dtype != "auto" else "float16" if gpu else "float32"
    contexts = options.contexts or ([1024, 8192, 32768, 131072] if gpu else [256, 1024])
    batches = parse_batches(options.batches) or [1]
    bench = AttentionBench(
        options.shape,
        [case for case in method_cases(options, default_methods()) if not case.is_baseline],
        impl=options.impl,
        repeats=options.repeats,
        device=device,
        dtype=getattr(torch, dtype),
        seed=options.seed,
        layer_idx=options.layer,
    )
    warn_without_gpu(device, reporter)
    shared = {"shape": options.shape, "layer": bench.layer_idx, "dtype": dtype, "weights": "random"}
    return Prepared(bench.rows(contexts, batches), len(contexts) * len(batches) * (1 + len(bench.cases)), shared)


def table(records: Records, options: AttentionOptions) -> DataTable:
    """Times of one layer, compared with SDPA."""
    columns = ("method", "context", "batch", "x SDPA", "p50 us", "p20-p80", "eager us", "GB/s", "bits", "error", "impl")
    rows = []
    for record in records:
        row = {"method": record["method"], "context": f"{record['context']}", "batch": f"{record['batch']}"}
        if record["status"] == "ok":
            row |= {
                "x SDPA": "-" if record["speedup"] is None else f"{record['speedup']:.2f}",
                "p50 us": f"{record['p50_us']:.1f}",
                "p20-p80": f"{record['p20_us']:.1f}-{record['p80_us']:.1f}",
                "eager us": f"{record['eager_us']:.1f}",
                "GB/s": f"{record['stored_gb_s']:.0f}",
                "bits": f"{record['true_bits']:.2f}",
            }
        row |= status(record)
        if record["status"] == "ok" and record["note"]:
            row["impl"] += " (no graph)"
        rows.append(row)
    first = records[0]
    title = (
        f"{first['shape']}, layer {first['layer']}, one query token, {first['dtype']}, random codes; "
        f"x SDPA: SDPA's time over this one's; device copy {first['copy_gb_s']:.0f} GB/s"
    )
    return DataTable.of(title, rows, ("eager us", "GB/s", "p20-p80", "error", "bits", "impl"), columns=columns)


SUITE = BenchSuite(
    name="attention",
    help="One layer and one query token against fp16 SDPA; kernels are checked against the reference first.",
    options=AttentionOptions,
    example=f"kvcli bench --shape smollm2-135m --method {DEFAULT_METHOD}-1 --contexts 256 --repeats 5",
    saves_memory="lower --contexts or --batches",
    prepare=prepare,
    tabulate=table,
    check=check,
)
