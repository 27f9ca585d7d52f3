"""The tables of `kvcli bench`, ratios first."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from kvcli.cli.output import table


def attention_table(records: list[dict[str, Any]]) -> Table:
    """Times of one layer beside those of SDPA."""
    first = records[0]
    columns = ("method", "context", "batch", "x SDPA", "p50 us", "p20-p80", "eager us", "GB/s", "bits", "error", "form")
    rows = []
    for record in records:
        shown = [record["method"], f"{record['context']}", f"{record['batch']}"]
        if record["status"] != "ok":
            status = "MISMATCH" if record["status"] == "mismatch" else record["status"]
            rows.append([*shown, *["-"] * 6, _error(record), f"{record['impl']}: {status}"])
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
    return table(title, columns, rows)


def _error(record: dict[str, Any]) -> str:
    return "-" if record["out_error"] is None else f"{record['out_error']:.1e}"
