"""What a stored context is bound to: what its cache depends on, and what its token ids mean."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from kvcli.attention.session import Session
from kvcli.cache.context import Context
from kvcli.cache.identity import CacheIdentity

_TEXT = ("tokenizer", "chat_template")
"""Fields that say what token ids mean."""


@dataclass(frozen=True)
class ContextIdentity:
    """What a context is bound to.

    Attributes:
        cache: model, RoPE, dtype, method, settings and artifact.
        tokenizer: sha256 of the vocabulary; None where it is not known, which is equal to any.
        chat_template: sha256 of the chat template, or empty without one; None where it is not known.
    """

    cache: CacheIdentity
    tokenizer: str | None
    chat_template: str | None

    @property
    def text(self) -> dict[str, str | None]:
        """What token ids mean, as plain JSON values."""
        return {"tokenizer": self.tokenizer, "chat_template": self.chat_template}

    def difference(self, stored: Mapping[str, Any]) -> str | None:
        """Why a stored context is of no use here.

        Args:
            stored: its identity, as `to_dict` gave it.

        Returns:
            A clause that goes on from "it was made"; None if it is of use.
        """
        if stored == self.to_dict():
            return None
        try:
            theirs = self.from_dict(stored)
            if reason := self.cache.difference(theirs.cache):
                return reason
        except (ValueError, TypeError, KeyError) as error:
            return f"with something that this kvcli does not know: {' '.join(str(error).split())}"
        if _differ(self.tokenizer, theirs.tokenizer):
            return "with another tokenizer"
        return "with another chat template" if _differ(self.chat_template, theirs.chat_template) else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**self.cache.to_dict(), **self.text}

    @classmethod
    def of(cls, context: Context) -> Self:
        """The identity of a context in memory, what its token ids mean as far as its notes say it."""
        text = {name: context.notes.get(name) for name in _TEXT}
        return cls(context.identity, **{name: x if isinstance(x, str) else None for name, x in text.items()})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """From what `to_dict` gave, also if it went through JSON.

        Raises:
            ValueError: values of other names or types; an unknown method or setting.
        """
        cache = CacheIdentity.from_dict({name: value for name, value in values.items() if name not in _TEXT})
        return cls(cache, *(values[name] for name in _TEXT))


def identity_of(session: Session, tokenizer: Any) -> ContextIdentity:
    """What contexts of a session are bound to.

    Args:
        session: that the model is attached by.
        tokenizer: of transformers.
    """
    return ContextIdentity(session.identity(), **text_identity(tokenizer))


def text_identity(tokenizer: Any) -> dict[str, str | None]:
    """Checksums of a tokenizer's vocabulary, which says what token ids mean, and of its chat template.

    Args:
        tokenizer: of transformers.

    Returns:
        `tokenizer` and `chat_template`, for the notes of a context that is saved to a file.
    """
    vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
    words = "\n".join(f"{i} {word}" for word, i in sorted(vocabulary.items(), key=lambda pair: pair[1]))
    template = getattr(tokenizer, "chat_template", None)
    return {"tokenizer": _sha256(words), "chat_template": _sha256(str(template)) if template else ""}


def _differ(first: str | None, second: str | None) -> bool:
    """Whether both are known and not the same."""
    return first is not None and second is not None and first != second


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
