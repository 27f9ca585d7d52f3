"""The contexts of a server on disk: found and read by the thread that makes tokens, written by one of its own."""

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvcli.attention.session import Session
from kvcli.cache.context import Context
from kvcli.cache.identity import CacheIdentity
from kvcli.cache.snapshot import Snapshot
from kvcli.contexts import ContextStore, Match, identity_of
from kvcli.errors import CacheError, ContextError
from kvcli.models.fingerprint import text_identity
from kvcli.progress import Say

_MOST_WRITES = 3
"""Contexts that are copied and on their way to the disk, at most; later ones are not stored."""


class ServedContexts:
    """A store of contexts, or none.

    Args:
        tokenizer: part of what a context depends on.
        max_bytes: size that the store may have.
        say: gets a line about a context that could not be stored or read.
        stored: called when a context was written, or with False where it could not be.
    """

    def __init__(
        self,
        store: ContextStore | None,
        tokenizer: object,
        max_bytes: int | None,
        say: Say,
        stored: Callable[[bool], None] = lambda written: None,
    ) -> None:
        self.store, self._tokenizer, self._max_bytes, self._say, self._stored = store, tokenizer, max_bytes, say, stored
        self._notes = text_identity(tokenizer) | {"source": "kvcli serve"}
        self._writer, self._writes = ThreadPoolExecutor(1, "kvcli-store"), list[Future[None]]()

    @property
    def nbytes(self) -> int:
        """Bytes of the contexts; 0 without a store, or where it cannot be read."""
        with suppress(ContextError, OSError):
            return self.store.sizes()[0] if self.store is not None else 0
        return 0

    def listed(self, identities: Sequence[CacheIdentity]) -> list[dict[str, Any]]:
        """What is of use to one of these, of the 100 contexts that were used last."""
        with suppress(ContextError, OSError):
            found = self.store.contexts(limit=100) if self.store is not None else []
            found = [x for x in found if None in [x.difference(identity) for identity in identities]]
            rows = [(x.name, x.record.num_tokens, x.record.nbytes, x.used) for x in found]
            return [dict(zip(("name", "tokens", "bytes", "last_used"), row, strict=True)) for row in rows]
        return []

    @property
    def is_busy(self) -> bool:
        """Whether `put` would do nothing: there is no store, or the disk is behind."""
        self._writes = [write for write in self._writes if not write.done()]
        return self.store is None or len(self._writes) >= _MOST_WRITES

    def identity(self, session: Session, reading: str, owner: str, length: int) -> CacheIdentity:
        """What a context of so many tokens depends on: how it was read, and whose it is, among it."""
        digest = hashlib.sha256(owner.encode()).hexdigest()[:32] if owner else ""
        reading += f"{digest and ' for '}{digest}"
        # the tokens say all that a chat template does
        return replace(identity_of(session, self._tokenizer, length), chat_template=None, reading=reading)

    def load(
        self, ids: Tensor, identity: CacheIdentity, fit: Callable[[int, int], int], more_than: int, device: torch.device
    ) -> tuple[Match, Context] | None:
        """A context, verified, of more than so many of these tokens, as `ContextStore.fetch`; None if it cannot be."""
        if self.store is None or ids.shape[1] <= more_than:
            return None
        try:
            return self.store.fetch(ids, identity, device, self._say, fit=fit, more_than=more_than)
        except (ContextError, CacheError, OSError) as error:
            self._say(str(error) if isinstance(error, ContextError) else f"the store cannot be read: {error}")
        return None

    @staticmethod
    def name(identity: CacheIdentity, ids: Tensor) -> str:
        """That of the context of these tokens."""
        return hashlib.sha256(repr(identity).encode() + ids.numpy().tobytes()).hexdigest()[:12]

    def put(self, snapshot: Snapshot, identity: CacheIdentity, ids: Tensor, failed: Callable[[], Any]) -> None:
        """Writes a context of token ids [1, time] later; `failed` is called if it cannot."""
        store, context, name = self.store, Context(snapshot, identity, ids, self._notes), self.name(identity, ids)

        def write() -> None:
            try:
                assert store is not None
                store.put(context, name=name, max_bytes=self._max_bytes, overwrite=True)
            except Exception as error:
                failed()
                self._say(f"a context of {ids.shape[1]} tokens was not stored: {error}")
                self._stored(False)
            else:
                self._stored(True)

        self._writes.append(self._writer.submit(write))

    def touch(self, name: str, gone: Callable[[], Any]) -> None:
        """Notes later that a context was used from memory; `gone` is called if it was removed from the disk."""
        store = self.store
        if store is not None:
            self._writer.submit(lambda: store.touch(name) or gone())

    def close(self) -> None:
        """Waits until what was put is on disk."""
        self._writer.shutdown()
