"""Tables of records of `kvcli eval` and `kvcli bench`, for docs and for `kvcli report`.

A table is of rows of one suite; `sections` puts the rows together that can stand in one.
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcli.commands.sizes import number, share, tokens
from kvcli.commands.suite import Records, SideBySide, Suite
from kvcli.commands.tables import DataTable
from kvcli.errors import UsageError
from kvcli.eval.records import (
    ROW_OPTIONS,
    STAR,
    UNCOMPRESSED,
    agreed,
    checked,
    compared_with,
    difference,
    interval,
    read_plain,
    verdict,
)
from kvcli.models.builtin_models import DEFAULT_MODEL
from kvcli.registry import BENCH_SUITES, EVAL_SUITES, get_suite

Row = Mapping[str, Any]

_NAMING = ("setting", "residual_length", "sink_length", "impl", "dtype", "device")
"""Options that tell rows of one method apart."""

IGNORED_OPTIONS = {
    *ROW_OPTIONS,
    "sink_length",
    "residual_length",
    "batch_size",
    "max_kld",
    "max_flips",
    "model_revision",
}
"""Options in which rows of one table may differ."""

_TEXT = ("corpus", "corpus_split", "seq_len")
"""Options that say which text was read."""

WRONG = "\u25b8"
"""Stands before the first wrong character of an answer."""

_SHOWN_ANSWERS = 6

MALFORMED = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError)
"""What is raised where a record lacks a field, or has one of another type."""


@dataclass(frozen=True)
class Section:
    """Rows of one suite that stand in one table, the commands that measured them, and what a reader should know."""

    suite: str
    title: str
    rows: Records
    table: DataTable
    commands: Sequence[str]
    notes: Sequence[str]
    verdict: str = ""  # what the table says, in words; empty: nothing

    @property
    def about(self) -> str:
        return find_suite(self.suite).help


def read(path: Path, warn: Callable[[str], None] = lambda line: None) -> list[dict[str, Any]]:
    """The records of a file, lines of `--out` or the object of `--json`; `units` may have been left out.

    Control characters outside `units` are blanks: a terminal would obey them, and charts cannot have them. UsageError:
    no such file, or a row that is no record.
    """
    plain = read_plain(path, warn)
    rows = [{name: x if name == "units" else _printable(x) for name, x in row.items()} for row in plain]
    for place, row in enumerate(rows):
        if row.get("suite") not in (*EVAL_SUITES, *BENCH_SUITES):
            raise UsageError(f"{path}: row {place} is no record of kvcli eval or kvcli bench")
        if "units" in row:
            checked(path, place, row)
    return rows


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return "".join(x if x.isprintable() else " " for x in value)
    if isinstance(value, dict):
        return {_printable(name): _printable(x) for name, x in value.items()}
    return [_printable(x) for x in value] if isinstance(value, list) else value


def sections(rows: Records) -> list[Section]:
    """The tables of records, in the order of their first rows; UsageError: a record that lacks what its table has."""
    groups: dict[str, list[Row]] = {}
    made, suite = [], ""
    try:
        for row in rows:
            suite = str(row["suite"])
            groups.setdefault(repr(_group(row)), []).append(row)
        kinds = [_group(group[0]) for group in groups.values()]
        for group, kind in zip(groups.values(), kinds, strict=True):
            suite, title = str(group[0]["suite"]), _title(kind, kinds)
            said = verdict(group) if suite in EVAL_SUITES else None
            made.append(Section(suite, title, group, table(suite, group), _commands(group), _notes(group), said or ""))
    except MALFORMED as error:
        raise UsageError(f"a record of suite {suite} lacks what its table shows: {error}") from error
    return made


def table(suite: str, rows: Records) -> DataTable:
    """The table of rows of one suite: the command's own, but for `kl`, or one row per method with rows side by side."""
    if suite == "kl":
        return quality(rows)
    found = find_suite(suite)
    options = {name: x for name, x in rows[0].get("options", {}).items() if name in found.options.model_fields}
    made = found.tabulate(rows, found.options(**options))
    return side_by_side(rows, made, found.side_by_side) if found.side_by_side else made


def unique_names(rows: Records) -> list[tuple[str, Row]]:
    """Rows with names: the method, or label and options where several have it; of rows that are alike the last one.

    A row of a recipe has the recipe's name before the method.
    """
    same: dict[str, dict[str, Row]] = {}
    for row in rows:
        of, label = str(row["method"]), row.get("label")
        recipes = [Path(x).stem for x in (row.get("options") or {}).get("recipe") or ()]
        of = UNCOMPRESSED if label == UNCOMPRESSED else f"{label} ({of})" if label in recipes else of
        same.setdefault(of, {})[repr(_distinguishing_options(row))] = row
    return [(_name(method, row, [*alike.values()]), row) for method, alike in same.items() for row in alike.values()]


