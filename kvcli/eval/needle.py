"""Needle grid: a UUID hidden at some depth of a text of some length, asked for after the text.

The answer is generated greedily through the real cache; the text is read in one forward pass, the question in a second
one, which sees the text as the cache has stored it.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import Any

from kvcli.cache.memory import MemoryReport
from kvcli.eval.case import Case
from kvcli.eval.greedy import end_tokens, greedy
from kvcli.eval.prompts import Prompt, in_pieces, sentences
from kvcli.eval.records import NeedlePrompt
from kvcli.models import LoadedModel

_PLACES = ("lighthouse", "harbour", "museum", "library", "station", "bakery", "theatre", "airport", "castle", "farm")
_DECORATION = " \n\t`*\"'"
"""What may stand before a value in an answer."""


@dataclass(frozen=True)
class NeedleConfig:
    """The grid.

    Attributes:
        contexts: lengths of the text in tokens, without question and template.
        depths: where the value stands, in percent of the text.
        num_prompts: values per cell.
        chat: whether prompts are put into the chat template.
        seed: of values and texts.
    """

    contexts: Sequence[int] = (512, 1024)
    depths: Sequence[float] = (0, 50, 100)
    num_prompts: int = 2
    chat: bool = True
    seed: int = 0


def make_prompts(loaded: LoadedModel, texts: Sequence[str], config: NeedleConfig) -> list[Prompt]:
    """The prompts of all cells; the same for the same seed.

    Raises:
        CorpusError: texts that are shorter than the longest context.
    """
    made = []
    for context in config.contexts:
        for index in range(config.num_prompts):
            chosen = random.Random(f"{config.seed} {context} {index}")
            text = sentences(loaded, texts, context, chosen.getrandbits(32))
            starts = [0, *accumulate(sentence.tokens for sentence in text)]
            for depth in config.depths:
                place, value = chosen.choice(_PLACES), str(uuid.UUID(int=chosen.getrandbits(128), version=4))
                at = min(range(len(text)), key=lambda i: abs(starts[i] - depth / 100 * starts[-2]))
                fact = f"The access code of the {place} is"
                parts = [sentence.text for sentence in text[:-1]]
                parts.insert(at, f"{fact} {value}.")
                pieces = in_pieces(
                    loaded, " ".join(parts), f"What is the access code of the {place}?", fact, config.chat
                )
                made.append(Prompt(pieces, value, {"context": context, "depth": depth, "prompt": index}))
    return made


def score(answer: str, expected: str) -> tuple[float, float]:
    """Whether an answer begins with the value, and the share of the value's characters before the first wrong one."""
    pairs = zip(answer.lstrip(_DECORATION), expected, strict=False)
    prefix = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return float(prefix == len(expected)), prefix / len(expected)


def measure(
    loaded: LoadedModel, case: Case, prompts: Sequence[Prompt], advance: Callable[[int], None] = lambda prompts: None
) -> tuple[list[NeedlePrompt], MemoryReport | None]:
    """Asks for every value; generation ends at the first wrong character.

    Returns:
        One unit per prompt, and the memory of the last prompt's cache; None for the uncompressed model.
    """
    tokenizer: Any = loaded.tokenizer
    units, cache = [], None
    with case.caches(loaded) as new_cache:
        for prompt in prompts:

            def decided(tokens: list[int], expected: str = prompt.expected) -> bool:
                shown = tokenizer.decode(tokens).lstrip(_DECORATION)
                return len(shown) >= len(expected) or not expected.startswith(shown.rstrip("\ufffd"))

            limit = 2 * len(prompt.expected)
            tokens, cache = greedy(loaded, new_cache, prompt.pieces, limit, stop=end_tokens(loaded), done=decided)
            answer = tokenizer.decode(tokens)
            exact, prefix = score(answer, prompt.expected)
            units.append(
                NeedlePrompt(
                    **prompt.place,
                    prompt_tokens=sum(map(len, prompt.pieces)),
                    exact=exact,
                    prefix=prefix,
                    expected=prompt.expected,
                    answer=answer,
                )
            )
            advance(1)
    return units, cache.memory() if case.compressed and cache is not None else None
