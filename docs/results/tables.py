"""Writes the tables of docs that are made from the records here, tests, or the commands' help; `--check` compares.

A record is a line that `kvcli bench --out` or `kvcli eval --out` appended, less the `units` of `eval`. A table stands
between `<!-- table: NAME -->` and `<!-- end -->`; `python docs/results/tables.py` replaces what is between them.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from command_pages import commands

from kvcli.commands.tables import DataTable
from kvcli.registry import BASELINE
from kvcli.report.tables import table

FOLDER = Path(__file__).resolve().parent
PAGES = [*sorted(FOLDER.parent.glob("*.md")), FOLDER.parent.parent / "README.md"]
LOSSES = [*FOLDER.parent.parent.glob("kvcli/cli/losses.json")]
_TABLE = re.compile(r"(<!-- table: ([\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_FAULT = re.compile(r"Fault \((\w+)\): (.+?)\. Result: (.+?)\.(?: Also in: (.+)\.)?")


def records(name: str) -> list[dict[str, Any]]:
    """The records of a file, in order."""
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]


def measured(name: str) -> str:
    """The table of the records of one suite, as `kvcli report --format md` writes it."""
    rows = records(name)
    return table(rows[0]["suite"], rows).markdown()


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table of Markdown."""
    return DataTable("", header, rows).markdown()


