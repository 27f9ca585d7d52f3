"""Writes the tables and pictures of docs that are made from the records here, tests, or the commands' help; `--check`
compares.

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

import pictures
from command_pages import commands
from pictures import records

from kvcli.commands.sizes import number
from kvcli.commands.tables import DataTable
from kvcli.registry import BASELINE
from kvcli.report.tables import table
from research.suites import add

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
PAGES = [*sorted(FOLDER.parent.glob("*.md")), *ROOT.glob("README.md"), *ROOT.glob("findings/README.md")]
LOSSES = [*ROOT.glob("kvcli/cli/losses.json")]
add()
_TABLE = re.compile(r"(<!-- table: ([\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_FAULT = re.compile(r"Fault \((\w+)\): (.+?)\. Result: (.+?)\.")


def measured(name: str) -> str:
    """The table of the records of one suite, as `kvcli report --format md` writes it, in part."""
    rows = records(name)
    found = table(rows[0]["suite"], rows)
    at = [found.columns.index(column) for column in ("method", *SHOWN[name])]
    return markdown([found.columns[x] for x in at], [[row[x].strip() for x in at] for row in found.rows])


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
    """Faults of one section, from docstrings of tests: `Fault (SECTION): x. Result: y.`."""
    tests, section, rows = ROOT / "tests", name.removeprefix("faults-"), []
    for path in sorted(tests.rglob("test_*.py")):
        functions = (node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef))
        for paragraph in (x for node in functions for x in (ast.get_docstring(node) or "").split("\n\n")):
            if paragraph.startswith("Fault ("):
                match = _FAULT.fullmatch(" ".join(paragraph.split()))
                if match is None or f"faults-{match[1]}" not in TABLES:
                    raise ValueError(f"{path}: a fault of no section, or without a result: {paragraph}")
                rows += [[match[2], match[3]]] if match[1] == section else []
    return markdown(["fault", "what happens"], rows)


def findings(name: str) -> str:
    """The scripts of `findings/`, by their first lines: what they find, and the version."""
    rows = []
    for path in sorted((ROOT / name).glob("*.sh")):
        _, title, version, *_ = path.read_text().splitlines()
        rows.append(
            [f"[{path.stem}]({path.name})", title.removeprefix("# "), version.removeprefix("# ").split(". ")[0]]
        )
    return markdown(["script", "what is so", "version"], rows)


def types(name: str) -> str:
    """What is compressed of tiny models of every type, and what is refused."""
    alike, others = dict[tuple[str, str], list[str]](), [x for x in records(name) if x["tokenizer"] != "bytes"]
    for x in (rows := [x for x in records(name) if x["tokenizer"] == "bytes"]):
        reasons = dict.fromkeys(x["refused"].values())
        verbs = {why: ", ".join(verb for verb in x["refused"] if x["refused"][verb] == why) for why in reasons}
        refused = "; ".join(f"{verbs[why]}: {why}" for why in verbs)
        alike.setdefault((x["what"], refused), []).append(f"`{x['type']}`")
    works = [x for x in rows if "right" in x]
    (right, *failed), of_text = (
        [sum(len(x.get(kind, ())) for x in found) for kind in ("right", "refused", "wrong", "stock")]
        for found in (works, others)
    )
    kinds, of = (", ".join(dict.fromkeys(x[key] for x in others)) for key in ("tokenizer", "type"))
    by_count = sorted(alike.items(), key=lambda item: (-len(item[1]), item[0]))
    about = (
        f"With transformers {rows[0]['transformers']}, {len(works)} of {len(rows)} types work. Of "
        f"{right + sum(failed[:2])} cells of these, {100 * right / (right + sum(failed[:2])):.1f} % are right,\n"
        f"{failed[0]} refused and {failed[1]} wrong; {failed[2]} more fail in transformers.\n\n"
        f"With tokenizers of other kinds ({kinds}), {of}:\n{', '.join(others[0]['right'])}; "
        f"of {sum(of_text)} cells, {of_text[0]} are right."
    )
    listed = markdown(["compressed", "refused", "types"], [[*key, ", ".join(names)] for key, names in by_count])
    return f"{about}\n\n{listed}"


def by_position(name: str) -> str:
    """KL of the first, second and last part of one long text; means of parts are the units of the records."""
    shown = [(row, [row["units"][part] for part in (0, 1, -1)]) for row in records(name)]
    cells = [
        [row["label"], f"{row['memory']['true_bits']:.2f}", *(number(unit["kl"]) for unit in units)]
        for row, units in shown
    ]
    header = [f"{unit['start']} to {unit['start'] + unit['tokens']}" for unit in shown[0][1]]
    return markdown(["method", "bits", *header], sorted(cells, key=lambda row: float(row[-1])))


def answered(name: str) -> str:
    """Right answers in percent of the methods that all of `ANSWERS` measured; a star as in the suites' own tables."""
    columns: dict[str, dict[str, str]] = {}
    bits: dict[str, str] = {}
    for suite, shown in ANSWERS.items():
        rows = records(name.replace("answers", suite))
        found = table(suite, rows)
        bits |= {row["label"]: "16" if row["memory"] is None else f"{row['memory']['true_bits']:.2f}" for row in rows}
        cells = [dict(zip(found.columns, row, strict=True)) for row in found.rows]
        means = {row["method"]: row for row in cells if row.get("task", "all") == "all"}
        columns |= {heading: {x: row[column].strip() for x, row in means.items()} for heading, column in shown.items()}
        starred = {x: f"{columns[[*shown][-1]][x]}*" for x, row in means.items() if row["difference"].endswith("*")}
        columns[[*shown][-1]] |= starred
    kept = [x for x in bits if all(x in column for column in columns.values())]
    lines = [[x, bits[x], *(column[x] for column in columns.values())] for x in kept]
    return markdown(["method", "bits", *columns], lines)


