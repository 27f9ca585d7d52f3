"""A folder of contexts: index.sqlite (`kvcli.contexts.index`), and blocks/BLAKE3.safetensors, their parts.

Files that the index does not name are not the store's: they are neither read, listed nor removed. A block gets its row
before its file and loses it after its file, so whatever a kill leaves is in the index.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from kvcli.cache.blocks import Tensors, encode, is_plain, verify_blocks
from kvcli.cache.context import INPUT_IDS, Context
from kvcli.cache.identity import CacheIdentity
from kvcli.cache.record import BLOCK_TOKENS, Block, ContextRecord
from kvcli.contexts.index import UNUSED, check_name, no_context
from kvcli.contexts.reader import DIGEST, SUFFIX, ContextReader, as_tokens, check_index, used_bytes
from kvcli.contexts.search import index_rows
from kvcli.errors import CacheError, ContextError
from kvcli.models.fingerprint import text_identity
from kvcli.storage.atomic import replacing, temporary_path

if TYPE_CHECKING:
    from kvcli.attention.session import Session


class Stored(NamedTuple):
    """A context that was put: bytes of its blocks that were written and that were there; names of removed contexts."""

    name: str
    record: ContextRecord
    new_bytes: int
    shared_bytes: int
    evicted: tuple[str, ...]


class Pruned(NamedTuple):
    """Names of the contexts that were removed, the least recently used first, and the bytes of all files removed."""

    evicted: tuple[str, ...]
    freed_bytes: int


class ContextStore(ContextReader):
    """The contexts of a folder, made by the first `put`, in blocks of `block_tokens` tokens or the next whole groups.

    Tokens that two contexts have in common are found and stored once block by block.
    """

    def __init__(self, folder: str | Path, block_tokens: int = BLOCK_TOKENS) -> None:
        super().__init__(folder)
        self.block_tokens = block_tokens

    def check_writable(self) -> None:
        """Makes the folder and its index; raises OSError or ContextError if nothing can be stored there."""
        self._blocks.mkdir(parents=True, exist_ok=True)
        with self._index.writing():
            pass

    def put(
        self, context: Context, *, name: str | None = None, overwrite: bool = False, max_bytes: int | None = None
    ) -> Stored:
        """Stores a context; only what is not there is written, and the context appears when all of it is.

        Args:
            context: of one row, with its token ids and the notes of `models.fingerprint.text_identity`, which `find`
                compares; the note `source` says what it was made from.
            name: default: from a checksum of tokens and identity.
            overwrite: replace a context of this name that has other tokens or another identity, or is damaged.
            max_bytes: of all blocks; the least recently used contexts are removed to keep it.

        UsageError: no name of a context; CacheError: token ids of more or fewer tokens; ContextError: padding or
        several rows, no token ids, a name that is taken, a read-only store, or more than `max_bytes`; nothing was
        written then.
        """
        if context.input_ids is None:
            raise ContextError("a context without its token ids cannot be found again; it can be used as a file only")
        tokens = as_tokens(context.input_ids)
        if not is_plain(context.snapshot):
            raise ContextError("a context has no padding, and its positions are 0, 1, 2 and so on")
        record, blocks = context.encode(self.block_tokens)
        if max_bytes is not None and record.nbytes > max_bytes:
            raise ContextError(f"the context has {record.nbytes} bytes, more than the {max_bytes} of the whole store")
        seed = json.dumps(record.identity, sort_keys=True).encode() + tokens.numpy().tobytes()
        name = hashlib.sha256(seed).hexdigest()[:12] if name is None else name
        if overwrite:
            check_name(name)
        else:
            self.check_free(name, tokens, CacheIdentity.from_dict(record.identity))
        self._blocks.mkdir(parents=True, exist_ok=True)
        rows, query = [(block.digest, block.bytes) for block in blocks], "SELECT 1 FROM blocks WHERE digest = ?"
        while True:
            with self._index.writing() as db:
                db.executemany("INSERT OR REPLACE INTO blocks VALUES (?, ?)", rows)
            with self._index.writing() as db:
                if not all(db.execute(query, (digest,)).fetchone() for digest, _ in rows):
                    continue  # another process removed what nobody needed in between
                replaces = db.execute("SELECT 1 FROM contexts WHERE name = ?", (name,)).fetchone() is not None
                if replaces and not overwrite:  # by another process, since it was checked
                    self.check_free(name, tokens, CacheIdentity.from_dict(record.identity))
                new_bytes = sum(self._write(block, part) for block, part in blocks.items())
                db.execute("DELETE FROM contexts WHERE name = ?", (name,))
                _insert(db, name, record, tokens)
                break
        evicted = self.prune(max_bytes, keep=(name,)).evicted if replaces or max_bytes is not None else ()
        return Stored(name, record, new_bytes, record.nbytes - new_bytes, evicted)

    def check_free(self, name: str, token_ids: Sequence[int] | Tensor, identity: CacheIdentity) -> None:
        """Checks that there is no context of this name, or that it has these token ids, one row, and this identity.

        UsageError: no name of a context; ContextError: another context has the name, or a damaged one.
        """
        check_name(name)
        if name not in self.names():
            return
        stored, (block, _) = self.get(name), encode({INPUT_IDS: as_tokens(token_ids)[None]})
        if stored.record.tokens != block or stored.difference(identity) is not None:
            raise ContextError(
                f"there is a context '{name}' of other tokens or another model already; choose another name, or "
                "replace it with --overwrite"
            )

    def remove(self, *contexts: str) -> int:
        """Removes contexts, also damaged ones, and their blocks that no other context needs; returns the bytes freed.

        UsageError: no name of a context; ContextError: no such context. Nothing was removed then.
        """
        for name in contexts:
            check_name(name)
            if name not in self.names():
                raise no_context(self.folder, name)
        with self._index.writing() as db:
            db.executemany("DELETE FROM contexts WHERE name = ?", [(name,) for name in contexts])
        return self._collect()

    def prune(self, max_bytes: int | None = None, keep: Collection[str] = ()) -> Pruned:
        """Removes contexts, the least recently used first, until all blocks have `max_bytes`, and blocks nobody needs.

        ContextError: a read-only store, or other processes wrote to the store all the time.
        """
        evicted: list[str] = []
        if not self.names() and not self._index.path.exists():
            return Pruned((), 0)
        if max_bytes is not None:
            with self._index.writing() as db:
                left = used_bytes(db)
                for context, name in db.execute("SELECT id, name FROM contexts ORDER BY used, id").fetchall():
                    if left <= max_bytes:
                        break
                    if name not in keep:
                        db.execute("DELETE FROM contexts WHERE id = ?", (context,))
                        left = used_bytes(db)
                        evicted.append(name)
        return Pruned(tuple(evicted), self._collect())

    def _collect(self) -> int:
        """Removes the blocks that no context needs, and what a kill left half written; returns the bytes."""
        freed = 0
        with self._index.writing() as db:
            unused = {digest for (digest,) in db.execute(f"SELECT digest {UNUSED}")}
            if unused:  # a damaged index is not believed where it says that nobody needs a block
                check_index(db)
                for (record,) in db.execute("SELECT record FROM records"):
                    unused -= {*DIGEST.findall(record)}
            paths = [self._path(digest) for digest in sorted(unused)]
            for half in self._blocks.glob(f"*{SUFFIX}.tmp"):
                digest = half.name.removesuffix(f"{SUFFIX}.tmp")
                if db.execute("SELECT 1 FROM blocks WHERE digest = ?", (digest,)).fetchone():
                    paths.append(half)
            for path in paths:
                if path.is_file():
                    freed += path.stat().st_size
                    path.unlink()
            db.executemany("DELETE FROM blocks WHERE digest = ?", [(digest,) for digest in unused])
        return freed

    def _write(self, block: Block, part: Tensors) -> int:
        """Writes a block unless it is there; returns the bytes written. The caller alone writes to the store."""
        place = self._place(block)
        try:
            verify_blocks([place])
        except CacheError:
            temporary_path(place.path).unlink(missing_ok=True)  # of whatever kind it is
            with replacing(place.path) as temporary:
                temporary.write_bytes(encode(part)[1])
            return block.bytes
        return 0


def identity_of(session: Session, tokenizer: Any, length: int = 1) -> CacheIdentity:
    """The identity of contexts of a session, of texts of so many tokens, with that of a tokenizer of transformers."""
    text = text_identity(tokenizer)
    return replace(session.identity(length), tokenizer=text["tokenizer"], chat_template=text["chat_template"])


def _insert(db: sqlite3.Connection, name: str, record: ContextRecord, tokens: Tensor) -> None:
    """Adds a context, whose blocks are there, to the index."""
    now, (((kind, start, tail),), blocks, prefixes) = time.time(), index_rows(record, tokens.numpy())
    created = datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds")
    context = db.execute(
        "INSERT INTO contexts (name, created, used, identity, tail_start) VALUES (?, ?, ?, ?, ?)",
        (name, created, now, kind, start),
    ).lastrowid
    db.execute("INSERT INTO records VALUES (?, ?, ?)", (context, record.sealed(), tail))
    db.executemany("INSERT INTO context_blocks VALUES (?, ?)", [(*row, context) for row in blocks])
    db.executemany("INSERT INTO prefixes VALUES (?, ?, ?, ?)", [(*row, context) for row in prefixes])
