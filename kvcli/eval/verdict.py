"""What a table of `kvcli eval` says, in words."""

from __future__ import annotations

from typing import Any

from kvcli.commands.suite import Records
from kvcli.eval.records import UNCOMPRESSED
from kvcli.registry import BASELINE


def verdict(rows: Records) -> str | None:
    """Of rows of one suite: which lose least for their bits, or are worse than the model itself; None: nothing."""
    figure = next(iter(rows[0]["metrics"]), "")
    if figure == "kl_mean":
        return _front(rows)
    found = {_name(row, rows): row["metrics"][figure] for row in rows if figure in row["metrics"]}
    own = found.pop(UNCOMPRESSED, None)
    if own is None or not found:
        return None
    if own["better"] == "higher" and own["mean"] == 0:
        return "The model itself finds nothing here: these rows say nothing of methods."
    apart: dict[bool, list[str]] = {True: [], False: []}
    for label, metric in found.items():
        versus = metric["difference"] or {}
        if versus.get("to") == UNCOMPRESSED and versus["real"] is not None:
            worse = (versus["mean"] < 0) == (metric["better"] == "higher")
            apart[versus["real"] and worse].append(label)
    words = {True: "worse than the model itself, beyond chance", False: "not told apart from it, or better"}
    said = "; ".join(f"{words[kind]}: {', '.join(names)}" for kind, names in apart.items() if names)
    return f"{said[:1].upper()}{said[1:]}." if said else None


def _front(rows: Records) -> str | None:
    best, front = float("inf"), []
    kept = [row for row in rows if row["memory"] and row["method"] != BASELINE and row.get("layer") is None]
    for row in sorted(kept, key=lambda row: (row["memory"]["true_bits"], row["kl_mean"])):
        if row["kl_mean"] < best:
            best = row["kl_mean"]
            front.append(f"{_name(row, rows)} ({row['memory']['true_bits']:.2f} bits, KL {best:.2g})")
    return f"No other row has fewer bits and loses less than {', '.join(front)}." if len(kept) > 1 else None


def _name(row: Any, rows: Records) -> str:
    """The method, or the label where several rows have it."""
    alone = [x["method"] for x in rows].count(row["method"]) == 1 and row["label"] != UNCOMPRESSED
    return str(row["method"] if alone else row["label"])
