"""Shared memory by head_dim and dtype: the records of a table in docs/kernels.md.

    python tests/kernels/shared_memory.py 86

compiles what methods launch on compute capability 8.6, without a GPU and no further than needed
(`compiled_kernels.shared_memory`), and replaces the records of 8.6 in docs/results/shared-memory.jsonl. Launches of a
head_dim and dtype that differ in flags alone are compiled once. Exit code 1 if one does not fit.
"""

import argparse
import json
import os
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from compiled_kernels import SHARED_MEMORY, Launch, pretend, record, shared_memory

RECORDS = Path(__file__).parents[2] / "docs" / "results" / "shared-memory.jsonl"
METHODS = ("rtn-4", "fp8", "kivi-2", "squat-2", "squat-pre-2", "qjl", "turboquant-3", "commvq-1")
SIZES = (64, 80, 96, 112, 128, 160, 192, 256)
DTYPES = ("float32", "bfloat16")
"""float16 is not compiled: its launches differ from bfloat16's in the name of the dtype alone."""

QUERIES = (4, 7, 6, 16, 1)
"""Queries per kv head, which SIZES and DTYPES go through."""


def text(path: Path) -> str:
    """A file's text; empty if it does not exist."""
    return path.read_text() if path.exists() else ""


def compiled(capability: int, launch: Launch, known: dict[str, Any], path: Path) -> int:
    """Bytes of shared memory of a launch, from `known` or added to it and its file; RuntimeError names the launch."""
    key = f"{capability} {launch.fingerprint}"
    if key not in known:
        started = time.process_time()
        try:
            known[key] = shared_memory(capability, launch)
        except Exception as error:
            raise RuntimeError(f"{launch.method}: {launch.describe()} does not compile") from error
        line = {"key": key, "shared": known[key], "seconds": time.process_time() - started, "name": launch.describe()}
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
    return known[key]


def main() -> int:
    """Writes records, and prints them and launches that do not fit; returns 1 if there are any."""
    parser = argparse.ArgumentParser()
    parser.add_argument("capability", type=int, choices=SHARED_MEMORY)
    parser.add_argument("--head-dims", type=int, nargs="+", default=SIZES, help="whose records are replaced")
    parser.add_argument("--known", type=Path, default=Path(os.devnull), help="file of launches, not compiled again")
    parser.add_argument("--out", type=Path, default=RECORDS)
    options = parser.parse_args()
    capability, limit = options.capability, SHARED_MEMORY[options.capability]
    pretend(capability)
    lines = [json.loads(line) for line in text(options.known).splitlines()]
    known = {line["key"]: line["shared"] for line in lines}
    rows, failed = [], 0
    for i, (size, dtype) in enumerate(product(SIZES, DTYPES)):
        if size not in options.head_dims:
            continue
        queries = QUERIES[i % len(QUERIES)]
        launches, notes = record(capability, METHODS, size, getattr(torch, dtype), queries, 1)
        kinds = {launch.describe(): launch for launch in reversed(launches)}
        sizes = {name: compiled(capability, launch, known, options.known) for name, launch in kinds.items()}
        largest = max(sizes, key=lambda name: sizes[name])
        over = [name for name in kinds if sizes[name] > limit]
        failed += len(over)
        print("".join(f"{sizes[name]} bytes of {limit}: {kinds[name].method}: {name}\n" for name in over), end="")
        row = {"capability": capability, "head_dim": size, "dtype": dtype, "queries": queries, "launches": len(kinds)}
        row |= {"shared": sizes[largest], "limit": limit, "largest": largest.split()[0], "notes": notes}
        rows.append({**row, "triton": triton.__version__})
        print(rows[-1], flush=True)
    written = [json.loads(line) for line in text(options.out).splitlines()]
    kept = [row for row in written if row["capability"] != capability or row["head_dim"] not in options.head_dims]
    ordered = sorted((*kept, *rows), key=lambda row: (row["capability"], row["head_dim"]))
    options.out.write_text("".join(json.dumps(row) + "\n" for row in ordered))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