def recipes(name: str) -> str:
    """What `kvcli tune` found at the loss of a method: bits of codes of keys and values, of the whole cache, and KL."""
    cells = []
    for row in records(name):
        found, own = row["found"]["rows"], row["target"]
        best = next(x for x in found if x["label"] == row["found"]["best"])
        for of, x in ((f"**{row['goal']}**", own), (row["found"]["best"], best)):
            if [of, *_recipe(x)] not in cells:
                cells.append([of, *_recipe(x)])
    return markdown(["method", "bits K / V", "bits, all of 32K tokens", "KL"], cells)


def _recipe(x: dict[str, Any]) -> list[str]:
    bits = f"{x['key_bits']:.2f} / {x['value_bits']:.2f}"
    return [bits, f"{x['effective_bits']:.2f}", number(x["kl_mean"])]


def rivals(name: str) -> str:
    """One setting or a few of each package that was measured, or what failed; records have the others."""
    rows = records(name)
    current = max((row.get("transformers", "") for row in rows), key=lambda x: [*map(int, x.split(".") if x else ())])
    cells = []
    for package, settings in RIVALS.items():
        own = [row for row in rows if row["package"] == package and row["way"] != "history"]
        same = {row["setting"]: row["same_tokens"] for row in own if "same_tokens" in row}
        own = [row for row in own if row["way"] != "generate"]
        for setting in settings:
            found = [row for row in own if row["setting"] == setting and "error" not in row]
            row = (found or [row for row in own if row["setting"] in (setting, "")])[-1]
            star = "*" if row.get("transformers", current) != current else ""
            bits = "/".join(f"{row[x]:.1f}" for x in ("bits_added", "bits") if x in row)
            lost = f"{number(row['kl'])}/{100 * row['flips']:.1f}" if "kl" in row else "fails"
            told = f"{same.get(setting.removesuffix('; steps'), '-')}/{row['seconds']:.0f}" if "kl" in row else ""
            cells.append(
                [f"{package} {row['version']}{star}", setting, row["claim"].removesuffix(" bits"), bits, lost, told]
            )
    table = markdown(["package", "setting", "it says", "bits", "KL/flips", "same/s"], cells)
    all_of_them = f"All {len(rows)} records: {sum(row.get('seconds', 0) for row in rows) / 60:.0f} minutes of measuring"
    return f"{table}\n{all_of_them}, two packages at a time, and installing.\n"


