"""The tables of `kvcli eval`; a star marks a difference that is real."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcli.cli.eval_options import EvalOptions
from kvcli.cli.tables import DataTable

_STAR = "*: the 95 % interval of the difference excludes 0"
Rows = list[dict[str, Any]]


def table_of(records: Rows, options: EvalOptions) -> DataTable:
    """The table of a suite."""
    made = {
        "kl": quality_table,
        "layers": layer_table,
        "needle": needle_table,
        "recall": recall_table,
        "drift": drift_table,
        "tasks": task_table,
    }
    return made[options.suite](records, options)


def quality_table(records: Rows, options: EvalOptions) -> DataTable:
    """KL, flips, perplexity and bits of methods."""
    compared = _compared(records)
    versus = () if compared is None else (f"KL - {compared}",)
    columns = (
        *("method", "bits K", "bits V", "bits mean", "KL mean", "95 % interval", *versus),
        *("KL p99", "flips %", "perplexity", "cache / fp16"),
    )
    rows = []
    for record in records:
        memory = record["memory"]
        rows.append(
            [
                record["label"],
                f"{memory['key_bits']:.3f}",
                f"{memory['value_bits']:.3f}",
                f"{memory['true_bits']:.3f}",
                f"{record['kl_mean']:.4f}",
                _interval(record, "kl_mean", "{:.4f}"),
                *([_difference(record, "kl_mean", "{:+.4f}")] if versus else []),
                f"{record['kl_p99']:.3f}",
                f"{100 * record['flips']:.2f}",
                _number(record["perplexity"], "{:.2f}"),
                f"1/{memory['ratio']:.2f}",
            ]
        )
    title = (
        f"{_text(records, options)}; uncompressed perplexity {_number(records[0]['reference_perplexity'], '{:.2f}')}"
        f"{f'; {_STAR}' if versus else ''}"
    )
    optional = ("KL p99", "bits mean", "perplexity", "cache / fp16", "bits V", "bits K")
    return DataTable(title, columns, rows, optional=optional)


def layer_table(records: Rows, options: EvalOptions) -> DataTable:
    """KL when one layer alone is compressed."""
    columns = ("compressed", "KL mean", "95 % interval", "of all layers", "flips %", "KL p99")
    whole = {record["method"] + str(record["artifact"]): record["kl_mean"] for record in records if _all(record)}
    rows = []
    for record in records:
        total = whole[record["method"] + str(record["artifact"])]
        share = "-" if _all(record) or not total else f"{100 * record['kl_mean'] / total:.1f} %"
        rows.append(
            [
                record["label"],
                f"{record['kl_mean']:.5f}",
                _interval(record, "kl_mean", "{:.5f}"),
                share,
                f"{100 * record['flips']:.2f}",
                f"{record['kl_p99']:.3f}",
            ]
        )
    title = f"{_text(records, options)}; the other layers are in full precision"
    return DataTable(title, columns, rows, optional=("KL p99", "flips %"))


def needle_table(records: Rows, options: EvalOptions) -> DataTable:
    """Values found, by length of the text."""
    contexts = list(dict.fromkeys(unit["context"] for unit in records[0]["units"]))
    depths = list(dict.fromkeys(unit["depth"] for unit in records[0]["units"]))
    columns = ("method", "depth %", *(f"{context} tokens" for context in contexts), "all", "characters", "difference")
    rows = []
    for record in records:
        for depth in (*depths, None):
            units = [unit for unit in record["units"] if depth in (None, unit["depth"])]
            by_context = [[unit for unit in units if unit["context"] == context] for context in contexts]
            last = [f"{_mean(units, 'prefix'):.2f}", _difference(record, "exact", "{:+.2f}") if depth is None else ""]
            shown = "all" if depth is None else f"{depth:g}"
            rows.append([record["label"], shown, *map(_found, by_context), _found(units), *last])
    title = (
        f"{records[0]['model']}: values found of those hidden; characters: share before the first wrong one; "
        f"difference of the share found; {_STAR}"
    )
    return DataTable(title, columns, rows, optional=("characters", "difference"))


def recall_table(records: Rows, options: EvalOptions) -> DataTable:
    """Words quoted, by distance."""
    distances = list(dict.fromkeys(unit["distance"] for unit in records[0]["units"]))
    columns = ("method", "words between", "words quoted", "95 % interval", "difference", "whole passages")
    rows = []
    for record in records:
        for distance in (*distances, None) if len(distances) > 1 else (None,):
            units = [unit for unit in record["units"] if distance in (None, unit["distance"])]
            whole = f"{sum(unit['exact'] for unit in units):.0f} of {len(units)}"
            last = (
                [_interval(record, "quoted", "{:.1f}"), _difference(record, "quoted", "{:+.1f}")]
                if distance is None
                else ["", ""]
            )
            shown = f"{distances[0] if len(distances) == 1 else distance or 'all'}"
            rows.append([record["label"], shown, f"{_mean(units, 'quoted'):.1f}", *last, whole])
    words = records[0]["units"][0]["words"]
    title = f"{records[0]['model']}: words of {words} quoted before the first wrong one; {_STAR}"
    return DataTable(title, columns, rows, optional=("95 % interval",))


def drift_table(records: Rows, options: EvalOptions) -> DataTable:
    """Where generation first differs from the uncompressed model's."""
    columns = ("method", "equal %", "95 % interval", "difference", "first divergence (median)", "never")
    rows = []
    for record in records:
        units = record["units"]
        agreed = sorted(unit["agreed"] for unit in units)
        rows.append(
            [
                record["label"],
                f"{100 * _mean(units, 'equal'):.1f}",
                _interval(record, "equal", "{:.1f}", 100),
                _difference(record, "equal", "{:+.1f}", 100),
                f"token {agreed[(len(agreed) - 1) // 2]}",
                f"{sum(unit['first_divergence'] is None for unit in units)} of {len(units)}",
            ]
        )
    first = records[0]["units"][0]
    title = (
        f"{records[0]['model']}: {first['tokens']} tokens generated after each of {len(records[0]['units'])} prompts "
        f"of {first['prompt_tokens']}, against the uncompressed model; {_STAR}"
    )
    return DataTable(title, columns, rows, optional=("difference", "never"))


