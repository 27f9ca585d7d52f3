"""The tables of `kvcli bench`, ratios first."""

from __future__ import annotations

from typing import Any

from kvcli.cli.output import size
from kvcli.tables import DataTable


def attention_table(records: list[dict[str, Any]]) -> DataTable:
    """Times of one layer, compared with SDPA."""
    first = records[0]
    columns = ("method", "context", "batch", "x SDPA", "p50 us", "p20-p80", "eager us", "GB/s", "bits", "error", "impl")
    rows = []
    for record in records:
        shown = [record["method"], f"{record['context']}", f"{record['batch']}"]
        if record["status"] != "ok":
            rows.append([*shown, *["-"] * 6, _error(record), _status(record)])
            continue
        rows.append(
            [
                *shown,
                "-" if record["speedup"] is None else f"{record['speedup']:.2f}",
                f"{record['p50_us']:.1f}",
                f"{record['p20_us']:.1f}-{record['p80_us']:.1f}",
                f"{record['eager_us']:.1f}",
                f"{record['stored_gb_s']:.0f}",
                f"{record['true_bits']:.2f}",
                _error(record),
                record["impl"] + (" (no graph)" if record["note"] else ""),
            ]
        )
    title = (
        f"{first['shape']}, layer {first['layer']}, one query token, {first['dtype']}, random codes; "
        f"x SDPA: SDPA's time over this one's; device copy {first['copy_gb_s']:.0f} GB/s"
    )
    return DataTable(title, columns, rows, optional=("eager us", "GB/s", "p20-p80", "error", "bits", "impl"))


def generate_table(records: list[dict[str, Any]]) -> DataTable:
    """Rates and memory of whole models, compared with fp16."""
    first = records[0]
    columns = (
        "method",
        "prompt+new",
        "batch",
        "x tok/s",
        "x total",
        "prefill / fp16",
        "cache",
        "tok/s",
        "% of ceiling",
        "decode",
        "prefill ms",
        "p20-p80",
        "ttft ms",
        "peak",
        "error",
        "impl",
    )
    rows = []
    for record in records:
        shown = [record["method"], f"{record['prompt_tokens']}+{record['new_tokens']}", f"{record['batch'] or '-'}"]
        if record["status"] != "ok":
            rows.append([*shown, *["-"] * 11, _error(record), _status(record)])
            continue
        rate, prefill, share = record["tokens_per_s"], record["prefill_ms"], record["ceiling_share"]
        rows.append(
            [
                *shown,
                _number(record["rate_ratio"], ".2f"),
                _number(record["total_ratio"], ".2f"),
                _number(record["prefill_ratio"], ".3f"),
                "-" if record["cache_ratio"] is None else f"1/{record['cache_ratio']:.2f}",
                _number(rate and rate[1], ".1f"),
                _number(share and 100 * share, ".0f"),
                _decode(record),
                _number(prefill and prefill[1], ".1f"),
                f"{prefill[0]:.1f}-{prefill[2]:.1f}" if prefill else "-",
                _number(record["ttft_ms"], ".1f"),
                "-" if record["peak_bytes"] is None else size(record["peak_bytes"]),
                _error(record),
                record["impl"],
            ]
        )
    budget = "" if first["memory_budget"] is None else f", budget {size(first['memory_budget'])}"
    title = (
        f"{first['model']}, {first['weights']} weights, {_layers(records)}, {first['dtype']}{budget}; "
        f"prompts: {first['prefill']}; x: over fp16, which is transformers' model and SDPA, the faster of its own "
        "cache and, on a GPU, a captured step whose cache does not grow; tok/s: of all sequences, in steady steps (*: "
        "of all tokens after the first)"
    )
    return DataTable(
        title,
        columns,
        rows,
        optional=(
            "p20-p80",
            "ttft ms",
            "x total",
            "error",
            "prefill ms",
            "peak",
            "impl",
            "cache",
            "decode",
            "tok/s",
            "% of ceiling",
        ),
    )