SHOWN = {
    "attention-h100": ("bits", "8K, p50 us", "32K, p50 us", "128K, p50 us", "x SDPA"),
    "generate-h100": ("32K, tok/s", "128K, tok/s", "32K, x tok/s", "128K, x tok/s"),
    "step-h200": ("8K, ms", "32K, ms", "128K, ms", "8K, launches", "32K, % of ceiling", "128K, % of ceiling"),
    "serve-h200": ("prompt", "clients", "cold s", "hot s", "busy s", "disk s", "hot tokens/s"),
    "compose-smollm2-135m": ("needle, 4", "multikey, 4", "KL mean", "first token, anew = 1"),
    "quality-smollm2-135m": ("bits K / V", "KL", "95 % interval", "flips %"),
    "quality-qwen2.5-coder-1.5b-essays": ("bits K / V", "KL", "95 % interval", "flips %"),
    "generated-qwen2.5-coder-1.5b": ("KL mean", "95 % interval", "quarter 1", "quarter 4"),
}
"""Columns of the report's tables that pages show; `kvcli report` shows all."""

ANSWERS = {
    "ruler": {"RULER, 4096 tokens": "4096 tokens", "RULER, 16384 tokens": "16384 tokens"},
    "tools": {"arguments of calls": "arguments %"},
    "code": {"functions": "pass@1 %"},
}
"""By suite: headings, and the columns of its own table below them; the last one has the stars."""

RIVALS = {
    "kvcli": ("kivi-4", "kivi-2", "klt-2.25"),
    "transformers": ("fp8", "hqq, 4 bits", "quanto, 4 bits"),
    "akv-cache": ("balanced",),
    "fade-kv": ("safe, tiers reassigned",),
    "kakeyalattice": ("E8, q_range 38",),
    "nexusquant-kv": ("compress_kv_cache",),
    "spectralquant": ("standard",),
    "tiny-turboquant": ("safe",),
    "tqai": ("K4, V2; steps",),
    "turbokv": ("4 bits",),
    "turboquant": ("4 bits",),
    "turboquant-explained": ("4 bits",),
    "turboquant-kv": ("4 bits",),
    "turboquant-serve": ("K8, V4; steps",),
    "turboquantcpu": ("prod, 4 bits",),
    "ik-llama-cpp-python": ("q8_0", "q4_0", "q4_0, Hadamard"),
    "mlx": ("4 bits",),
    "openvino": ("u4, TURBO",),
}
"""By package: the settings that the page shows, as its documentation recommends them."""

TABLES: dict[str, Callable[[str], str]] = {
    **dict.fromkeys(SHOWN, measured),
    "answers-qwen2.5-coder-1.5b": answered,
    "tune-qwen2.5-coder-1.5b": recipes,
    "positions-qwen2.5-coder-1.5b": by_position,
    "shared-memory": shared_memory,
    "commands": commands,
    "types": types,
    "findings": findings,
    "rivals": rivals,
    **{f"faults-{section}": faults for section in ("kills", "files")},
}


SCALE = "kivi-2"
"""The method whose loss is 1 where losses on several models stand in one table."""

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
        tables.append({**about, "scale": SCALE, "kl": dict(sorted(kl.items()))})
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
    drawn = pictures.stale()
    if "--check" in sys.argv:
        sys.stderr.writelines(f"{x.name} is stale: run python docs/results/tables.py\n" for x in (*stale, *drawn))
        return int(bool(stale or drawn))
    for page in stale:
        page.write_text(rendered(page))
    for path, chart in drawn.items():
        pictures.draw(path, chart)
    return 0


if __name__ == "__main__":
    sys.exit(main())