def _distinguishing_options(row: Row) -> dict[str, Any]:
    """What tells rows of one method apart."""
    options = row.get("options") or {}
    return {"label": row.get("label"), "artifact": row.get("artifact"), **{x: options.get(x) for x in _NAMING}}


def _name(method: str, row: Row, alike: Records) -> str:
    """The name of a row among all rows of its method."""
    traits, others = _distinguishing_options(row), [_distinguishing_options(other) for other in alike]
    differing = [x for x in traits if len({repr(other[x]) for other in others}) > 1]
    if "label" in differing:
        method, differing = str(row["label"]), differing[1:]
    if len({repr(other["label"]) for other in others}) == len(others):
        return method
    return ", ".join((method, *(f"{x} {traits[x]}" for x in differing)))


def side_by_side(rows: Records, made: DataTable, how: SideBySide) -> DataTable:
    """The table with one row per method; what went wrong where there is no figure."""
    field, each, of_last = how.field, how.each, how.of_last
    values = sorted({row[field] for row in rows})
    shown: dict[str, dict[Any, dict[str, str]]] = {}
    for row, cells in zip(rows, made.rows, strict=True):
        found = dict(zip(made.columns, cells, strict=True))
        failed = dict.fromkeys((*each, *of_last), str(row["status"]))
        shown.setdefault(cells[0], {})[row[field]] = found if row["status"] == "ok" else failed
    places = [(f"{tokens(x) if field == 'context' else x}, {column}", x, column) for column in each for x in values]
    places += [(column, values[-1], column) for column in of_last if column in made.columns]
    lines = [[name, *(found.get(x, {}).get(column, "") for _, x, column in places)] for name, found in shown.items()]
    return DataTable(made.title, ["method", *(heading for heading, *_ in places)], lines)


def without_sinks(rows: Records) -> dict[str, Row]:
    """By method, the row that differs from another one by having no sinks."""
    sinks = {row["method"] for row in rows if row["options"].get("sink_length") != 0}
    return {row["method"]: row for row in rows if row["options"].get("sink_length") == 0 and row["method"] in sinks}


def quality(rows: Records) -> DataTable:
    """KL, flips and perplexity by method, best first; and the KL without sinks where that was measured, too."""
    without = without_sinks(rows)
    kept = [row for row in rows if row not in without.values()]
    header = ["method", "bits K / V", "cache / fp16", "KL", "95 % interval", "flips %", "perplexity"]
    compared = compared_with(kept, "kl_mean")
    cells = []
    for name, row in sorted(unique_names(kept), key=lambda item: float(item[1]["kl_mean"])):
        memory = row["memory"]
        bits = f"{memory['key_bits']:.2f} / {memory['value_bits']:.2f}" if memory else "-"
        perplexity = "inf" if row["perplexity"] is None else f"{row['perplexity']:.2f}"
        figures = [number(row["kl_mean"]), interval(row, "kl_mean", "{:.4f}"), f"{100 * row['flips']:.1f}", perplexity]
        figures += [difference(row, "kl_mean", "{:+.4f}", to=compared)] * bool(compared)
        if without:
            other = without.get(row["method"])
            figures.append("" if other is None else number(other["kl_mean"]))
        cells.append([name, bits, share(memory.get("whole_ratio", memory["ratio"])) if memory else "-", *figures])
    title = f"KL to the uncompressed model, nats per token, over {rows[0]['num_tokens']} tokens"
    header += [f"KL - {compared}"] * bool(compared) + ["KL without sinks"] * bool(without)
    return DataTable(f"{title}{f'; {STAR}' * bool(compared)}", header, cells)


def answers(rows: Records) -> DataTable | None:
    """What was said beside what was expected, where one answer is wrong; None where none is, or units have no texts."""
    same = [row for row in rows if row.get("protocol") == rows[0].get("protocol")]
    texts = {"answer", "expected", "exact"}
    by_name = {name: row["units"] for name, row in unique_names(same) if texts <= (row.get("units") or [{}])[0].keys()}
    cells: list[list[str]] = []
    places = [place for place in zip(*by_name.values(), strict=True) if any(unit["exact"] < 1 for unit in place)]
    if not places:
        return None
    for place, units in enumerate(places[:_SHOWN_ANSWERS], 1):
        cells.append([f"{place}. expected", units[0]["expected"]])
        for name, unit in zip(by_name, units, strict=True):
            answer, expected = (" ".join(unit[x].split()) for x in ("answer", "expected"))
            right = agreed(answer, expected)
            cells.append([name, f"{answer[:right]}{WRONG * (right < len(expected))}{answer[right:]}"])
    shown = f"the first {len(places[:_SHOWN_ANSWERS])} of " if len(places) > _SHOWN_ANSWERS else ""
    title = f"What was expected, and what was said, wrong from {WRONG} on: {shown}{len(places)} prompts"
    return DataTable(title, ["", "text"], cells, text_columns=2, prose=["text"])


