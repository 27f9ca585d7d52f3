"""Token ids of prompts, and conversations as text and tokens. This module does not know what is done with them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, Self

import torch
from torch import Tensor

from kvcli.calibrate.corpus import bare_ids, beginning
from kvcli.errors import ModelError, UsageError, error_text
from kvcli.models.load import LoadedModel, rendered
from kvcli.progress import Say, say_nothing

Message = Mapping[str, Any]
"""One message of a conversation: `role` and `content`."""


def prompt_ids(loaded: LoadedModel, prompt: str, chat: bool, say: Say = say_nothing) -> Tensor:
    """Token ids [1, time] of a prompt; with `chat`, of a conversation whose only message it is.

    An empty prompt becomes the beginning-of-text token, which `say` is told. UsageError: the tokenizer has none, or the
    prompt is not UTF-8; ModelError: a chat template that fails, or token ids that the model has no embedding for.
    """
    if not prompt:
        say("the prompt is empty: the model starts from its first token alone")
    if chat:
        return ids_of_text(loaded, chat_text(loaded, [{"role": "user", "content": prompt}]))
    tokenizer: Any = loaded.tokenizer
    begins = [x for x in (tokenizer.bos_token_id, tokenizer.eos_token_id) if x is not None][:1]
    if not (ids := ids_to_continue(tokenizer, prompt) or begins):
        raise UsageError("the prompt is empty, and the tokenizer has no beginning-of-text token to start from")
    return _as_tensor(loaded, ids)


def ids_to_continue(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text with its beginning, but without the end that some tokenizers put after every text."""
    return [*beginning(tokenizer), *bare_ids(tokenizer, _utf8(text))]


def ids_of_text(loaded: LoadedModel, text: str, follows: bool = False) -> Tensor:
    """Token ids [1, time] of a text without a token that begins it; `follows` as of `bare_ids`.

    UsageError: a text without a token, or that is not UTF-8; ModelError: token ids that the model has no embedding for.
    """
    ids = bare_ids(loaded.tokenizer, _utf8(text), follows)
    if not ids:
        raise UsageError("the prompt is empty; a context is gone on from with one token or more")
    return _as_tensor(loaded, ids)


def _utf8(text: str) -> str:
    if re.search(r"[\ud800-\udfff]", text):
        raise UsageError("the text is not UTF-8: it has half of a character")
    return text


def _as_tensor(loaded: LoadedModel, ids: list[int]) -> Tensor:
    if max(ids) >= loaded.spec.vocab_size:
        raise ModelError(
            f"the tokenizer makes token {max(ids)}, but {loaded.name} has {loaded.spec.vocab_size} embeddings; "
            "use the tokenizer and the weights of one model"
        )
    return torch.tensor([ids], device=loaded.model.device)


def chat_text(
    loaded: LoadedModel,
    messages: Sequence[Message],
    to_reply: bool = True,
    tools: Any = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """A conversation as the tokenizer's chat template renders it; with `to_reply`, a reply's beginning follows.

    `tools` are JSON schemas of functions that the model may call; `variables` are of the template's own.

    UsageError: a tokenizer without a chat template, or a variable that is an argument of transformers; ModelError: a
    chat template that fails.
    """
    tokenizer: Any = loaded.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError(f"{loaded.name} has no chat template: it continues texts, as 'kvcli generate' lets it")
    if taken := {"messages", "self", *signature(tokenizer.apply_chat_template).parameters} & {*(variables or ())}:
        raise UsageError(f"'{min(taken)}' is no variable of a chat template")
    try:
        options = {"add_generation_prompt": to_reply, "tools": tools}
        return rendered(tokenizer, messages, **options, **(variables or {}))
    except Exception as error:  # a template is a program of the model's author, run by jinja in its sandbox
        raise ModelError(f"the chat template of {loaded.name} fails: {error_text(error)}") from error


def checked_messages(values: Any, what: str) -> list[dict[str, str]]:
    """A conversation from plain values, a list of objects with `role` and `content`, both texts.

    UsageError: they are something else, or none; the message begins with `what`, where they are from.
    """
    if not isinstance(values, list) or not values:
        raise UsageError(f"{what}: messages are a JSON list of objects with role and content, one or more")
    for i, message in enumerate(values):
        texts = [message.get(name) for name in ("role", "content")] if isinstance(message, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise UsageError(f"{what}: message {i} is no object with the texts role and content")
    return [{"role": message["role"], "content": message["content"]} for message in values]


def common_length(first: Tensor, second: Tensor) -> int:
    """Tokens at the beginning of two prompts [1, time] that are the same."""
    count = min(first.shape[1], second.shape[1])
    differs = (first[0, :count].cpu() != second[0, :count].cpu()).nonzero()
    return int(differs[0]) if len(differs) else count


@dataclass(frozen=True)
class Rendered:
    """Messages, the text that a chat template makes of them, and its tokens.

    Messages are added without tokenizing again what was said. A reply's tokens are those that the model made, whatever
    a tokenizer would make of the reply's text. The `text` is what the tokens `ids`, int64 [1, time], stand for.
    """

    messages: tuple[Message, ...]
    text: str
    ids: Tensor

    def followed_by(self, loaded: LoadedModel, message: Message) -> Self:
        """The conversation with one more message and the beginning of a reply.

        Where the template renders what was before as it did then, its tokens stay.
        """
        messages = (*self.messages, message)
        text = chat_text(loaded, messages)
        if not self.text or not text.startswith(self.text):
            return replace(self, messages=messages, text=text, ids=ids_of_text(loaded, text))
        new = ids_of_text(loaded, text[len(self.text) :], follows=True)
        return replace(self, messages=messages, text=text, ids=torch.cat((self.ids.to(new.device), new), dim=1))

    def replied(self, reply: str, ids: Tensor) -> Self:
        """The conversation with the model's reply; `ids` are all tokens [1, time] but the one that ends the reply."""
        messages = (*self.messages, {"role": "assistant", "content": reply})
        return replace(self, messages=messages, text=self.text + reply, ids=ids)

    def notes(self, num_cached: int) -> dict[str, Any]:
        """The conversation as plain JSON values, without the first `num_cached` of its tokens."""
        messages, pending = [dict(message) for message in self.messages], self.ids[0, num_cached:].tolist()
        return {"messages": messages, "text": self.text, "pending": pending}

    @classmethod
    def from_notes(cls, notes: Mapping[str, Any], cached: Tensor, name: str) -> Self:
        """A conversation from the `notes` of the context `name`, which has the tokens `cached`, int64 [1, time].

        UsageError: the context holds no conversation.
        """
        if "messages" not in notes:
            raise UsageError(
                f"{name} holds a text and no conversation: 'kvcli ask FILE QUESTION' asks a chat model about a text, "
                "'kvcli generate --context' without --chat continues it"
            )
        messages = checked_messages(notes["messages"], name)
        text, pending = notes.get("text"), notes.get("pending")
        if not isinstance(text, str) or not isinstance(pending, list) or any(type(x) is not int for x in pending):
            raise UsageError(f"{name} holds no conversation that this kvcli reads")
        return cls(tuple(messages), text, torch.cat((cached, torch.tensor([pending], dtype=torch.int64)), dim=1))
