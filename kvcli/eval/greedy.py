"""Greedy generation over any cache, one sequence at a time; prompts in two pieces: a text and a question about it.

The text becomes codes, the question reads them in a forward pass of its own. In the same pass its tokens would attend
to the text in full precision, and the first token of the answer would not depend on the codes at all.
"""

import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from kvcli.attention.session import Session
from kvcli.cache.compressed import MemoryReport
from kvcli.calibrate.corpus import bare_ids
from kvcli.errors import CorpusError, ModelError, UsageError
from kvcli.eval.records import PromptUnit
from kvcli.eval.suite import Case, Measured, NewCache, Prepared
from kvcli.models.load import LoadedModel, not_finite
from kvcli.progress import Reporter
from kvcli.seam.decoder import backbone, logits_of
from kvcli.seam.versions import with_cache
from kvcli.storage.ranks import joined_ranks
from kvcli.text.detokenizer import text_after
from kvcli.text.prompts import Message, chat_text, ids_to_continue

_BOUNDARY = "\n\n"


class Prompt(NamedTuple):
    """A question about a text."""

    pieces: tuple[list[int], list[int]]  # token ids of text and question, each with its part of the chat template
    expected: str  # the right answer
    place: dict[str, Any]  # the fields of the unit that say where in a grid the prompt stands


def read(model: Any, cache: Any, ids: Sequence[int], chunk: int | None = None) -> Tensor:
    """Reads tokens, at least one, into a cache of a model, `chunk` (default all) per forward pass.

    Attention within a pass is in full precision. Returns the last hidden states, [1, time, hidden_size].
    """
    parts, base = torch.tensor([list(ids)], device=model.device).split(chunk or len(ids), dim=1), backbone(model)
    return torch.cat([base(input_ids=part, **with_cache(cache)).last_hidden_state for part in parts], dim=1)


def greedy(
    loaded: LoadedModel,
    new_cache: NewCache,
    pieces: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    chunk: int | None = None,
    stop: Iterable[int] = (),
    done: Callable[[list[int]], bool] = lambda tokens: False,
    session: Session | None = None,
) -> tuple[list[int], Any]:
    """The most probable tokens after a prompt, one by one, and the cache; ModelError: logits that are not finite.

    Args:
        loaded: the model, attached if the caches are compressed.
        pieces: of the prompt, each read in a pass of its own: it attends to what the cache holds of the earlier ones.
        chunk: tokens of a piece per forward pass; default all.
        stop: tokens that end the text; they are not returned.
        done: called with the tokens so far after each one; True ends the text.
        session: of the caches; on a GPU, it replays the passes of new tokens as CUDA graphs.
    """
    model: Any = loaded.model
    length = sum(map(len, pieces)) + max_new_tokens
    cache, stop = new_cache() if session is None else session.new_cache(length), set(stop)
    tokens: list[int] = []
    steps = None if session is None else session.chunks(cache, 1, max_new_tokens)
    with torch.inference_mode(), nullcontext() if steps is None else closing(steps):
        for piece in pieces:
            states = read(model, cache, piece, chunk)
        while True:
            logits = logits_of(model, states[:, -1:])[:, -1]
            if not logits.isfinite().all():
                ids = [*(x for piece in pieces for x in piece), *tokens]
                raise not_finite(model, "the cache of this row", partial(read, model, new_cache(), ids))
            token = int(logits.argmax(-1))
            if token in stop:
                break
            tokens.append(token)
            if len(tokens) >= max_new_tokens or done(tokens):
                break
            states = read(model, cache, [token]) if steps is None else steps(logits.argmax(-1, keepdim=True))
    return tokens, cache


def continuations(
    loaded: LoadedModel,
    case: Case,
    reporter: Reporter,
    prompts: Sequence[Sequence[Sequence[int]]],
    max_new_tokens: int,
    *,
    stop: Iterable[int] = (),
    done: Callable[[int, list[int]], bool] = lambda index, tokens: False,
) -> tuple[list[list[int]], MemoryReport | None]:
    """Continues prompts, each in pieces, as `greedy` does; `done` is called with the index of the prompt, too.

    Returns the new tokens of each prompt, and the memory of the last cache, None for the uncompressed model. Ranks
    share the prompts.
    """
    ranks = joined_ranks()
    with case.attached(loaded, reporter) as session, reporter.progress(case.label, len(prompts), "prompts") as advance:
        new_cache: NewCache = DynamicCache if session is None else session.new_cache
        go_on = partial(greedy, loaded, new_cache, stop=stop, session=session)

        def run(index: int) -> tuple[list[int], MemoryReport | None]:
            tokens, cache = go_on(prompts[index], max_new_tokens, done=partial(done, index))
            advance(ranks.count)
            return tokens, cache.memory() if case.compressed else None

        found = ranks.each(range(len(prompts)), run)
    return [tokens for tokens, _ in found], found[-1][1] if found else None


