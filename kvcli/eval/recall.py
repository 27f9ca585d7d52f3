"""Suite `recall`: a passage that is to be quoted word for word after some hundred words of other text.

Text that reads well can still have lost its past; a passage that has to be quoted exactly shows it. The answer begins
with the passage's first words and is continued greedily through the real cache.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from kvcli.commands.suite import Records
from kvcli.commands.tables import DataTable
from kvcli.errors import CorpusError
from kvcli.eval.records import STAR, Figure, PromptUnit, agreed, by_field, difference, interval, mean, values_of
from kvcli.eval.suite import Case, ComparedOptions, CorpusOptions, EvalSuite, Prepared
from kvcli.progress import Reporter
from kvcli.registry import UNFITTED_METHOD

if TYPE_CHECKING:
    from kvcli.eval.greedy import Prompt
    from kvcli.models.load import LoadedModel

CUE_WORDS = 8
"""Words of the passage that the answer is given to begin with."""

_TOKENS_PER_WORD = 6
_QUESTION = "Quote the passage at the beginning of this text word for word."


class RecallOptions(CorpusOptions, ComparedOptions):
    """Options of `kvcli eval recall`."""

    distances: list[Annotated[int, Field(ge=1, le=2**24)]] = Field(
        [100, 300, 600], description="words of other text between passage and question; repeatable"
    )
    passage_words: int = Field(40, ge=1, le=1000, description="words to be quoted")
    num_prompts: int = Field(8, ge=1, description="passages per distance")
    chat: bool | None = Field(None, description="use the chat template; default: if there is one")


class RecallPrompt(PromptUnit):
    """One passage to be quoted after other text."""

    figures = Figure("exact", "exact", "higher"), Figure("quoted", "quoted", "higher")

    distance: int
    words: int
    quoted: int
    exact: float


def make_recall_prompts(loaded: LoadedModel, texts: Sequence[str], options: RecallOptions, chat: bool) -> list[Prompt]:
    """The prompts of all distances; a passage and the text after it are of different documents.

    CorpusError: no document that is long enough, or too few words in the others.
    """
    from kvcli.eval.greedy import Prompt, in_pieces

    words, length = [text.split() for text in texts], CUE_WORDS + options.passage_words
    sources = [document for document in words if len(document) >= length]
    if not sources:
        raise CorpusError(f"no document of the corpus has the {length} words of a passage; choose another --corpus")
    most = sum(map(len, words)) - max(map(len, sources))
    if most < max(options.distances):
        raise CorpusError(
            f"the corpus has {most} words beside its longest document, fewer than the distance of "
            f"{max(options.distances)}; choose a larger --corpus or shorter --distances"
        )
    prompts = []
    for distance in options.distances:
        for index in range(options.num_prompts):
            chosen = random.Random(f"{options.seed} {distance} {index}")
            source = chosen.choice(sources)
            others = [document for document in words if document is not source]
            chosen.shuffle(others)
            other = list(chain.from_iterable(others))
            start, begin = (chosen.randint(0, len(x) - n) for x, n in ((source, length), (other, distance)))
            passage, filler = source[start : start + length], other[begin : begin + distance]
            text = f"Passage: {' '.join(passage)}\n\nOther text: {' '.join(filler)}"
            pieces = in_pieces(loaded, text, _QUESTION, "Passage: " + " ".join(passage[:CUE_WORDS]), chat)
            prompts.append(Prompt(pieces, " ".join(passage[CUE_WORDS:]), {"distance": distance, "prompt": index}))
    return prompts


def quoted_words(answer: str, expected: str) -> int:
    """How many words of a passage an answer quotes before its first wrong word."""
    return agreed(answer.split(), expected.split())


def decided(answer: str, expected: str) -> bool:
    """Whether an answer has all words of the passage, or a wrong one."""
    complete = answer.split()[:-1]  # the last word may go on
    return len(complete) >= len(expected.split()) or quoted_words(" ".join(complete), expected) < len(complete)


def score(answer: str, expected: str) -> dict[str, int]:
    """The words of a passage, how many were quoted, and whether all were."""
    words, quoted = len(expected.split()), quoted_words(answer, expected)
    return {"words": words, "quoted": quoted, "exact": quoted == words}


def prepare(options: RecallOptions, loaded: LoadedModel, cases: Sequence[Case], reporter: Reporter) -> Prepared:
    """Rows of the uncompressed model and of methods."""
    from kvcli.eval.greedy import answered, uses_chat

    prompts = make_recall_prompts(loaded, options.documents(reporter), options, uses_chat(loaded, options.chat))
    limit = _TOKENS_PER_WORD * (options.passage_words + 1)
    return answered(loaded, cases, reporter, prompts, limit, decided, RecallPrompt, score)


def table(records: Records, options: RecallOptions) -> DataTable:
    """Words quoted, by distance."""
    distances = values_of(records, "distance")
    rows = [
        {
            "method": record["label"],
            "words between": f"{distances[0] if len(distances) == 1 else distance or 'all'}",
            "words quoted": f"{mean(units, 'quoted'):.1f}",
            "95 % interval": "" if distance else interval(record, "quoted", "{:.1f}"),
            "difference": "" if distance else difference(record, "quoted", "{:+.1f}"),
            "whole passages": f"{sum(unit['exact'] for unit in units):.0f} of {len(units)}",
        }
        for record, distance, units in by_field(records, "distance")
    ]
    words = records[0]["units"][0]["words"]
    title = f"{records[0]['model']}: words of {words} quoted before the first wrong one; {STAR}"
    return DataTable.of(title, rows, ("95 % interval",))


SUITE = EvalSuite(
    name="recall",
    help="A passage quoted word for word after other text.",
    options=RecallOptions,
    example=f"kvcli eval recall --method {UNFITTED_METHOD} --distances 100",
    saves_memory="lower --distances",
    unit=RecallPrompt,
    prepare=prepare,
    tabulate=table,
    chart="quotations",
    with_reference=True,
)
