"""Suite `drift`: where long greedy generation first differs from the uncompressed model's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from kvcli.eval.records import UNCOMPRESSED, EvalRecord, Figure, Strict
from kvcli.eval.suite import (
    STAR,
    ComparedOptions,
    CorpusOptions,
    EvalSuite,
    Measured,
    Prepared,
    difference,
    interval,
    mean,
)
from kvcli.progress import Reporter
from kvcli.registry import UNFITTED_METHOD
from kvcli.suite import Records
from kvcli.tables import DataTable

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.cache.memory import MemoryReport
    from kvcli.eval.case import Case
    from kvcli.models import LoadedModel

Advance = Callable[[int], None]


class DriftOptions(CorpusOptions, ComparedOptions):
    """Options of `kvcli eval drift`."""

    num_prompts: int = Field(default=8, ge=1, description="prompts")
    prompt_tokens: int = Field(default=256, ge=1, description="tokens of a prompt")
    max_new_tokens: int = Field(default=128, ge=1, description="tokens generated")


class DriftPrompt(Strict):
    """A unit: one prompt continued greedily by both models."""

    prompt: int
    prompt_tokens: int
    tokens: int
    first_divergence: int | None
    agreed: int
    equal: float


class DriftRecord(EvalRecord):
    """A row."""

    figures: ClassVar[tuple[Figure, ...]] = (Figure("equal", "equal", "higher"), Figure("agreed", "agreed", "higher"))

    suite: Literal["drift"] = "drift"
    unit: Literal["prompt"] = "prompt"
    units: list[DriftPrompt]


def continuations(
    loaded: LoadedModel, case: Case, prompts: Tensor, max_new_tokens: int, advance: Advance = lambda prompts: None
) -> tuple[list[list[int]], Any]:
    """Continues prompts greedily; tokens that end a text do not end it, so that all continuations are of one length.

    Args:
        loaded: the model.
        case: how its cache is compressed.
        prompts: int64 [num_prompts, time].
        max_new_tokens: tokens of each continuation.
        advance: called with 1 after each.

    Returns:
        The new tokens of each prompt, and the last cache.
    """
    from kvcli.eval.greedy import greedy

    made, cache = [], None
    with case.caches(loaded) as new_cache:
        for prompt in prompts.tolist():
            tokens, cache = greedy(loaded, new_cache, [prompt], max_new_tokens)
            made.append(tokens)
            advance(1)
    return made, cache


def compare(tokens: Sequence[int], reference: Sequence[int]) -> tuple[int | None, int, float]:
    """Compares two continuations of one length.

    Returns:
        Index of the first token that differs, None if none does; tokens before it; share of equal tokens, by place.
    """
    equal = [a == b for a, b in zip(tokens, reference, strict=True)]
    first = None if all(equal) else equal.index(False)
    return first, len(equal) if first is None else first, sum(equal) / len(equal)


def measure(
    loaded: LoadedModel,
    case: Case,
    prompts: Tensor,
    references: Sequence[Sequence[int]],
    advance: Advance = lambda prompts: None,
) -> tuple[list[DriftPrompt], MemoryReport | None]:
    """Continues prompts and compares.

    Args:
        loaded: the model.
        case: how its cache is compressed.
        prompts: int64 [num_prompts, time].
        references: continuations of the uncompressed model.
        advance: called with 1 after each prompt.

    Returns:
        One unit per prompt, and the memory of the last prompt's cache.
    """
    made, cache = continuations(loaded, case, prompts, len(references[0]), advance)
    units = []
    for index, (tokens, expected) in enumerate(zip(made, references, strict=True)):
        first, agreed, equal = compare(tokens, expected)
        units.append(
            DriftPrompt(
                prompt=index,
                prompt_tokens=prompts.shape[1],
                tokens=len(expected),
                first_divergence=first,
                agreed=agreed,
                equal=equal,
            )
        )
    return units, cache.memory() if case.compressed else None


def prepare(options: DriftOptions, loaded: LoadedModel, cases: Sequence[Case], reporter: Reporter) -> Prepared:
    """Rows of methods."""
    from kvcli.eval.case import REFERENCE

    prompts = options.sequences(loaded, options.num_prompts, options.prompt_tokens, reporter)
    with reporter.progress(UNCOMPRESSED, len(prompts), "prompts") as advance:
        references, _ = continuations(loaded, REFERENCE, prompts, options.max_new_tokens, advance)

    def rows() -> Iterator[Measured]:
        for case in cases:
            with reporter.progress(case.label, len(prompts), "prompts") as advance:
                yield Measured(case.label, case, *measure(loaded, case, prompts, references, advance))

    return Prepared({"tokens": prompts.tolist(), "max_new_tokens": options.max_new_tokens}, rows())


def table(records: Records, options: DriftOptions) -> DataTable:
    """Shares of equal tokens, and first divergences."""
    rows = []
    for record in records:
        units = record["units"]
        agreed = sorted(unit["agreed"] for unit in units)
        rows.append(
            {
                "method": record["label"],
                "equal %": f"{100 * mean(units, 'equal'):.1f}",
                "95 % interval": interval(record, "equal", "{:.1f}", 100),
                "difference": difference(record, "equal", "{:+.1f}", 100),
                "first divergence (median)": f"token {agreed[(len(agreed) - 1) // 2]}",
                "never": f"{sum(unit['first_divergence'] is None for unit in units)} of {len(units)}",
            }
        )
    first = records[0]["units"][0]
    title = (
        f"{records[0]['model']}: {first['tokens']} tokens generated after each of {len(records[0]['units'])} prompts "
        f"of {first['prompt_tokens']}, against the uncompressed model; {STAR}"
    )
    return DataTable.of(title, rows, ("difference", "never"))


SUITE = EvalSuite(
    name="drift",
    help="Where long greedy generation first differs from the uncompressed model's.",
    options=DriftOptions,
    example=f"kvcli eval drift --method {UNFITTED_METHOD} --num-prompts 4",
    saves_memory="lower --prompt-tokens or --max-new-tokens",
    record=DriftRecord,
    prepare=prepare,
    tabulate=table,
)
