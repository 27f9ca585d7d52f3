"""A conversation as text and as tokens, to which messages are added without tokenizing again what was said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from kvcli.errors import UsageError
from kvcli.models import LoadedModel
from kvcli.prompts import Message, chat_text, checked_messages, ids_of_text

_MESSAGES, _TEXT, _PENDING = "messages", "text", "pending"


@dataclass(frozen=True)
class Rendered:
    """Messages, the text that a chat template makes of them, and its tokens.

    A reply's tokens are those that the model made, whatever a tokenizer would make of the reply's text.

    Attributes:
        messages: of the conversation.
        text: what the tokens stand for.
        ids: int64 [1, time].
    """

    messages: tuple[Message, ...]
    text: str
    ids: Tensor

    @classmethod
    def of(cls, loaded: LoadedModel, messages: Sequence[Message], to_reply: bool) -> Self:
        """Renders messages; the arguments are those of `prompts.chat_text`."""
        text = chat_text(loaded, messages, to_reply)
        return cls(tuple(messages), text, ids_of_text(loaded, text))

    def followed_by(self, loaded: LoadedModel, message: Message) -> Rendered:
        """The conversation with one more message and the beginning of a reply.

        Where the template renders what was before as it did then, its tokens stay.
        """
        messages = (*self.messages, message)
        text = chat_text(loaded, messages)
        if not self.text or not text.startswith(self.text):
            return Rendered(messages, text, ids_of_text(loaded, text))
        new = ids_of_text(loaded, text[len(self.text) :])
        return Rendered(messages, text, torch.cat((self.ids.to(new.device), new), dim=1))

    def replied(self, reply: str, ids: Tensor) -> Rendered:
        """The conversation with the model's reply.

        Args:
            reply: its text.
            ids: all tokens, int64 [1, time], without the one that ends the reply.
        """
        return Rendered((*self.messages, {"role": "assistant", "content": reply}), self.text + reply, ids)

    def notes(self, num_cached: int) -> dict[str, Any]:
        """The conversation as plain JSON values, without the first `num_cached` of its tokens."""
        return {
            _MESSAGES: [dict(message) for message in self.messages],
            _TEXT: self.text,
            _PENDING: self.ids[0, num_cached:].tolist(),
        }

    @classmethod
    def from_notes(cls, notes: Mapping[str, Any], cached: Tensor, name: str) -> Self:
        """A conversation from the values of `notes`.

        Args:
            notes: of a context.
            cached: the tokens that it holds, int64 [1, time].
            name: of the context, for messages.

        Raises:
            UsageError: the context holds no conversation.
        """
        if _MESSAGES not in notes:
            raise UsageError(f"{name} holds a text and no conversation")
        messages = checked_messages(notes[_MESSAGES], name)
        text, pending = notes.get(_TEXT), notes.get(_PENDING)
        if not isinstance(text, str) or not isinstance(pending, list) or any(type(x) is not int for x in pending):
            raise UsageError(f"{name} holds no conversation that this kvcli reads")
        return cls(tuple(messages), text, torch.cat((cached, torch.tensor([pending], dtype=torch.int64)), dim=1))
