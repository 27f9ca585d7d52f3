"""Verbatim recall: a passage that is to be quoted word for word after some hundred words of other text.

Text that reads well can still have lost its past; a passage that has to be quoted exactly shows it. The answer begins
with the passage's first words and is continued greedily through the real cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from kvcli.cache.memory import MemoryReport
from kvcli.errors import CorpusError
from kvcli.eval.case import Case
from kvcli.eval.greedy import end_tokens, greedy
from kvcli.eval.prompts import Prompt, in_pieces
from kvcli.eval.records import RecallPrompt
from kvcli.models import LoadedModel

CUE_WORDS = 8
"""Words of the passage that the answer is given to begin with."""

_TOKENS_PER_WORD = 6
_QUESTION = "Quote the passage at the beginning of this text word for word."


@dataclass(frozen=True)
class RecallConfig:
    """What is to be quoted.

    Attributes:
        distances: words of other text between passage and question.
        passage_words: words to be quoted, after those that the answer is given to begin with.
        num_prompts: passages per distance.
        chat: whether prompts are put into the chat template.
        seed: of the passages.
    """

    distances: Sequence[int] = (100, 300, 600)
    passage_words: int = 40
    num_prompts: int = 8
    chat: bool = True
    seed: int = 0


def make_prompts(loaded: LoadedModel, texts: Sequence[str], config: RecallConfig) -> list[Prompt]:
    """The prompts of all distances; a passage and the text after it are of different documents.

    Raises:
        CorpusError: no document that is long enough, or too few words in the others.
    """
    words, length = [text.split() for text in texts], CUE_WORDS + config.passage_words
    sources = [document for document in words if len(document) >= length]
    if not sources:
        raise CorpusError(f"no document of the corpus has the {length} words of a passage; choose another --corpus")
    most = sum(map(len, words)) - max(map(len, sources))
    if most < max(config.distances):
        raise CorpusError(
            f"the corpus has {most} words beside its longest document, fewer than the distance of "
            f"{max(config.distances)}; choose a larger --corpus or shorter --distances"
        )
    made = []
    for distance in config.distances:
        for index in range(config.num_prompts):
            chosen = random.Random(f"{config.seed} {distance} {index}")
            source = chosen.choice(sources)
            others = [document for document in words if document is not source]
            chosen.shuffle(others)
            other = list(chain.from_iterable(others))
            start, begin = (chosen.randint(0, len(x) - n) for x, n in ((source, length), (other, distance)))
            passage, filler = source[start : start + length], other[begin : begin + distance]
            text = f"Passage: {' '.join(passage)}\n\nOther text: {' '.join(filler)}"
            pieces = in_pieces(loaded, text, _QUESTION, "Passage: " + " ".join(passage[:CUE_WORDS]), config.chat)
            made.append(Prompt(pieces, " ".join(passage[CUE_WORDS:]), {"distance": distance, "prompt": index}))
    return made


def quoted_words(answer: str, expected: str) -> int:
    """How many words of a passage an answer quotes before its first wrong word."""
    pairs = zip(answer.split(), expected.split(), strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(answer.split()), len(expected.split())))


def measure(
    loaded: LoadedModel, case: Case, prompts: Sequence[Prompt], advance: Callable[[int], None] = lambda prompts: None
) -> tuple[list[RecallPrompt], MemoryReport | None]:
    """Lets every passage be quoted; generation ends after the first wrong word.

    Returns:
        One unit per prompt, and the memory of the last prompt's cache; None for the uncompressed model.
    """
    tokenizer: Any = loaded.tokenizer
    units, cache = [], None
    with case.caches(loaded) as new_cache:
        for prompt in prompts:
            words = len(prompt.expected.split())

            def decided(tokens: list[int], expected: str = prompt.expected, words: int = words) -> bool:
                shown = tokenizer.decode(tokens)
                whole = shown.split()[:-1]  # the last word may go on
                return len(whole) >= words or quoted_words(" ".join(whole), expected) < len(whole)

            limit = _TOKENS_PER_WORD * (words + 1)
            tokens, cache = greedy(loaded, new_cache, prompt.pieces, limit, stop=end_tokens(loaded), done=decided)
            answer = tokenizer.decode(tokens)
            quoted = quoted_words(answer, prompt.expected)
            units.append(
                RecallPrompt(
                    **prompt.place,
                    prompt_tokens=sum(map(len, prompt.pieces)),
                    words=words,
                    quoted=quoted,
                    exact=float(quoted == words),
                    expected=prompt.expected,
                    answer=answer,
                )
            )
            advance(1)
    return units, cache.memory() if case.compressed and cache is not None else None
