"""Suite `contexts`: loading contexts from files, against reading them again."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from kvcli.bench.suite import BenchSuite, Lengths, Prepared, WholeModelOptions, default_methods, method_cases, status
from kvcli.options import check_storable
from kvcli.progress import Reporter
from kvcli.registry import UNFITTED_METHOD
from kvcli.sizes import size
from kvcli.suite import Records
from kvcli.tables import DataTable


class ContextsOptions(WholeModelOptions):
    """Options of `kvcli bench contexts`."""

    prompt_tokens: Lengths = Field(
        default=[], description="prompt lengths; repeatable; default: 2048, 8192 and 32768, on a CPU 256 and 1024"
    )
    repeats: int = Field(default=3, ge=1, description="runs timed")
    context_folder: Path | None = Field(
        default=None,
        description="folder for files, which are deleted afterwards; default: the system's temporary folder",
    )


def prepare(options: ContextsOptions, reporter: Reporter) -> Prepared:
    """Rows of fp16 and of methods."""
    import torch

    from kvcli.bench.context_bench import ContextBench
    from kvcli.seam.probe import probe

    gpu = torch.device(options.torch_device()).type == "cuda"
    cases = method_cases(options, default_methods(kinds_only=True), baseline=True)
    contexts = options.prompt_tokens or ([2048, 8192, 32768] if gpu else [256, 1024])
    if options.context_folder is not None:
        options.context_folder.mkdir(parents=True, exist_ok=True)
    model, shared = options.load_model(options.random_weights, reporter)
    check_storable(shared["model"], probe(model).spec)
    bench = ContextBench(
        model,
        cases,
        impl=options.impl,
        seed=options.seed,
        prefill_chunk=options.prefill_chunk,
        folder=options.context_folder,
    )
    shared = {**shared, "prefill_chunk": options.prefill_chunk}
    return Prepared(bench.rows(contexts, options.repeats), len(contexts) * len(cases), shared)


def break_even(records: Records) -> dict[str, int | None]:
    """The shortest measured context from which on loading was always faster than reading the prompt.

    Returns:
        Tokens by method; None where loading the longest one was slower, or nothing was measured.
    """
    shortest: dict[str, int | None] = {record["method"]: None for record in records}
    for method in shortest:
        measured = [record for record in records if record["method"] == method and record["speedup"] is not None]
        for record in sorted(measured, key=lambda record: -record["context"]):
            if record["speedup"] <= 1:
                break
            shortest[method] = record["context"]
    return shortest


def table(records: Records, options: ContextsOptions) -> DataTable:
    """Loading a context compared with reading it."""
    columns = (
        *("method", "context", "file", "file / 16 bits", "prefill+token ms", "load+token ms", "times faster"),
        *("load ms", "write ms", "bits", "faster from", "error", "impl"),
    )
    faster_from, rows = break_even(records), []
    for record in records:
        row = {"method": record["method"], "context": f"{record['context']}"}
        if record["status"] == "ok":
            times = ("prefill_token_ms", "load_token_ms", "load_ms", "write_ms")
            prefill, load_token, load, write = (f"{record[name][1]:.1f}" for name in times)
            row |= {
                "file": size(record["file_bytes"]),
                "file / 16 bits": f"1/{record['file_ratio']:.2f}",
                "prefill+token ms": prefill,
                "load+token ms": load_token,
                "times faster": f"{record['speedup']:.1f}",
                "load ms": load,
                "write ms": write,
                "bits": f"{record['file_bits']:.2f}",
                "faster from": "-" if faster_from[record["method"]] is None else f"{faster_from[record['method']]}",
            }
        rows.append(row | status(record))
    first = records[0]
    title = (
        f"{first['model']}, {first['weights']} weights, {first['num_layers']} layers, {first['dtype']}, one sequence; "
        "medians; files in the page cache; bits: of the whole file per key or value; faster from: the shortest "
        "measured context from which on loading was faster"
    )
    optional = ("error", "bits", "impl", "write ms", "faster from", "load ms")
    return DataTable.of(title, rows, optional, columns=columns)


SUITE = BenchSuite(
    name="contexts",
    help="Loading contexts from files against reading them again.",
    options=ContextsOptions,
    example=f"kvcli bench contexts --method {UNFITTED_METHOD} --prompt-tokens 2048",
    saves_memory="lower --prompt-tokens or --prefill-chunk",
    prepare=prepare,
    tabulate=table,
    check=ContextsOptions.check,
    summarize=lambda records: {"faster_from": break_even(records)},
)
