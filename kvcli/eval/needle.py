"""Suite `needle`: a UUID hidden at some depth of a text of some length, asked for after the text.

The answer is generated greedily through the real cache; the text is read in one forward pass, the question in a second
one, which sees the text as the cache has stored it.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from kvcli.commands.suite import Records
from kvcli.commands.tables import DataTable
from kvcli.eval.records import STAR, Figure, PromptUnit, agreed, difference, mean, values_of
from kvcli.eval.suite import Case, ComparedOptions, CorpusOptions, EvalSuite, Prepared
from kvcli.progress import Reporter
from kvcli.registry import UNFITTED_METHOD

if TYPE_CHECKING:
    from kvcli.eval.greedy import Prompt
    from kvcli.models.load import LoadedModel

PLACES = ("lighthouse", "harbour", "museum", "library", "station", "bakery", "theatre", "airport", "castle", "farm")
_MAX_NEW_TOKENS = 2 * len(str(uuid.UUID(int=0)))
_DECORATION = " \n\t`*\"'"
"""What may stand before a value in an answer."""


class NeedleOptions(CorpusOptions, ComparedOptions):
    """Options of `kvcli eval needle`."""

    contexts: list[Annotated[int, Field(ge=16, le=2**24)]] = Field(
        [512, 1024], description="lengths of the text in tokens, without question and template; repeatable"
    )
    depths: list[Annotated[float, Field(ge=0, le=100)]] = Field(
        [0, 50, 100], description="places of the value, in percent of the text; repeatable"
    )
    num_prompts: int = Field(2, ge=1, description="prompts per cell")
    chat: bool | None = Field(None, description="use the chat template; default: if there is one")


class NeedlePrompt(PromptUnit):
    """One value hidden in one text."""

    figures = Figure("exact", "exact", "higher"), Figure("prefix", "prefix", "higher")

    context: int
    depth: float
    exact: float
    prefix: float


def make_needle_prompts(loaded: LoadedModel, texts: Sequence[str], options: NeedleOptions, chat: bool) -> list[Prompt]:
    """The prompts of all cells, the same for the same seed; CorpusError if the texts are too short for a context."""
    from kvcli.eval.greedy import Prompt, in_pieces, sentences

    prompts = []
    for context in options.contexts:
        for index in range(options.num_prompts):
            chosen = random.Random(f"{options.seed} {context} {index}")
            text = sentences(loaded, texts, context, chosen.getrandbits(32))
            starts = [0, *accumulate(count for _, count in text)]
            for depth in options.depths:
                place, value = chosen.choice(PLACES), str(uuid.UUID(int=chosen.getrandbits(128), version=4))
                at = min(range(len(text)), key=lambda i: abs(starts[i] - depth / 100 * starts[-2]))
                fact = f"The access code of the {place} is"
                parts = [sentence for sentence, _ in text[:-1]]
                parts.insert(at, f"{fact} {value}.")
                pieces = in_pieces(loaded, " ".join(parts), f"What is the access code of the {place}?", fact, chat)
                prompts.append(Prompt(pieces, value, {"context": context, "depth": depth, "prompt": index}))
    return prompts


def score(answer: str, expected: str) -> dict[str, float]:
    """Whether an answer begins with the value, and the share of the value's characters before the first wrong one."""
    prefix = agreed(answer.lstrip(_DECORATION), expected)
    return {"exact": prefix == len(expected), "prefix": prefix / len(expected)}


def decided(answer: str, expected: str) -> bool:
    """Whether an answer has all of the value, or a wrong character."""
    shown = answer.lstrip(_DECORATION)
    return len(shown) >= len(expected) or not expected.startswith(shown.rstrip("\ufffd"))


def prepare(options: NeedleOptions, loaded: LoadedModel, cases: Sequence[Case], reporter: Reporter) -> Prepared:
    """Rows of the uncompressed model and of methods."""
    from kvcli.eval.greedy import answered, uses_chat

    prompts = make_needle_prompts(loaded, options.documents(reporter), options, uses_chat(loaded, options.chat))
    return answered(loaded, cases, reporter, prompts, _MAX_NEW_TOKENS, decided, NeedlePrompt, score)


def table(records: Records, options: NeedleOptions) -> DataTable:
    """Values that were answered, by length of the text."""
    contexts, depths = values_of(records, "context"), values_of(records, "depth")
    rows = []
    for record in records:
        for depth in (*depths, None):
            units = [unit for unit in record["units"] if depth in (None, unit["depth"])]
            rows.append(
                {
                    "method": record["label"],
                    "depth %": "all" if depth is None else f"{depth:g}",
                    **{f"{x} tokens": _exact([unit for unit in units if unit["context"] == x]) for x in contexts},
                    "all": _exact(units),
                    "characters": f"{mean(units, 'prefix'):.2f}",
                    "difference": difference(record, "exact", "{:+.2f}") if depth is None else "",
                }
            )
    title = (
        f"{records[0]['model']}: values found of those hidden; characters: share before the first wrong one; "
        f"difference of the share found; {STAR}"
    )
    return DataTable.of(title, rows, ("characters", "difference"))


def _exact(units: Sequence[dict[str, Any]]) -> str:
    return f"{sum(unit['exact'] for unit in units):.0f} of {len(units)}"


SUITE = EvalSuite(
    name="needle",
    help="A value hidden in a long text, asked for after it.",
    options=NeedleOptions,
    example=f"kvcli eval needle --method {UNFITTED_METHOD} --contexts 512",
    saves_memory="lower --contexts",
    unit=NeedlePrompt,
    prepare=prepare,
    tabulate=table,
    chart="needles",
    with_reference=True,
)