def shared_memory(name: str) -> str:
    """KiB of the launch that asks for the most, bfloat16/float32, by head_dim and compute capability."""
    rows = records(name)
    limits = {row["capability"]: row["limit"] // 1024 for row in rows}
    shared = {(row["head_dim"], row["capability"], row["dtype"]): -(-row["shared"] // 1024) for row in rows}
    sizes: dict[tuple[str, ...], list[int]] = {}
    for size in dict.fromkeys(row["head_dim"] for row in rows):
        found = ([shared.get((size, gpu, dtype)) for dtype in ("bfloat16", "float32")] for gpu in limits)
        cells = tuple("" if None in pair else "/".join(map(str, pair)) for pair in found)
        sizes.setdefault(cells, []).append(size)
    header = ["head_dim", *(f"{gpu / 10} (of {limit})" for gpu, limit in limits.items())]
    return markdown(header, [[", ".join(map(str, same)), *cells] for cells, same in sizes.items()])


def faults(name: str) -> str:
    """Faults of one section, from docstrings of tests: `Fault (SECTION): x. Result: y.`, maybe ` Also in: FILE.`."""
    tests, section, rows = FOLDER.parent.parent / "tests", name.removeprefix("faults-"), []
    for path in sorted(tests.rglob("test_*.py")):
        file = str(path.relative_to(tests).with_suffix("")).removeprefix("faults/")
        functions = (node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef))
        for paragraph in (x for node in functions for x in (ast.get_docstring(node) or "").split("\n\n")):
            if paragraph.startswith("Fault ("):
                match = _FAULT.fullmatch(" ".join(paragraph.split()))
                if match is None or f"faults-{match[1]}" not in TABLES:
                    raise ValueError(f"{path}: a fault of no section, or without a result: {paragraph}")
                files = ", ".join(f"`{name}`" for name in (file, *(match[4] or "").split(", ")) if name)
                rows += [[match[2], f"{match[3]} ({files})"]] if match[1] == section else []
    return markdown(["fault", "what happens"], rows)


def by_position(name: str) -> str:
    """KL of the parts of one long text, whose means are the units of the records."""
    rows = records(name)
    ends = [unit["start"] + unit["tokens"] for unit in rows[0]["units"]]
    cells = [
        [row["label"], f"{row['memory']['true_bits']:.2f}", *(f"{unit['kl']:.4f}" for unit in row["units"])]
        for row in rows
    ]
    header = [f"{unit['start']} to {end}" for unit, end in zip(rows[0]["units"], ends, strict=True)]
    return markdown(["method", "bits", *header], sorted(cells, key=lambda row: float(row[-1])))


def pages(name: str) -> str:
    """Microseconds of codes in rows, and times as much of those in pages; empty where pages are refused."""
    rows = {(row["method"], row["context"], row["page_size"]): row["p50_us"] for row in records(name)}
    sizes, contexts = (sorted({key[at] for key in rows} - {None}) for at in (2, 1))
    header = [
        f"{context // 1024}K, {x}" for context in contexts for x in ("us", *(f"pages of {size}" for size in sizes))
    ]
    cells = []
    for method in dict.fromkeys(key[0] for key in rows if key[2]):
        row = []
        for context in contexts:
            alone, paged = rows[method, context, None], [rows[method, context, size] for size in sizes]
            row += [f"{alone:.1f}", *("" if x is None else f"{x / alone:.2f}" for x in paged)]
        cells.append([method, *row])
    return markdown(["method", *header], cells)


def answered(name: str) -> str:
    """The table of the records of one suite, with stored bits; of `ruler` the means of all tasks alone."""
    rows = records(name)
    found = table(rows[0]["suite"], rows)
    bits = {row["label"]: "16" if row["memory"] is None else f"{row['memory']['true_bits']:.2f}" for row in rows}
    shown = [at for at, column in enumerate(found.columns) if column not in ("method", "task")]
    cells = [row for row in found.rows if rows[0]["suite"] != "ruler" or row[1] == "all"]
    header = ["method", "bits", *(found.columns[at] for at in shown)]
    return markdown(header, [[row[0], bits[row[0]], *(row[at].strip() for at in shown)] for row in cells])


def recipes(name: str) -> str:
    """What `kvcli tune` found at the loss of a method: bits of codes of keys and values, of the whole cache, and KL."""
    cells = []
    for row in records(name):
        found, own = row["found"]["rows"], row["target"]
        best = next(x for x in found if x["label"] == row["found"]["best"])
        for of, x in ((f"**{row['goal']}**", own), (row["found"]["best"], best)):
            if [of, *_recipe(x)] not in cells:
                cells.append([of, *_recipe(x)])
    return markdown(["method", "bits K / V", "bits, all of 32K tokens", "KL", "95 % interval"], cells)


def _recipe(x: dict[str, Any]) -> list[str]:
    bits = f"{x['key_bits']:.2f} / {x['value_bits']:.2f}"
    interval = "" if x["kl_low"] is None else f"{x['kl_low']:.4f}-{x['kl_high']:.4f}"
    return [bits, f"{x['effective_bits']:.2f}", f"{x['kl_mean']:.4f}", interval]


SUITES = (
    *("attention-h100", "generate-h100", "compiled-h100", "startup-h100", "chunks-h100", "serve-h100"),
    *("quality-smollm2-135m", "quality-qwen2.5-coder-1.5b-essays"),
)
MODELS = ("smollm2-135m", "qwen2.5-coder-1.5b")

TABLES: dict[str, Callable[[str], str]] = {
    **dict.fromkeys(SUITES, measured),
    **{f"generated-{model}": measured for model in MODELS},
    **{f"{suite}-{model}": answered for suite in ("ruler", "tools", "code") for model in MODELS},
    **{f"tune-{model}": recipes for model in MODELS},
    "positions-qwen2.5-coder-1.5b": by_position,
    "pages-h100": pages,
    "shared-memory": shared_memory,
    "commands": commands,
    **{f"faults-{section}": faults for section in ("kills", "files", "inputs", "calls")},
}


QUALITY = ("quality-qwen2.5-coder-1.5b-essays", "quality-smollm2-135m")
"""The larger model first."""


def losses() -> str:
    """What `kvcli recommend` knows: the KL of the methods of each table that were measured like its first row.

    Of several rows of a method, the first counts: the artifact that comes with the package, where there is one.
    """
    tables = []
    for rows in map(records, QUALITY):
        first = rows[0]["options"]
        shared = {name: first[name] for name in ("sink_length", "residual_length")}
        alike = [row for row in rows if shared.items() <= row["options"].items() and row["method"] != BASELINE]
        kl = {row["method"]: round(row["kl_mean"], 6) for row in reversed(alike)}
        window = "the first {sink_length} and last {residual_length} of each sequence".format(**shared)
        about = {"model": rows[0]["model"], "text": first["corpus"], "tokens": rows[0]["num_tokens"], "window": window}
        tables.append({**about, "kl": dict(sorted(kl.items()))})
    return json.dumps(tables, indent=1) + "\n"


def rendered(page: Path) -> str:
    """A page with the present tables, or the file of losses."""
    return (
        losses()
        if page in LOSSES
        else _TABLE.sub(lambda match: f"{match[1]}{TABLES[match[2]](match[2])}{match[3]}", page.read_text())
    )


def main() -> int:
    """Writes the pages, or names those that are stale.

    Returns:
        The exit code.
    """
    stale = [page for page in (*PAGES, *LOSSES) if rendered(page) != page.read_text()]
    if "--check" in sys.argv:
        sys.stderr.writelines(f"{page.name} is stale: run python docs/results/tables.py\n" for page in stale)
        return int(bool(stale))
    for page in stale:
        page.write_text(rendered(page))
    return 0


if __name__ == "__main__":
    sys.exit(main())