def memory_table(records: list[dict[str, Any]]) -> DataTable:
    """What fits into the budget."""
    first = records[0]
    columns = ("method", "question", "context", "batch", "cache", "cache / fp16", "peak", "reserved", "error", "impl")
    rows = []
    for record in records:
        asked = [f"{record['context'] or '-'}", f"{record['batch'] or '-'}"]
        shown = [record["method"], record["question"], *asked]
        if record["status"] != "ok":
            rows.append([*shown, *["-"] * 4, _error(record), _status(record)])
            continue
        sizes = [size(record[name]) for name in ("cache_bytes", "peak_bytes", "reserved_bytes")]
        rows.append([*shown, sizes[0], f"1/{record['cache_ratio']:.2f}", *sizes[1:], _error(record), record["impl"]])
    weights = f"{first['weights']} weights ({size(first['weights_bytes'])})"
    title = (
        f"{first['model']}, {weights}, {_layers(records)}, {first['dtype']}, budget {size(first['memory_budget'])}; "
        f"prompts in chunks of {first['prefill_chunk']} tokens, {first['prefill']}; one decode step"
    )
    return DataTable(title, columns, rows, optional=("reserved", "error", "impl", "peak"))


def contexts_table(records: list[dict[str, Any]]) -> DataTable:
    """Loading a context compared with reading it."""
    from kvcli.bench.contexts import break_even

    first, faster_from = records[0], break_even(records)
    columns = (
        "method",
        "context",
        "file",
        "file / 16 bits",
        "prefill+token ms",
        "load+token ms",
        "times faster",
        "load ms",
        "write ms",
        "bits",
        "faster from",
        "error",
        "impl",
    )
    rows = []
    for record in records:
        shown = [record["method"], f"{record['context']}"]
        if record["status"] != "ok":
            rows.append([*shown, *["-"] * 9, _error(record), _status(record)])
            continue
        rows.append(
            [
                *shown,
                size(record["file_bytes"]),
                f"1/{record['file_ratio']:.2f}",
                *(f"{record[name][1]:.1f}" for name in ("prefill_token_ms", "load_token_ms")),
                f"{record['speedup']:.1f}",
                *(f"{record[name][1]:.1f}" for name in ("load_ms", "write_ms")),
                f"{record['file_bits']:.2f}",
                "-" if faster_from[record["method"]] is None else f"{faster_from[record['method']]}",
                _error(record),
                record["impl"],
            ]
        )
    title = (
        f"{first['model']}, {first['weights']} weights, {first['num_layers']} layers, {first['dtype']}, one sequence; "
        "medians; files in the page cache; bits: of the whole file per key or value; faster from: the shortest "
        "measured context from which on loading was faster"
    )
    return DataTable(title, columns, rows, optional=("error", "bits", "impl", "write ms", "faster from", "load ms"))


def _layers(records: list[dict[str, Any]]) -> str:
    """How many layers are compressed, and their share of fp16's cache where there are others."""
    count, others = records[0]["num_layers"], records[0]["other_layers"]
    if not others:
        return f"{count} layers"
    text = f"{count} of {count + others} layers compressed"
    held = next(
        ((x["other_bytes"], x["cache_bytes"]) for x in records if x["impl"] == "sdpa" and x["cache_bytes"]), None
    )
    return text if held is None else f"{text} ({100 * (1 - held[0] / held[1]):.0f} % of fp16's cache)"


def _status(record: dict[str, Any]) -> str:
    status = record["status"].upper() if record["status"] in ("mismatch", "failed") else record["status"]
    return f"{record['impl']}: {status}"


def _decode(record: dict[str, Any]) -> str:
    """How tokens were made; a star where they are not steady steps."""
    if record["decode"] is None:
        return "-"
    return f"{record['decode']}{'' if record['steady_tokens'] else ' *'}"


def _number(value: float | None, format_spec: str) -> str:
    return "-" if value is None else format(value, format_spec)


def _error(record: dict[str, Any]) -> str:
    return "-" if record["out_error"] is None else f"{record['out_error']:.1e}"
