"""Suite `ruler`: the eleven synthetic tasks of RULER (arXiv 2404.06654), at lengths that are asked for.

Needles are to be retrieved, variables traced, words counted. Prompts are made here from the paper's definitions, in
other words and with text of the corpus for its essays, so that scores are not those of its tables. The score is the
paper's: the share of the right answers that the reply contains, in any case of letters. The other two of the thirteen
tasks are questions of data sets.
"""

from __future__ import annotations

import math
import re
import string
import uuid
from bisect import bisect
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from random import Random
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from kvcli.commands.suite import Records
from kvcli.commands.tables import DataTable
from kvcli.errors import CorpusError, UsageError, suggestion
from kvcli.eval.records import STAR, Figure, PromptUnit, by_field, difference, interval, mean, values_of
from kvcli.eval.suite import Case, ComparedOptions, CorpusOptions, EvalSuite, Prepared
from kvcli.progress import Reporter
from kvcli.registry import UNFITTED_METHOD

if TYPE_CHECKING:
    from kvcli.eval.greedy import Prompt
    from kvcli.models.load import LoadedModel

_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_FEWEST_WORDS = 1000


Corpus = tuple[list[str], list[str]]
"""Sentences in order, and different words in any order."""

Made = tuple[str, str, str, list[str]]
"""Text, question, beginning of the answer, and right answers, all of which are to follow it."""


def _distinct(count: int, draw: Callable[[], str]) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw()] = None
    return list(found)


def _hidden(lines: Sequence[str], among: Sequence[str], chosen: Random) -> str:
    """Lines at random places among others, in their order."""
    parts, places = list(among), sorted(chosen.random() for _ in lines)
    for line, place in zip(reversed(lines), reversed(places), strict=True):
        parts.insert(round(place * len(among)), line)
    return " ".join(parts)


def needles(
    corpus: Corpus, chosen: Random, size: int, hay: str = "text", uuids: bool = False, counts: Sequence[int] = (1, 1, 1)
) -> Made:
    """Numbers or UUIDs under keys, among `size` sentences of text, repeated noise or other needles with such keys.

    `counts` are those of keys, of values of each, and of keys that are asked for.
    """
    (text, words), (num_keys, num_values, num_asked) = corpus, counts

    def value() -> str:
        bits = chosen.getrandbits(128)
        return str(uuid.UUID(int=bits, version=4) if uuids else 10**6 + bits % (9 * 10**6))

    def key() -> str:
        return value() if uuids and hay == "needles" else "-".join(chosen.choices(words, k=2))

    among = {"noise": [_NOISE] * size, "text": text[:size], "needles": []}[hay]
    keys = _distinct(num_keys + size * (hay == "needles"), key)
    values = {x: [value() for _ in range(num_values)] for x in keys}
    kind, asked = "UUID" if uuids else "number", keys[:num_asked]
    lines = [f"One of the magic {kind}s of {x} is: {y}." for x in keys for y in values[x]]
    chosen.shuffle(lines)
    of = f"magic {kind}s of {', '.join(asked)}"
    question, expected = f"What are all the {of} in the text?", [y for x in asked for y in values[x]]
    return _hidden(lines, among, chosen), question, f"The {of} are:", expected


def variables(corpus: Corpus, chosen: Random, size: int) -> Made:
    """A value that five variables get, each but the first from the one before, among `size` times noise."""
    value = str(chosen.randrange(10**4, 10**5))
    names = _distinct(5, lambda: "".join(chosen.choices(string.ascii_uppercase, k=5)))
    lines = [f"VAR {x} = {y}." for x, y in zip(names, [value, *(f"VAR {x}" for x in names[:-1])], strict=True)]
    question = f"Which variables have the value {value}, from the text or from another variable?"
    answer = f"The five variables that have the value {value} are:"
    return _hidden(lines, [_NOISE] * size, chosen), question, answer, names


def common_words(corpus: Corpus, chosen: Random, size: int) -> Made:
    """A numbered list of ten words, 30 times each, and `size` words, three times each."""
    words = corpus[1]
    listed = words[:10] * 30 + words[10 : 10 + size] * 3
    chosen.shuffle(listed)
    numbered = " ".join(f"{place}. {word}" for place, word in enumerate(listed, 1))
    return numbered, "Which ten words are the most common ones in the list?", "The ten words are:", words[:10]


def frequent_words(corpus: Corpus, chosen: Random, size: int) -> Made:
    """Coded words as frequent as a zeta distribution with exponent 2 says; the most frequent one is three dots."""
    most = 6 / math.pi**2 * (80 + 4 * size)  # from 80 on, the fourth word is more frequent than the fifth
    counts = [int(most / rank**2) for rank in range(1, 1 + math.isqrt(int(most)))]
    words = ["...", *_distinct(len(counts) - 1, lambda: "".join(chosen.choices(string.ascii_lowercase, k=6)))]
    coded = [word for word, count in zip(words, counts, strict=True) for _ in range(count)]
    chosen.shuffle(coded)
    question = "Leave out the dots. Which three words are the most frequent ones in the coded text?"
    return "Coded text: " + " ".join(coded), question, "The three words are:", words[1:4]


TASKS: dict[str, tuple[Callable[[Corpus, Random, int], Made], int]] = {
    "niah_single_1": (partial(needles, hay="noise"), 128),
    "niah_single_2": (needles, 128),
    "niah_single_3": (partial(needles, uuids=True), 128),
    "niah_multikey_1": (partial(needles, counts=(4, 1, 1)), 128),
    "niah_multikey_2": (partial(needles, hay="needles"), 128),
    "niah_multikey_3": (partial(needles, hay="needles", uuids=True), 128),
    "niah_multivalue": (partial(needles, counts=(1, 4, 1)), 128),
    "niah_multiquery": (partial(needles, counts=(4, 1, 4)), 128),
    "vt": (variables, 64),
    "cwe": (common_words, 120),
    "fwe": (frequent_words, 50),
}
"""RULER's names to what makes a prompt of a size, and the tokens of its answer."""


