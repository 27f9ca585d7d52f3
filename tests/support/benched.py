"""Whole models as the bench runs them: prompts, sessions, methods with small groups."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from kvcli.artifact.choice import MethodChoice
from kvcli.bench.generate import SUITE
from kvcli.bench.model import attached, random_prompt
from kvcli.bench.model_bench import ModelBench
from kvcli.bench.suite import Row

CPU = torch.device("cpu")
SMALL = {"group_size": 8, "residual_length": 8, "codebook_size": 8, "sink_length": 2}


def prompt(model: Any, batch: int, length: int) -> torch.Tensor:
    return random_prompt(model, batch, length, 0)


def session_of(model: Any, name: str, impl: str = "auto", seed: int = 0, **settings: int) -> Any:
    """The session of a method with random codebooks, inside a block; None for fp16."""
    return attached(model, MethodChoice(name).plus({**SMALL, **settings}), impl, seed)


def bench_of(model: Any, *names: str, **options: Any) -> ModelBench:
    """Measures fp16 and some methods."""
    cases = [MethodChoice(name).plus(SMALL) for name in ("fp16", *names)]
    return ModelBench(model, cases, impl="auto", seed=0, **options)


def records(rows: Iterable[Row]) -> list[Any]:
    """Rows of the suites `generate` and `memory` as records, fields as attributes."""
    return [SimpleNamespace(**SUITE.record(row)) for row in rows]


@contextmanager
def passes_of(model: Any) -> Iterator[list[int]]:
    """Numbers of tokens of the forward passes inside the block."""
    lengths: list[int] = []

    def note(model: Any, arguments: Any, named: Any) -> None:
        lengths.append(named["input_ids"].shape[1])

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    yield lengths
    hook.remove()
