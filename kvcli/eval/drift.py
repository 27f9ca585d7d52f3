"""Drift of long greedy generation: where a compressed cache first chooses another token than the model itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from kvcli.cache.memory import MemoryReport
from kvcli.eval.case import REFERENCE, Case
from kvcli.eval.greedy import greedy
from kvcli.eval.records import DriftPrompt
from kvcli.models import LoadedModel

Advance = Callable[[int], None]


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
    made, cache = [], None
    with case.caches(loaded) as new_cache:
        for prompt in prompts.tolist():
            tokens, cache = greedy(loaded, new_cache, [prompt], max_new_tokens)
            made.append(tokens)
            advance(1)
    return made, cache


def reference(loaded: LoadedModel, prompts: Tensor, max_new_tokens: int, advance: Advance) -> list[list[int]]:
    """The continuations of the uncompressed model."""
    return continuations(loaded, REFERENCE, prompts, max_new_tokens, advance)[0]


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
    found, cache = continuations(loaded, case, prompts, len(references[0]), advance)
    units = []
    for index, (tokens, expected) in enumerate(zip(found, references, strict=True)):
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
