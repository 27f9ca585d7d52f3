"""How many tokens texts have, where no model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvcli.cli.output import Output
from kvcli.cli.prompt_sources import Source, parse_messages

if TYPE_CHECKING:
    from kvcli.prompts import Message

_CHARACTERS = 4
"""Of a token, where the tokenizer is not here."""


class TokenCounter:
    """Counts by a model's tokenizer where it is on this machine, else a token for four characters.

    Args:
        model: its name, as commands take it.
        output: hears that the tokenizer is not here.
    """

    def __init__(self, model: str, output: Output) -> None:
        self.model, self.output = model, output

    @cached_property
    def _tokenizer(self) -> Any:
        from kvcli.models import find_tokenizer

        tokenizer = find_tokenizer(self.model)
        if tokenizer is None:
            self.output.say(
                f"the tokenizer of {self.model} is not here: a token is taken to have {_CHARACTERS} characters"
            )
        return tokenizer

    def prompt(self, text: str, *, chat: bool = False, begins: bool = True) -> int:
        """Tokens of a prompt.

        Args:
            text: the prompt.
            chat: whether it is a user's message.
            begins: whether nothing comes before it.

        Raises:
            KvcliError: a tokenizer that cannot be read, or without a chat template that is asked for.
        """
        return self._messages([{"role": "user", "content": text}], True) if chat else self._text(text, begins)

    def source(self, source: Source) -> int:
        """Tokens of a text or a conversation that is compressed.

        Raises:
            KvcliError: as `prompt`, or a conversation that is none.
        """
        if not source.is_conversation:
            return self._text(source.text)
        from kvcli.prompts import checked_messages

        return self._messages(checked_messages(parse_messages(source), source.name), False)

    def _messages(self, messages: Sequence[Message], to_reply: bool) -> int:
        if self._tokenizer is None:
            return self._text("".join(message["content"] for message in messages))
        from kvcli.prompts import template_text

        return self._text(template_text(self._tokenizer, self.model, messages, to_reply), begins=False)

    def _text(self, text: str, begins: bool = True) -> int:
        if self._tokenizer is None:
            return max(1, len(text) // _CHARACTERS)
        return max(1, len(self._tokenizer(text, add_special_tokens=begins)["input_ids"]))
