"""Suite `compose`: a value in one of several documents that were read alone and stand side by side, or are read anew.

In task `needle` one document hides a number, in `multikey` every one does, each of another place. KL is that of the
question and the right answer to the uncompressed model that reads all in one pass; times are those to the logits of the
answer's first token.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import product
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field

from kvcli.commands.sizes import number
from kvcli.commands.suite import Records
from kvcli.commands.tables import DataTable
from kvcli.eval.needle import PLACES
from kvcli.eval.records import EvalRecord, Figure, PromptUnit, interval, mean
from kvcli.eval.suite import Case, CorpusOptions, EvalSuite, Measured, Prepared
from kvcli.progress import Reporter
from kvcli.registry import DEFAULT_METHOD
from kvcli.storage.ranks import joined_ranks

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.attention.session import Session
    from kvcli.cache.context import Context
    from kvcli.models.load import LoadedModel

_PLACES = (*PLACES, "bridge", "garden", "hotel", "market", "mill", "palace")
_MAX_NEW_TOKENS = 10
_ANEW = "anew"


class ComposeOptions(CorpusOptions):
    """Options of `kvcli eval compose`."""

    num_documents: list[Annotated[int, Field(ge=2, le=len(_PLACES))]] = Field([4], description="documents; repeatable")
    tasks: list[Literal["needle", "multikey"]] = Field(["needle", "multikey"], description="tasks; repeatable")
    document_tokens: int = Field(256, ge=32, description="tokens of each document")
    repair: list[Annotated[float, Field(ge=0, le=1)]] = Field(
        [0, 0.05, 0.1, 0.2], description="shares of the later documents' tokens that are read again; repeatable"
    )
    num_prompts: int = Field(4, ge=1, description="prompts per task and number of documents")


class ComposePrompt(PromptUnit):
    """One question about documents."""

    figures = Figure("found", "found", "higher"), Figure("kl", "kl", "lower")

    task: str
    documents: int
    found: float
    kl: float
    first_token_s: float


class ComposeRecord(EvalRecord):
    """A row; `repair` is the share that was read again, None where all was read anew."""

    repair: float | None


class Asked(NamedTuple):
    """Token ids [1, time] of documents, each from `start` on, of a question and of the right answer, `expected`."""

    documents: list[Tensor]
    start: int
    question: Tensor
    answer: Tensor
    expected: str
    task: str
    number: int


def make_prompts(loaded: LoadedModel, texts: Sequence[str], options: ComposeOptions) -> list[Asked]:
    """Questions about each number of documents, the same for the same seed; CorpusError: too short texts."""
    from kvcli.eval.greedy import sentences
    from kvcli.text.document import BLANK_LINE, around
    from kvcli.text.prompts import ids_of_text

    before, made = around(loaded, "?")[0], []
    start = ids_of_text(loaded, before).shape[1] if before else 0
    for task, count, index in product(options.tasks, options.num_documents, range(options.num_prompts)):
        chosen, documents = Random(f"{options.seed} {task} {count} {index}"), []
        values = {place: str(chosen.randrange(10**5, 10**6)) for place in chosen.sample(_PLACES, count)}
        asked = chosen.choice([*values])
        for place, value in values.items():
            found = sentences(loaded, texts, options.document_tokens, chosen.getrandbits(32))
            text, at = [sentence for sentence, _ in found], chosen.randrange(len(found))
            if task == "multikey" or place == asked:
                text.insert(at, f"The access code of the {place} is {value}.")
            documents.append(ids_of_text(loaded, before + " ".join(text) + BLANK_LINE))
        question = around(loaded, f"What is the access code of the {asked}?")[1] + f"The access code of the {asked} is"
        ids = ids_of_text(loaded, question, follows=True), ids_of_text(loaded, f" {values[asked]}", follows=True)
        made.append(Asked(documents, start, *ids, values[asked], task, index))
    return made


def prepare(options: ComposeOptions, loaded: LoadedModel, cases: Sequence[Case], reporter: Reporter) -> Prepared:
    """Rows of the uncompressed model, and of each method by what was read again."""
    import torch

    ranks, references = joined_ranks(), dict[int, torch.Tensor]()
    prompts = make_prompts(loaded, options.documents(reporter), options)
    mine = range(ranks.rank, len(prompts), ranks.count)

    def row(case: Case, session: Session | None, contexts: dict[int, list[Context]], share: float | None) -> Measured:
        label = f"{case.label}, {_ANEW if share is None else f'{100 * share:g} % again'}"
        with reporter.progress(label, len(prompts), "prompts") as advance, torch.inference_mode():

            def run(i: int) -> tuple[ComposePrompt, Any]:
                before = [] if share is None else contexts[i]
                unit, scores, cache = _measured(loaded, session, prompts[i], before, share, references.get(i))
                references.setdefault(i, scores)
                advance(ranks.count)
                return unit, cache.memory() if session else None

            units, memories = zip(*ranks.each(range(len(prompts)), run), strict=True)
        return Measured(case, units, memories[-1], {"repair": share}, label)

    def rows() -> Iterator[Measured]:
        for case in cases:
            with case.attached(loaded, reporter) as session:
                contexts = {i: _contexts(loaded.model, session, prompts[i]) for i in mine} if session else {}
                for share in (None, *options.repair) if session else (None,):
                    yield row(case, session, contexts, share)

    return Prepared({"prompts": [x.expected for x in prompts], "tokens": options.document_tokens}, rows())


def _contexts(model: Any, session: Session, asked: Asked) -> list[Context]:
    """Each document, read alone."""
    import torch

    from kvcli.cache.record import START
    from kvcli.eval.greedy import read

    contexts = []
    with torch.inference_mode():
        for ids in asked.documents:
            cache = session.new_cache()
            read(model, cache, ids[0].tolist())
            session.flush(cache)
            contexts.append(cache.context(ids, {START: asked.start}))
    return contexts


def _measured(
    loaded: LoadedModel,
    session: Session | None,
    asked: Asked,
    contexts: list[Context],
    share: float | None,
    reference: Tensor | None,
) -> tuple[ComposePrompt, Tensor, Any]:
    """What was measured, log-probabilities [time, vocab_size] of question and answer, and the cache."""
    import torch
    from transformers import DynamicCache

    from kvcli.eval.greedy import read
    from kvcli.seam.decoder import logits_of
    from kvcli.text.detokenizer import text_after

    model: Any = loaded.model
    question, answer = asked.question[0].tolist(), asked.answer[0].tolist()
    started = time.perf_counter()
    if session is not None and share is not None:
        cache: Any = session.compose(contexts, repair=share).cache
    else:
        cache = DynamicCache() if session is None else session.new_cache()
        first, *others = asked.documents
        read(model, cache, torch.cat([first, *(x[:, asked.start :] for x in others)], 1)[0].tolist())
    tokens = cache.get_seq_length() + len(question)
    states = read(model, cache, question)
    logits = logits_of(model, states[:, -1:])[:, -1]
    token, seconds = int(logits.argmax(-1)), time.perf_counter() - started  # the number is waited for
    forced = torch.cat((states, read(model, deepcopy(cache), answer)), 1)
    scores = logits_of(model, forced)[0].float().log_softmax(-1)
    expected = scores if reference is None else reference
    kl = float((expected.double().exp() * (expected.double() - scores.double())).sum(-1).mean())
    made, ends = list[int](), loaded.end_tokens
    while len(made) < _MAX_NEW_TOKENS and token not in ends:
        made.append(token)
        token = int(logits_of(model, read(model, cache, [token])[:, -1:])[:, -1].argmax(-1))
    text = text_after(loaded.tokenizer, question, made)
    said = {"prompt": asked.number, "prompt_tokens": tokens, "expected": asked.expected, "answer": text}
    figures = {"found": float(asked.expected in text), "kl": max(0.0, kl), "first_token_s": seconds}
    return ComposePrompt(**said, task=asked.task, documents=len(asked.documents), **figures), scores, cache


def table(records: Records, options: ComposeOptions) -> DataTable:
    """Values found, KL and time, by what was read again."""
    rows, anew = [], 0.0
    for record in records:
        seconds = median(unit["first_token_s"] for unit in record["units"])
        anew = seconds if record["repair"] is None else anew
        cells: dict[str, list[Any]] = {}
        for unit in record["units"]:
            cells.setdefault(f"{unit['task']}, {unit['documents']}", []).append(unit)
        rows.append(
            {
                "method": record["label"],
                **{name: f"{100 * mean(units, 'found'):.0f} %" for name, units in cells.items()},
                "KL mean": number(mean(record["units"], "kl")),
                "95 % interval": interval(record, "kl", "{:.4f}"),
                "first token, anew = 1": f"{seconds / anew:.2f}" if anew else "",
            }
        )
    title = (
        f"{records[0]['model']}: values found, by task and number of documents of {options.document_tokens} tokens, "
        f"side by side or read anew; {options.num_prompts} prompts each"
    )
    return DataTable.of(title, rows, ("95 % interval",))


SUITE = EvalSuite(
    name="compose",
    help="Values in documents that were read alone and stand side by side.",
    options=ComposeOptions,
    example=f"kvcli eval compose --method {DEFAULT_METHOD} --num-documents 2",
    saves_memory="lower --document-tokens",
    unit=ComposePrompt,
    record=ComposeRecord,
    prepare=prepare,
    tabulate=table,
    with_reference=True,
    rows_per_method=True,
)