def answered(
    loaded: LoadedModel,
    cases: Sequence[Case],
    reporter: Reporter,
    prompts: Sequence[Prompt],
    max_new_tokens: int | Sequence[int],
    decided: Callable[[str, str], bool],
    unit: type[PromptUnit],
    score: Callable[[str, str], dict[str, Any]],
) -> Prepared:
    """Rows of cases that answer prompts greedily.

    An answer ends after `max_new_tokens`, of all prompts or of each, or where `decided` says of its text and the right
    answer that the rest does not matter; of both, `score` makes the fields of a unit that only the suite has.
    """
    tokenizer: Any = loaded.tokenizer
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
    pieces, stop = [prompt.pieces for prompt in prompts], loaded.end_tokens

    def text_of(index: int, tokens: list[int]) -> str:
        return text_after(tokenizer, pieces[index][-1], tokens)

    def done(index: int, tokens: list[int]) -> bool:
        return len(tokens) >= limits[index] or decided(text_of(index, tokens), prompts[index].expected)

    def unit_of(prompt: Prompt, answer: str) -> PromptUnit:
        fields = {"prompt_tokens": sum(map(len, prompt.pieces)), "expected": prompt.expected, "answer": answer}
        return unit(**prompt.place, **fields, **score(answer, prompt.expected))

    def rows() -> Iterator[Measured]:
        for case in cases:
            texts, memory = continuations(loaded, case, reporter, pieces, max(limits), stop=stop, done=done)
            yield Measured(case, list(map(unit_of, prompts, map(text_of, range(len(prompts)), texts))), memory)

    return Prepared({"prompts": prompts}, rows())


def uses_chat(loaded: LoadedModel, chat: bool | None) -> bool:
    """Whether prompts get a chat template: as `chat` says (UsageError if it has none), or if it has one."""
    has_template = bool(getattr(loaded.tokenizer, "chat_template", None))
    if chat and not has_template:
        raise UsageError(f"{loaded.name} has no chat template; omit --chat")
    return has_template if chat is None else chat


def in_pieces(loaded: LoadedModel, text: str, question: str, answer: str, chat: bool) -> tuple[list[int], list[int]]:
    """Token ids of a text, and of a question about it with the beginning of its answer, which generation continues.

    With `chat`, the chat template makes a message of text and question and begins the reply.
    """
    if chat:
        return chat_in_pieces(loaded, [{"role": "user", "content": f"{text}{_BOUNDARY}{question}"}], question, answer)
    asked = bare_ids(loaded.tokenizer, f"{question}{_BOUNDARY}{answer}", follows=True)
    return ids_to_continue(loaded.tokenizer, text + _BOUNDARY), asked


def chat_in_pieces(
    loaded: LoadedModel, messages: Sequence[Message], question: str, answer: str = "", tools: Any = None
) -> tuple[list[int], list[int]]:
    """Token ids of a conversation up to a question that stands in it once, and from there on, as `in_pieces`.

    `tools` are JSON schemas of functions that the model may call.

    ModelError: a chat template that fails or that changes the message.
    """
    before, found, after = chat_text(loaded, messages, tools=tools).partition(question)
    if not found or question in after:
        raise ModelError(f"the chat template of {loaded.name} changes the message; use --no-chat")
    return bare_ids(loaded.tokenizer, before), bare_ids(loaded.tokenizer, found + after + answer, follows=True)


def sentences(loaded: LoadedModel, texts: Iterable[str], tokens: int, seed: int) -> list[tuple[str, int]]:
    """Sentences of documents with their tokens, in order, from a document that `seed` chooses, until they are enough.

    CorpusError: the documents have fewer tokens; they are not repeated.
    """
    tokenizer: Any = loaded.tokenizer
    documents = list(texts)
    start = random.Random(seed).randrange(max(1, len(documents)))
    chosen, total = [], 0
    for document in documents[start:] + documents[:start]:
        for text in filter(None, re.split(r"(?<=[.!?])\s+", " ".join(document.split()))):
            count = len(tokenizer(" " + text, add_special_tokens=False)["input_ids"])
            chosen.append((text, count))
            total += count
            if total >= tokens:
                return chosen
    raise CorpusError(f"the corpus has {total} tokens, fewer than the {tokens} of a prompt; choose a larger --corpus")
