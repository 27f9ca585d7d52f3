"""Writes the tables of docs that are made from the records in this folder, or from tests; `--check` only compares.

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

FOLDER = Path(__file__).resolve().parent
PAGES = [*sorted(FOLDER.parent.glob("*.md")), FOLDER.parent.parent / "README.md"]
_TABLE = re.compile(r"(<!-- table: ([\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_FAULT = re.compile(r"Fault \((\w+)\): (.+?)\. Result: (.+?)\.(?: Also in: (.+)\.)?")


def records(name: str) -> list[dict[str, Any]]:
    """The records of a file, in order."""
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table of Markdown."""
    first, *rest = (f"| {' | '.join(line)} |\n" for line in (header, *rows))
    return "".join((first, f"|{'---|' * len(header)}\n", *rest))


def attention(name: str) -> str:
    """Times of one layer and one query token: microseconds by context, and speed against SDPA at the longest."""
    rows = records(name)
    contexts = sorted({row["context"] for row in rows})
    by_method = {row["method"]: {r["context"]: r for r in rows if r["method"] == row["method"]} for row in rows}
    header = ["method", "bits", *(f"{c // 1024}K, us" for c in contexts), "SDPA = 1", "GB/s of stored bytes"]
    cells = []
    for method, times in by_method.items():
        last = times[contexts[-1]]
        us = [f"{times[c]['p50_us']:.3g}" for c in contexts]
        ratio, rate = f"{last['speedup']:.2f}", f"{last['stored_gb_s']:.0f}"
        cells.append([method, f"{last['true_bits']:.2f}", *us, ratio, rate])
    return markdown(header, cells)


def generate(name: str) -> str:
    """Tokens per second of one sequence, and the rate against a captured step of fp16."""
    rows = records(name)
    prompts = sorted({row["prompt_tokens"] for row in rows})
    header = ["method", *(f"{p // 1024}K, tokens/s" for p in prompts), *(f"{p // 1024}K, fp16 = 1" for p in prompts)]
    cells = []
    for method in dict.fromkeys(row["method"] for row in rows):
        by_prompt = {row["prompt_tokens"]: row for row in rows if row["method"] == method}
        found = [by_prompt.get(p) for p in prompts]
        rates = [f"{row['tokens_per_s'][1]:.1f}" if row else "" for row in found]
        cells.append([method, *rates, *(f"{row['rate_ratio']:.2f}" if row else "" for row in found)])
    return markdown(header, cells)


def quality(name: str) -> str:
    """KL, flips and perplexity by method, best first; and the KL without sinks where that was measured."""
    rows = records(name)
    without = {row["method"]: row["kl_mean"] for row in rows if row["options"]["sink_length"] == 0}
    header = ["method", "bits K / V", "KL", "95 % interval", "flips %", "perplexity", "KL without sinks"]
    cells = []
    for row in sorted(rows, key=lambda row: row["kl_mean"]):
        method, memory, kl = row["method"], row["memory"], row["metrics"]["kl_mean"]
        if row["options"]["sink_length"] != 0:
            interval = f"{kl['low']:.4f}-{kl['high']:.4f}" if kl["low"] is not None else ""
            bits = f"{memory['key_bits']:.2f} / {memory['value_bits']:.2f}"
            figures = [f"{kl['mean']:.4f}", interval, f"{100 * row['flips']:.1f}", f"{row['perplexity']:.2f}"]
            cells.append([method, bits, *figures, f"{without[method]:.4f}" if method in without else ""])
    return markdown(header, cells)


def startup(name: str) -> str:
    """Seconds from the start of a process, without and with compiled kernels."""
    header = ["method", "kernels", "cold", "warm-up in it", "cold - fp16", "warm", "warm - fp16"]
    times = ("cold_s", "cold_warmup_s", "cold_extra_s", "warm_s", "warm_extra_s")
    rows = [[row["method"], f"{row['kernels']}", *(f"{row[time]:.1f}" for time in times)] for row in records(name)]
    return markdown(header, rows)


def chunks(name: str) -> str:
    """Milliseconds per pass over a chunk, with ratios to fp16 and to stock DynamicCache, of all dtypes in a cell."""
    rows = {(row["dtype"], row["method"]): row for row in records(name)}
    dtypes, methods = dict.fromkeys(dtype for dtype, _ in rows), dict.fromkeys(method for _, method in rows)

    def cell(method: str, figure: Callable[[dict[str, Any], dict[str, Any]], str]) -> str:
        return "/".join(figure(rows[dtype, method], rows[dtype, "fp16"]) for dtype in dtypes)

    columns: dict[str, Callable[[dict[str, Any], dict[str, Any]], str]] = {
        f"ms, {'/'.join(dtypes)}": lambda row, fp16: f"{row['ms']:.1f}",
        "fp16 = 1": lambda row, fp16: f"{row['ms'] / fp16['ms']:.2f}",
        "DynamicCache = 1": lambda row, fp16: f"{row['ms'] / row['stock_ms']:.2f}",
        "not captured, ms": lambda row, fp16: f"{row['pass_ms']:.0f}",
    }
    cells = [[method, *(cell(method, figure) for figure in columns.values())] for method in methods]
    return markdown(["method", *columns], cells)


def serve(name: str) -> str:
    """Seconds to a client's first token, and tokens per second of all clients, by where their prompts were."""
    states = ("cold", "hot", "disk", "direct")
    header = ["method", "prompt", "clients", *(f"{x}, s" for x in states), *(f"{x}, tokens/s" for x in states)]
    cells = []
    for row in records(name):
        columns = [f"{state}_{figure}" for figure in ("first_s", "tokens_per_s") for state in states]
        figures = ["" if row[x] is None else f"{row[x]:.3g}" for x in columns]
        cells.append([row["method"], f"{row['context'] // 1024}K", f"{row['batch']}", *figures])
    return markdown(header, cells)


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


TABLES: dict[str, Callable[[str], str]] = {
    "attention-h100": attention,
    "generate-h100": generate,
    "quality-smollm2-135m": quality,
    "startup-h100": startup,
    "chunks-h100": chunks,
    "serve-h100": serve,
    "shared-memory": shared_memory,
    **{f"faults-{section}": faults for section in ("kills", "files", "inputs", "calls")},
}


def rendered(page: str) -> str:
    """A page with the present tables."""
    return _TABLE.sub(lambda match: f"{match[1]}{TABLES[match[2]](match[2])}{match[3]}", page)


def main() -> int:
    """Writes the pages, or names those that are stale.

    Returns:
        The exit code.
    """
    stale = [page for page in PAGES if rendered(page.read_text()) != page.read_text()]
    if "--check" in sys.argv:
        sys.stderr.writelines(f"{page.name} is stale: run python docs/results/tables.py\n" for page in stale)
        return int(bool(stale))
    for page in stale:
        page.write_text(rendered(page.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