def find_suite(name: str) -> Suite:
    """A suite of `kvcli eval` or `kvcli bench`."""
    suite: Suite = get_suite({**EVAL_SUITES, **BENCH_SUITES}[name])
    return suite


def _group(row: Row) -> dict[str, Any]:
    """What rows of one table have in common."""
    of = {"suite": row["suite"], "of": row.get("model", row.get("shape"))}
    if row["suite"] in EVAL_SUITES:
        return {**of, **{x: y for x, y in sorted(row["options"].items()) if y and x not in IGNORED_OPTIONS}}
    how = find_suite(row["suite"]).side_by_side
    batch = row["batch"] if how and how.field == "context" else None
    return {**of, "weights": row.get("weights"), "on": machine(row), "batch": batch}


def _title(kind: Row, kinds: Records) -> str:
    """The suite and the model, and what tells the section from others of the same."""
    others = [x for x in kinds if (x["suite"], x["of"]) == (kind["suite"], kind["of"])]
    apart = {x.replace("_", "-"): y for x, y in kind.items() if y and any(other.get(x) != y for other in others)}
    words = (x if y is True else f"{x} {' '.join(map(str, y)) if isinstance(y, list) else y}" for x, y in apart.items())
    return ", ".join((f"{kind['suite']}: {kind['of']}", *words))


def machine(row: Row) -> str:
    """The processor that computed, and the versions."""
    info = row.get("machine") or {}
    gpus = [gpu["name"] for gpu in info.get("gpus", ())] if str(row.get("device", "")).startswith("cuda") else []
    versions = f"torch {info['packages'].get('torch')}" if "packages" in info else ""
    return ", ".join(filter(None, (gpus[0] if gpus else info.get("cpu"), versions)))


def _notes(rows: Records) -> list[str]:
    """The model, the machines and commits; and what must not be overlooked."""
    first = rows[0]
    of = first.get("model", first.get("shape"))
    random = ", random weights" if first.get("weights") == "random" else ""
    dtypes = "/".join(dict.fromkeys(str(row.get("dtype", "")) for row in rows)).strip("/")
    text = "".join(f", {x.replace('_', '-')} {y}" for x, y in (first.get("options") or {}).items() if x in _TEXT and y)
    notes = [f"{of}{random}{f', {dtypes}' if dtypes else ''}{text}"]
    notes += dict.fromkeys(
        f"{machine(row)}, kvcli {row['machine'].get('kvcli')}"
        + (f" at {row['machine']['commit']}" if row["machine"].get("commit") else "")
        for row in rows
        if row.get("machine")
    )
    if first["suite"] in BENCH_SUITES and len({repr(row.get("options")) for row in rows}) > 1:
        notes.append("Rows of several runs: each is compared with fp16 of its own run, which may not be the one shown.")
    if len({row.get("protocol") for row in rows}) > 1:
        notes.append("These rows were not all measured on the very same tokens: small differences mean nothing.")
    if prints := {str(row["fingerprint"]) for row in rows if "fingerprint" in row} - {first.get("fingerprint")}:
        from kvcli.models.fingerprint import differs  # imports torch

        reasons = {differs(x, first["fingerprint"]) for x in prints} - {None}
        notes += [f"Not all rows are of the same weights: {reason}." for reason in reasons]
    bad = {f"{row['method']}: {row['note']}": None for row in rows if row.get("note") and row.get("status") != "ok"}
    return notes + list(bad)


def _commands(rows: Records) -> list[str]:
    """The command lines that measured rows, from their options; none where options were not recorded."""
    commands: dict[str, None] = {}
    for row in rows:
        if not (options := row.get("options")):
            continue
        suite, group = find_suite(row["suite"]), "eval" if row["suite"] in EVAL_SUITES else "bench"
        words = [*suite.example.partition(group)[0].split(), group, suite.name]
        words += [options["model"]] if options.get("model", DEFAULT_MODEL) != DEFAULT_MODEL else []
        for name, field in suite.options.model_fields.items():
            value, flag = options.get(name), name.replace("_", "-")
            if name in ("model", "out") or value is None or value == field.get_default(call_default_factory=True):
                continue
            if isinstance(value, bool):
                words.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                items = value if isinstance(value, list) else [value]
                words += [word for item in items for word in (f"--{flag}", str(item))]
        commands[shlex.join(words)] = None
    return list(commands)
