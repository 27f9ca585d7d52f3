"""What a stored context is bound to: what its cache depends on, and what its token ids mean."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from kvcli.attention.session import Session
from kvcli.cache.context import Context
from kvcli.cache.identity import CacheIdentity
from kvcli.fingerprint import text_identity

UNREADABLE = (ValueError, TypeError, KeyError, OverflowError, AttributeError, RuntimeError)
"""What reading an identity raises on values that nobody's kvcli wrote."""


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

    def difference(self, stored: Mapping[str, Any], notes: Mapping[str, Any]) -> str | None:
        """Why a stored context is of no use here.

        Args:
            stored: what its cache depends on, as `CacheIdentity.to_dict` gave it.
            notes: of the context, with `tokenizer` and `chat_template` if they are known.

        Returns:
            A clause that goes on from "it was made"; None if it is of use.
        """
        if stored != self._plain:
            try:
                reason = self.cache.difference(CacheIdentity.from_dict(stored))
            except UNREADABLE as error:
                return f"with something that this kvcli does not know: {' '.join(str(error).split())}"
            if reason is not None:
                return reason
        for name in ("tokenizer", "chat_template"):
            if _differ(getattr(self, name), notes.get(name)):
                return f"with another {name.replace('_', ' ')}"
        return None

    @cached_property
    def _plain(self) -> dict[str, Any]:
        plain: dict[str, Any] = json.loads(json.dumps(self.cache.to_dict()))
        return plain

    @classmethod
    def of(cls, context: Context) -> Self:
        """The identity of a context in memory, what its token ids mean as far as its notes say it."""
        return cls(context.identity, context.notes.get("tokenizer"), context.notes.get("chat_template"))


def identity_of(session: Session, tokenizer: Any) -> ContextIdentity:
    """What contexts of a session are bound to.

    Args:
        session: that the model is attached by.
        tokenizer: of transformers.
    """
    return ContextIdentity(session.identity(), **text_identity(tokenizer))


def _differ(first: Any, second: Any) -> bool:
    """Whether both are known and not the same."""
    return first is not None and second is not None and first != second