class RulerOptions(CorpusOptions, ComparedOptions):
    """Options of `kvcli eval ruler`."""

    tasks: list[str] = Field([*TASKS], description="tasks; repeatable")
    contexts: list[Annotated[int, Field(ge=256, le=2**24)]] = Field(
        [4096], description="most tokens of a prompt with its answer; repeatable"
    )
    num_prompts: int = Field(4, ge=1, description="prompts per task and context")
    chat: bool | None = Field(None, description="use the chat template; default: if there is one")

    def check(self) -> None:
        super().check()
        for task in self.tasks:
            if task not in TASKS:
                raise UsageError(f"--tasks takes {', '.join(TASKS)}, not '{task}'{suggestion(task, TASKS)}")


class RulerPrompt(PromptUnit):
    """One prompt of one task."""

    figures = (Figure("found", "found", "higher"),)

    task: str
    context: int
    found: float


def longest(make: Callable[[int], Made], pieces: Callable[[Made], Sequence[list[int]]], most: int, task: str) -> Made:
    """The prompt of the largest size whose pieces have at most so many tokens.

    CorpusError: a corpus that is used up before; UsageError: all prompts have more.
    """

    def length(size: int) -> int:
        return sum(map(len, pieces(make(size))))

    size = 1
    while length(size) <= most:
        if make(2 * size) == make(size):
            raise CorpusError(f"the corpus is too small for {most} tokens of {task}; choose a larger --corpus")
        size *= 2
    size = bisect(range(size), most, key=length) - 1
    if size < 1:
        raise UsageError(f"{most} tokens are too few for a prompt of {task}; choose longer --contexts")
    return make(size)


def make_ruler_prompts(loaded: LoadedModel, texts: Sequence[str], options: RulerOptions, chat: bool) -> list[Prompt]:
    """The prompts of all tasks and contexts, the same for the same seed; CorpusError and UsageError as `longest`."""
    from kvcli.eval.greedy import Prompt, in_pieces, sentences

    words = sorted(set(re.findall(r"\b[^\W\d_]{4,10}\b", " ".join(texts).lower())))
    if len(words) < _FEWEST_WORDS:
        raise CorpusError(f"the corpus has {len(words)} different words of 4 to 10 letters; choose a larger --corpus")

    def pieces(made: Made) -> tuple[list[int], list[int]]:
        return in_pieces(loaded, *made[:3], chat)

    def prompt(task: str, context: int, index: int) -> Prompt:
        (make, answer_tokens), seed = TASKS[task], f"{options.seed} {task} {context} {index}"
        chosen = Random(seed)
        text = [sentence for sentence, _ in sentences(loaded, texts, context, chosen.getrandbits(32))]
        corpus = text, chosen.sample(words, len(words))
        made = longest(lambda size: make(corpus, Random(seed), size), pieces, context - answer_tokens, task)
        return Prompt(pieces(made), ", ".join(made[3]), {"task": task, "context": context, "prompt": index})

    return [prompt(*x) for x in product(options.tasks, options.contexts, range(options.num_prompts))]


def share_found(answer: str, expected: str) -> float:
    """The share of right answers, between commas, that a text contains, in any case of letters."""
    right = expected.lower().split(", ")
    return sum(value in answer.lower() for value in right) / len(right)


def prepare(options: RulerOptions, loaded: LoadedModel, cases: Sequence[Case], reporter: Reporter) -> Prepared:
    """Rows of the uncompressed model and of methods."""
    from kvcli.eval.greedy import answered, uses_chat

    prompts = make_ruler_prompts(loaded, options.documents(reporter), options, uses_chat(loaded, options.chat))
    limits = [TASKS[prompt.place["task"]][1] for prompt in prompts]

    def score(answer: str, expected: str) -> dict[str, float]:
        return {"found": share_found(answer, expected)}

    return answered(loaded, cases, reporter, prompts, limits, lambda *x: share_found(*x) == 1, RulerPrompt, score)


def table(records: Records, options: RulerOptions) -> DataTable:
    """Answers found, by task and length."""
    tasks, contexts = values_of(records, "task"), values_of(records, "context")
    rows = []
    for record, task, units in by_field(records, "task"):
        by_context = {x: [unit for unit in units if unit["context"] == x] for x in contexts}
        rows.append(
            {
                "method": record["label"],
                "task": task or (tasks[0] if len(tasks) == 1 else "all"),
                **{f"{x} tokens": f"{100 * mean(some, 'found'):.1f}" for x, some in by_context.items()},
                "95 % interval": "" if task else interval(record, "found", "{:.1f}", 100),
                "difference": "" if task else difference(record, "found", "{:+.1f}", 100),
            }
        )
    title = f"{records[0]['model']}: percent of RULER's answers found, {options.num_prompts} prompts per cell; {STAR}"
    return DataTable.of(title, rows, ("95 % interval",), text_columns=2)


SUITE = EvalSuite(
    name="ruler",
    help="Needles, variables and words in long text: RULER's synthetic tasks.",
    options=RulerOptions,
    example=f"kvcli eval ruler --method {UNFITTED_METHOD} --contexts 2048 --tasks niah_multikey_1",
    saves_memory="lower --contexts",
    unit=RulerPrompt,
    prepare=prepare,
    tabulate=table,
    chart="by_task",
    with_reference=True,
)