def task_table(records: Rows, options: EvalOptions) -> DataTable:
    """Figures of lm-eval's tasks."""
    columns = ("method", "task and metric", "value", "95 % interval", "difference", "documents")
    rows = []
    for record in records:
        for name, metric in record["metrics"].items():
            task, _, figure = name.partition("/")
            count = sum((unit["task"], unit["metric"]) == (task, figure) for unit in record["units"])
            rows.append(
                [
                    record["label"],
                    name,
                    _number(metric["mean"], "{:.4f}"),
                    _interval(record, name, "{:.3f}"),
                    _difference(record, name, "{:+.4f}"),
                    f"{count}",
                ]
            )
    title = f"{records[0]['model']}: lm-eval, contexts in chunks of {options.chunk}; {_STAR}"
    return DataTable(title, columns, rows, text_columns=2, optional=("documents", "95 % interval"))


def _text(records: Rows, options: EvalOptions) -> str:
    return (
        f"{options.model}: {records[0]['num_tokens']} tokens in sequences of {options.seq_len}, chunk {options.chunk}, "
        f"residual {options.residual_length}, sinks {options.sink_length}"
    )


def _all(record: dict[str, Any]) -> bool:
    return record["layer"] is None


def _compared(records: Rows) -> str | None:
    """The row that others are compared with."""
    for record in records:
        for metric in record.get("metrics", {}).values():
            if metric["difference"] is not None:
                return str(metric["difference"]["to"])
    return None


def _interval(record: dict[str, Any], name: str, template: str, factor: float = 1) -> str:
    metric = record.get("metrics", {}).get(name)
    if metric is None or metric["low"] is None:
        return "-"
    return f"{template.format(factor * metric['low'])}-{template.format(factor * metric['high'])}"


def _difference(record: dict[str, Any], name: str, template: str, factor: float = 1) -> str:
    """The difference to the row compared with, with a star if it is real."""
    difference = record.get("metrics", {}).get(name, {}).get("difference")
    if difference is None or difference["mean"] is None:
        return "-"
    return template.format(factor * difference["mean"]) + ("*" if difference["real"] else " ")


def _number(value: float | None, template: str) -> str:
    return "inf" if value is None else template.format(value)


def _mean(units: Sequence[dict[str, Any]], name: str) -> float:
    return float(sum(unit[name] for unit in units) / len(units))


def _found(units: Sequence[dict[str, Any]]) -> str:
    return f"{sum(unit['exact'] for unit in units):.0f} of {len(units)}"
