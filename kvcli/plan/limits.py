"""What fits into a memory, and from when on an artifact pays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvcli.bench.budget import largest
from kvcli.plan.stages import MethodPlan

_MOST = 2**27
"""Largest context and batch that are looked for."""

_RESOLUTION = 1 / 256


@dataclass(frozen=True)
class Limits:
    """What fits beside the weights.

    Attributes:
        context: tokens of one prompt that fit; 0: none.
        batch: sequences of the planned length that fit.
    """

    context: int
    batch: int


def limits(
    plan: MethodPlan, memory_bytes: int, prompt_tokens: int, new_tokens: int, *, chunk: int | None = None
) -> Limits:
    """The longest prompt of one sequence, and the largest batch of prompts of the given length, that fit.

    Both within 1/256, and never more than what fits by the plan.

    Args:
        plan: of the method.
        memory_bytes: all that there is: for torch on a GPU, for the process on a CPU.
        prompt_tokens: of each sequence of a batch.
        new_tokens: that follow each prompt.
        chunk: prompt tokens of a sequence per forward pass; None: all.
    """

    def fits(tokens: int, batch: int) -> bool:
        return plan.generate(tokens, new_tokens, batch, chunk=chunk).peak_bytes <= memory_bytes

    context = _largest(lambda tokens: fits(tokens, 1), prompt_tokens)
    return Limits(context, _largest(lambda batch: fits(prompt_tokens, batch), 1))


def _largest(fits: Callable[[int], bool], start: int) -> int:
    return largest(fits, start=max(1, start), most=_MOST, resolution=_RESOLUTION)


@dataclass(frozen=True)
class BreakEven:
    """From when on a method with an artifact takes less memory than another, artifact included.

    Attributes:
        against: the other method.
        context: tokens of a single sequence; None: never.
        contexts: sequences of the planned length; None: never.
    """

    against: str
    context: int | None
    contexts: int | None


def break_even(plan: MethodPlan, other: MethodPlan, tokens: int) -> BreakEven:
    """Compares caches in use, and what a model holds once for a method.

    Args:
        plan: of a method with an artifact.
        other: of the method to compare with.
        tokens: of each sequence.
    """

    def pays(context: int, contexts: int = 1) -> bool:
        ours, theirs = (x.cache.memory(context) for x in (plan, other))
        once = ours.artifact_bytes - theirs.artifact_bytes
        return once < contexts * (theirs.cache_bytes - ours.cache_bytes)

    return BreakEven(other.name, _first(pays), _first(lambda count: pays(tokens, count)))


def _first(holds: Callable[[int], bool]) -> int | None:
    """The smallest number from which on something holds; None beyond `_MOST`."""
    found = largest(lambda count: not holds(count), start=1, most=_MOST) + 1
    return None if found > _MOST else found
