"""Whole models whose captured decode step attends with another library."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

from torch import Tensor

from kvcli.bench.fixed_length import replay_step, ways_of_modules
from kvcli.bench.layer import uncompressed_layer
from kvcli.bench.model import ModelRun
from kvcli.bench.model_bench import ModelBench, with_ratios
from kvcli.bench.suite import Row, run_row
from kvcli.bench.timing import percentiles
from kvcli.errors import UsageError
from kvcli.plan.budget import memory_limit
from kvcli.registry import BASELINE
from research.libraries import Baseline


@dataclass(frozen=True)
class LibraryBench(ModelBench):
    """Measures libraries, in `generate`, beside fp16 and methods."""

    _: KW_ONLY
    libraries: Sequence[Baseline] = ()

    def generate(
        self, contexts: list[int], batches: list[int] | None, *, new_tokens: int, repeats: int
    ) -> Iterator[Row]:
        """As `ModelBench.generate`, the libraries after fp16."""
        for row in super().generate(contexts, batches, new_tokens=new_tokens, repeats=repeats):
            yield row
            for library in self.libraries if row.method == BASELINE else ():
                figures = {x: row.figures[x] for x in ("question", "new_tokens", "weights_bytes")}
                empty = Row(library.name, row.context, row.batch, library.name, figures=figures)
                measure = partial(self._library_times, library, repeats, row.figures.get("copy_gb_s"))
                yield with_ratios(run_row(measure, empty), row)

    def _library_times(self, library: Baseline, repeats: int, copy_gb_s: float | None, row: Row) -> Row:
        """The row, checked with a library's attention, with the times of captured steps with it."""
        model, spec, new_tokens = self.model, self.check.spec, row.figures["new_tokens"]
        if spec.other_layers:
            raise UsageError(f"{library.name} replaces attention to the whole context only")
        layer = partial(uncompressed_layer, spec, row.batch, row.context + 1, model.device, model.dtype, self.seed)
        row = row.checked(library.check(*layer())[0])
        with memory_limit(self.memory_budget, model.device):
            runs = library_runs(model, library, row.batch, row.context, new_tokens, repeats)
        return self.timed(row, runs, copy_gb_s, filled=True)


def library_runs(
    model: Any, library: Baseline, batch: int, context: int, new_tokens: int, repeats: int
) -> list[ModelRun]:
    """Runs of captured steps with a library's attention, without a prompt; otherwise as `with_fixed_length`.

    Raises:
        UsageError: no step after the first token, or none that can be captured.
    """
    steps, tried = new_tokens - 1, []
    if steps < 1:
        raise UsageError(f"{library.name} is measured in decode steps; ask for more new tokens")
    for how, modules in ways_of_modules(model):
        seconds, held, note = replay_step(
            model, batch, context, steps, repeats, modules, library.dtype, partial(library_forward, library)
        )
        if seconds:
            tried.append([ModelRun(0, 0, s, held, None, None, held, how=how, steady=(steps, s)) for s in seconds])
    if not tried:
        raise UsageError(note)
    return min(tried, key=lambda runs: percentiles([run.decode_s for run in runs])[1])


def library_forward(library: Baseline, query: Tensor, key: Tensor) -> Callable[..., tuple[Tensor, None]]:
    """An attention function of transformers, for queries and keys like these."""
    attend = library.plan(library.ask(query), key)

    def forward(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        return attend(library.ask(query), key, value).to(query.dtype).transpose(1, 2), None

    return forward
