"""Prompts in two pieces: a text, which becomes codes, and a question about it, which reads them.

The question is a forward pass of its own. If it were part of the first pass, its tokens would attend to the text in
full precision, and the first token of the answer would not depend on the codes at all.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from kvcli.errors import CorpusError, ModelError, UsageError
from kvcli.models import LoadedModel

_BOUNDARY = "\n\n"


class Sentence(NamedTuple):
    """A sentence of the corpus and its length in tokens."""

    text: str
    tokens: int


class Prompt(NamedTuple):
    """A question about a text.

    Attributes:
        pieces: token ids of the text and of the question, each with its part of the chat template.
        expected: the right answer.
        place: fields of the unit that say where in a grid the prompt stands.
    """

    pieces: tuple[list[int], list[int]]
    expected: str
    place: dict[str, Any]


def uses_chat(loaded: LoadedModel, chat: bool | None) -> bool:
    """Whether prompts are put into the tokenizer's chat template: as asked for, else if there is one.

    Raises:
        UsageError: asked for, but there is none.
    """
    has_template = bool(getattr(loaded.tokenizer, "chat_template", None))
    if chat and not has_template:
        raise UsageError(f"{loaded.name} has no chat template; omit --chat")
    return has_template if chat is None else chat


def in_pieces(loaded: LoadedModel, text: str, question: str, answer: str, chat: bool) -> tuple[list[int], list[int]]:
    """Token ids of a text, and of a question about it with the beginning of its answer.

    Args:
        loaded: the model, with its tokenizer.
        text: what the question is about.
        question: the question.
        answer: how the answer begins; generation continues it.
        chat: whether to put it into the chat template, as a message and the beginning of the reply.

    Raises:
        ModelError: a chat template that fails or that changes the message.
    """
    tokenizer: Any = loaded.tokenizer
    first, second = text + _BOUNDARY, f"{question}{_BOUNDARY}"
    if chat:
        message = [{"role": "user", "content": first + question}]
        try:
            whole = str(tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False))
        except Exception as error:  # a template is a program of the model's author
            raise ModelError(f"the chat template of {loaded.name} fails: {' '.join(str(error).split())}") from error
        at = whole.find(question)
        if at < 0 or whole.find(question, at + 1) >= 0:
            raise ModelError(f"the chat template of {loaded.name} changes the message; use --no-chat")
        first, second = whole[:at], whole[at:]
    ids = tokenizer(first, add_special_tokens=not chat)["input_ids"]
    return ids, tokenizer(second + answer, add_special_tokens=False)["input_ids"]


def sentences(loaded: LoadedModel, texts: Iterable[str], tokens: int, seed: int) -> list[Sentence]:
    """Sentences of documents, in order, until they have at least a number of tokens.

    Args:
        loaded: the model, with its tokenizer.
        texts: documents.
        tokens: how many are needed.
        seed: of the document to begin with.

    Raises:
        CorpusError: the documents have fewer tokens; they are not repeated.
    """
    tokenizer: Any = loaded.tokenizer
    documents = list(texts)
    if documents:
        start = random.Random(seed).randrange(len(documents))
        documents = documents[start:] + documents[:start]
    found, total = [], 0
    for sentence in _split(documents):
        count = len(tokenizer(" " + sentence, add_special_tokens=False)["input_ids"])
        found.append(Sentence(sentence, count))
        total += count
        if total >= tokens:
            return found
    raise CorpusError(f"the corpus has {total} tokens, fewer than the {tokens} of a prompt; choose a larger --corpus")


def _split(documents: Iterable[str]) -> Iterator[str]:
    for document in documents:
        yield from (sentence for sentence in re.split(r"(?<=[.!?])\s+", " ".join(document.split())) if sentence)
