"""Incremental detokenization: the text of new tokens as it reads after those before them."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

_CONTEXT = 6
"""Tokens of a prompt that new tokens are decoded with."""
_UNFINISHED = "\ufffd"
"""What decoders put in the place of bytes that are no character, or none yet."""


class Detokenizer:
    """Text of tokens as they come.

    A decoder may drop the space before the first word of what it is given, or need several tokens for one character:
    each token is decoded together with some before it, of which the last few of `prompt` are the first, and a character
    is held back until its last byte is there.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._ids = [*prompt[-_CONTEXT:]]
        self._num_read = len(self._ids)

    def add(self, tokens: Sequence[int]) -> str:
        """The text that new tokens finish."""
        return "".join(map(self._step, tokens))

    def end(self, tokens: Sequence[int] = ()) -> str:
        """The text of the last tokens and what was held back, whose last character may not be finished."""
        self._ids += tokens
        return self._take() if self._num_read < len(self._ids) else ""

    def _step(self, token: int) -> str:
        self._ids.append(token)
        text = self._unread()
        return "" if not text or text.endswith(_UNFINISHED) else self._take()

    def _take(self) -> str:
        text = self._unread()
        del self._ids[: self._num_read]
        self._num_read = len(self._ids)
        return text

    def _unread(self) -> str:
        """Text of the tokens that were not handed out yet."""
        before, text = self._decode(self._ids[: self._num_read]), self._decode(self._ids)
        for start in (before, before.rstrip(_UNFINISHED)):  # a prompt may end within a character
            if text.startswith(start):
                return text[len(start) :]
        return self._decode(self._ids[self._num_read :])  # bytes that are no character undo characters before them

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=self._skip))


def text_after(tokenizer: Any, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """The text of tokens, special ones among them, as it reads after a prompt's."""
    return Detokenizer(tokenizer, prompt, skip_special_tokens=False).end(tokens)


@lru_cache(2**16)
def token_text(tokenizer: Any, token: int) -> tuple[str, bytes | None]:
    """The text of a token as it reads within a text, and its bytes, also those of a part of a character, if known."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    text, piece = str(tokenizer.decode([token])), str(tokenizer.convert_ids_to_tokens(token))
    if _UNFINISHED not in text:
        text = text_after(tokenizer, [token], [token])
        return text, text.encode()
    byte_of = {x: byte for byte, x in bytes_to_unicode().items()} | {f"<0x{byte:02X}>": byte for byte in range(256)}
    parts = [piece] if piece in byte_of else [*piece]
    return text, bytes(byte_of[x] for x in parts) if byte_of.keys() >= {*parts} else None
