"""Suites of `python -m research` beside those of the package."""

from __future__ import annotations

from kvcli.registry import BENCH_SUITES, EVAL_SUITES

EVAL = {"code": "research.code:SUITE"}
BENCH = {
    "attention": "research.libraries:ATTENTION",
    "generate": "research.libraries:GENERATE",
    "startup": "research.startup:SUITE",
    "chunks": "research.chunks:SUITE",
    "step": "research.step:SUITE",
}


def add() -> None:
    """Adds them to the registry; `attention` and `generate` are the package's with `--baseline`."""
    EVAL_SUITES.update(EVAL)
    BENCH_SUITES.update(BENCH)
