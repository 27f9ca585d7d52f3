"""A folder of contexts: found by the tokens that they begin with, equal parts stored once, within a size.

    index.sqlite                  which contexts and blocks there are, see `kvcli.contexts.index`
    blocks/BLAKE3.safetensors     parts of contexts, named by the BLAKE3 of their bytes

What the index does not name is not the store's: it is neither read, listed nor removed. A block gets its row before its
file and loses it after its file, so whatever a kill leaves is in the index.
"""

from __future__ import annotations

import hashlib
import json
import re
import sqlite3
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcli.attention.session import Session
from kvcli.cache.blocks import Block, Place, Tensors, encode, read_blocks, verify_blocks
from kvcli.cache.context import INPUT_IDS, Context, tokens_in
from kvcli.cache.identity import CacheIdentity
from kvcli.cache.parts import BLOCK_TOKENS, is_plain
from kvcli.cache.record import ContextRecord
from kvcli.contexts.index import UNUSED, Index, check_name, names
from kvcli.contexts.search import CONTEXTS, Match, StoredContext, index_rows, longest
from kvcli.errors import CacheError, ContextError, suggestion
from kvcli.fingerprint import text_identity
from kvcli.progress import Progress, Say, no_progress, say_nothing
from kvcli.storage.atomic import replacing, temporary_path

_SUFFIX = ".safetensors"
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)


class ReplacedError(ContextError):
    """A context that another process has removed or replaced since it was looked up."""


@dataclass(frozen=True)
class Stored:
    """What storing a context did.

    Attributes:
        name: of the context.
        record: of the context.
        new_bytes: of blocks that were written.
        shared_bytes: of blocks that were there.
        evicted: names of contexts that were removed to keep the store's size.
    """

    name: str
    record: ContextRecord
    new_bytes: int
    shared_bytes: int
    evicted: tuple[str, ...] = ()


class Pruned(NamedTuple):
    """Names of the contexts that were removed, the least recently used first, and the bytes of all files removed."""

    evicted: tuple[str, ...]
    freed_bytes: int


class ContextStore:
    """The contexts of a folder.

    Args:
        folder: made by the first `put`.
        block_tokens: tokens of a block of codes, rounded up to whole groups of the method; what two contexts have in
            common is found and stored once block by block.
    """

    def __init__(self, folder: str | Path, block_tokens: int = BLOCK_TOKENS) -> None:
        self.folder, self.block_tokens = Path(folder), block_tokens
        self._index, self._blocks = Index(self.folder), self.folder / "blocks"

    def check_writable(self) -> None:
        """Makes the folder and its index, and checks that something can be stored.

        Raises:
            OSError: the folder cannot be made.
            ContextError: a store that is read-only, or of another version of kvcli.
        """
        self._blocks.mkdir(parents=True, exist_ok=True)
        with self._index.writing():
            pass

    def names(self) -> list[str]:
        """Names of all contexts, also of damaged ones.

        Raises:
            ContextError: a store of another version of kvcli, or a damaged index.
        """
        return names(self.folder)

    def get(self, name: str) -> StoredContext:
        """One context, by name.

        Raises:
            UsageError: no name of a context.
            ContextError: no such context, or a damaged record.
        """
        check_name(name)
        with self._index.reading() as db:
            row = db.execute(f"{CONTEXTS} WHERE name = ?", (name,)).fetchone()
        if row is None:
            raise self.no_context(name)
        return StoredContext.of(row)

    def contexts(self, say: Say = say_nothing) -> list[StoredContext]:
        """All contexts whose records can be read, the most recently used first.

        Args:
            say: called with a line about every other one.
        """
        with self._index.reading() as db:
            rows = db.execute(f"{CONTEXTS} ORDER BY used DESC, id DESC").fetchall()
        contexts = []
        for row in rows:
            try:
                contexts.append(StoredContext.of(row))
            except ContextError as error:
                say(str(error))
        return contexts

    def find(self, token_ids: Sequence[int] | Tensor, identity: CacheIdentity, say: Say = say_nothing) -> Match | None:
        """The stored context that has most in common with the beginning of a prompt, compared token by token.

        Args:
            token_ids: of the prompt, one row. A cache needs a token that it does not hold to go on from: leave out the
                prompt's last.
            identity: of the model, the method, the artifact and the tokenizer; other contexts are passed over.
            say: called with a line about every damaged context that begins alike, which is passed over.

        Returns:
            None if no context is of use. One is if all of its tokens are the prompt's first, or so many of them that
            they end where a block ends or in its window; fewer than 16 are not, unless the prompt has no more. Of
            several with equally many tokens, the last used one.

        Raises:
            ContextError: token ids of several rows.
        """
        wanted, passed_over = _as_tokens(token_ids), set[int]()
        while True:
            with self._index.reading() as db:
                match = longest(db, wanted.numpy(), identity, passed_over, say)
            if match is None:
                return None
            name = match.context.name
            try:
                if torch.equal(self.token_ids(match.context)[: match.num_tokens], wanted[: match.num_tokens].long()):
                    return match
                say(f"context '{name}' is passed over: its tokens are not those that the index says")
            except ReplacedError:
                continue
            except ContextError as error:
                say(f"context '{name}' is passed over: {error}")
            passed_over.add(match.context.id)

    def fetch(
        self,
        token_ids: Sequence[int] | Tensor,
        identity: CacheIdentity,
        device: torch.device | str = "cpu",
        say: Say = say_nothing,
    ) -> tuple[Match, Context] | None:
        """`find` and `load`, again if another process removes or replaces the context in between.

        Raises:
            ContextError: token ids of several rows, or a damaged block of what was found.
        """
        while True:
            match = self.find(token_ids, identity, say)
            with suppress(ReplacedError):
                return None if match is None else (match, self.load(match, device))

    def whole(self, name: str, identity: CacheIdentity | None = None) -> Match:
        """All of a context, by name.

        Args:
            name: of the context.
            identity: of the model, the method and the artifact that are to go on from it; None: not compared.

        Raises:
            UsageError: no name of a context.
            ContextError: no such context, a damaged record, or another identity; the message says what differs.
        """
        context = self.get(name)
        if identity is not None and (reason := context.difference(identity)) is not None:
            raise ContextError(f"context '{name}' cannot be used here: it was made {reason}")
        return Match(context, context.record.num_tokens)

    def token_ids(self, context: StoredContext) -> Tensor:
        """All token ids of a context, int64 [tokens].

        Raises:
            ContextError: their block is missing or damaged, or the context was removed or replaced.
        """
        try:
            record = context.record
            (tensors,) = read_blocks([self._place(block) for block in (record.tokens,) if block is not None])
            return tokens_in(tensors, record)[0]
        except CacheError as error:
            raise self._explained(context, error) from error

    def load(self, match: Match, device: torch.device | str = "cpu") -> Context:
        """Reads what `find` or `whole` found, after a check of its blocks, and notes that the context was used.

        Args:
            match: what to read; of a part, only the blocks that hold it are read.
            device: of the tensors, to which the mapped files are copied.

        Returns:
            What `Session.load_cache` goes on from, with its token ids, int64 [1, tokens].

        Raises:
            ContextError: a block is missing, truncated or damaged, or the context was removed or replaced.
        """
        stored = match.context
        try:
            name = f"context '{stored.name}'"
            context = Context.decode(stored.record, self._place, device, name, match.num_tokens)
        except CacheError as error:
            raise self._explained(stored, error) from error
        self._index.touch(stored.id)
        return context

    def put(
        self, context: Context, *, name: str | None = None, overwrite: bool = False, max_bytes: int | None = None
    ) -> Stored:
        """Stores a context; only what is not there is written, and the context appears when all of it is.

        Args:
            context: of one row, with its token ids; of its notes, `tokenizer` and `chat_template` are compared by
                `find` (`kvcli.fingerprint.text_identity` gives them), and `source` says what it was made from.
            name: default: from a checksum of tokens and identity, so that the same context gets the same name.
            overwrite: replace a context of this name that has other tokens or another identity, or is damaged.
            max_bytes: of the blocks of the whole store; contexts that were not used for longest are removed to keep it.

        Raises:
            UsageError: no name of a context.
            CacheError: token ids of more or fewer tokens.
            ContextError: padding or several rows, a context without token ids, a name that is taken, a read-only store,
                or a context that alone is larger than `max_bytes`; nothing was written then.
        """
        if context.input_ids is None:
            raise ContextError("a context without its token ids cannot be found again; it can be used as a file only")
        tokens = _as_tokens(context.input_ids)
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
        missing, replaces, new_bytes = True, False, 0
        while missing:
            with self._index.writing() as db:
                rows = [(block.digest, block.bytes) for block in blocks]
                db.executemany("INSERT OR REPLACE INTO blocks VALUES (?, ?)", rows)
            with self._index.writing() as db:
                recorded = (db.execute("SELECT 1 FROM blocks WHERE digest = ?", (x.digest,)).fetchone() for x in blocks)
                missing = not all(recorded)
                if missing:  # another process removed what nobody needed in between
                    continue
                replaces = db.execute("SELECT 1 FROM contexts WHERE name = ?", (name,)).fetchone() is not None
                if replaces and not overwrite:  # by another process, since it was checked
                    self.check_free(name, tokens, CacheIdentity.from_dict(record.identity))
                new_bytes = sum(self._write(block, tensors) for block, tensors in blocks.items())
                db.execute("DELETE FROM contexts WHERE name = ?", (name,))
                _insert(db, name, record, tokens)
        evicted = self.prune(max_bytes, keep=(name,)).evicted if replaces or max_bytes is not None else ()
        return Stored(name, record, new_bytes, record.nbytes - new_bytes, evicted)

    def check_free(self, name: str, token_ids: Sequence[int] | Tensor, identity: CacheIdentity) -> None:
        """Checks that a context of this name is the same one, or that there is none.

        Args:
            name: of a context.
            token_ids: of the one that is to be stored, one row.
            identity: likewise.

        Raises:
            UsageError: no name of a context.
            ContextError: the name belongs to a context of other tokens or another identity, or to a damaged one.
        """
        check_name(name)
        if name not in self.names():
            return
        stored, (block, _) = self.get(name), encode({INPUT_IDS: _as_tokens(token_ids)[None]})
        if stored.record.tokens != block or stored.difference(identity) is not None:
            raise ContextError(
                f"there is a context '{name}' of other tokens or another model already; choose another name, or "
                "replace it with --overwrite"
            )

    def remove(self, *contexts: str) -> int:
        """Removes contexts, also damaged ones, and their blocks that no other context needs.

        Returns:
            The bytes that were freed.

        Raises:
            UsageError: no name of a context.
            ContextError: no such context; nothing was removed.
        """
        for name in contexts:
            check_name(name)
            if name not in self.names():
                raise self.no_context(name)
        with self._index.writing() as db:
            db.executemany("DELETE FROM contexts WHERE name = ?", [(name,) for name in contexts])
        return self._collect()

    def prune(self, max_bytes: int | None = None, keep: Collection[str] = ()) -> Pruned:
        """Removes blocks that no context needs, after contexts until the store is small enough.

        Args:
            max_bytes: of the blocks of the whole store; None: no context is removed.
            keep: names of contexts that stay.

        Raises:
            ContextError: a read-only store, or other processes wrote to the store all the time.
        """
        evicted: list[str] = []
        if not self.names() and not self._index.path.exists():
            return Pruned((), 0)
        if max_bytes is not None:
            with self._index.writing() as db:
                left = _used_bytes(db)
                for context, name in db.execute("SELECT id, name FROM contexts ORDER BY used, id").fetchall():
                    if left <= max_bytes:
                        break
                    if name not in keep:
                        db.execute("DELETE FROM contexts WHERE id = ?", (context,))
                        left = _used_bytes(db)
                        evicted.append(name)
        return Pruned(tuple(evicted), self._collect())

    def sizes(self) -> tuple[int, int]:
        """Bytes of all blocks that a context needs, and of the files of those that none does."""
        with self._index.reading() as db:
            files = [self._path(digest) for (digest,) in db.execute(f"SELECT digest {UNUSED}")]
            return _used_bytes(db), sum(path.stat().st_size for path in files if path.is_file())

    def shared(self) -> set[str]:
        """Digests of the blocks that several contexts need."""
        query = "SELECT digest FROM context_blocks GROUP BY digest HAVING count(*) > 1"
        with self._index.reading() as db:
            return {digest for (digest,) in db.execute(query)}

    def damages(self, names: Sequence[str], progress: Progress = no_progress) -> dict[str, str]:
        """What is wrong with those contexts that are not whole; all of their blocks are read, shared ones once.

        Args:
            names: of contexts; those that are removed meanwhile are left out.
            progress: shows how many were read.

        Raises:
            ContextError: a damaged index.
        """
        damages: dict[str, str] = {}
        intact: set[Block] = set()
        with self._index.reading() as db:
            _check_index(db)
        with progress("verify", len(names), "contexts") as advance:
            for name in names:
                try:
                    self._verify(self.get(name), intact)
                except ReplacedError:  # what replaces it was checked when it was stored
                    pass
                except ContextError as error:
                    if name in self.names():
                        damages[name] = str(error)
                advance(1)
        return damages

    def _verify(self, context: StoredContext, intact: set[Block]) -> None:
        """Reads all blocks of a context but those that are known to be intact, and adds them there."""
        record = context.record
        try:
            verify_blocks([self._place(block) for block in record.blocks if block not in intact])
            tokens = self.token_ids(context)
            expected = index_rows(record, tokens.int().numpy())
            queries = (
                "SELECT identity, tail_start, tail FROM contexts JOIN records ON context = id WHERE id = ?",
                "SELECT digest FROM context_blocks WHERE context = ?",
                "SELECT is_tail, tokens, digest FROM prefixes WHERE context = ?",
            )
            with self._index.reading() as db:
                rows = [db.execute(query, (context.id,)).fetchall() for query in queries]
            if any(sorted(ours) != sorted(theirs) for ours, theirs in zip(rows, expected, strict=True)):
                raise CacheError("the index says other things of it than its record and its token ids")
        except CacheError as error:
            raise self._explained(context, error) from error
        intact.update(record.blocks)

    def _collect(self) -> int:
        """Removes the blocks that no context needs, and what a kill left half written; returns the bytes."""
        freed = 0
        with self._index.writing() as db:
            unused = {digest for (digest,) in db.execute(f"SELECT digest {UNUSED}")}
            if unused:  # a damaged index is not believed where it says that nobody needs a block
                _check_index(db)
                for (record,) in db.execute("SELECT record FROM records"):
                    unused -= {*_DIGEST.findall(record)}
            known = {digest for (digest,) in db.execute("SELECT digest FROM blocks")}
            halves = (path.name.removesuffix(f"{_SUFFIX}.tmp") for path in self._blocks.glob(f"*{_SUFFIX}.tmp"))
            paths = [self._path(digest) for digest in sorted(unused)]
            paths += [temporary_path(self._path(digest)) for digest in halves if digest in known]
            for path in paths:
                if path.is_file():
                    freed += path.stat().st_size
                    path.unlink()
            db.executemany("DELETE FROM blocks WHERE digest = ?", [(digest,) for digest in unused])
        return freed

    def _write(self, block: Block, tensors: Tensors) -> int:
        """Writes a block unless it is there; returns the bytes written. The caller alone writes to the store."""
        place = self._place(block)
        try:
            verify_blocks([place])
        except CacheError:
            temporary_path(place.path).unlink(missing_ok=True)  # of whatever kind it is
            with replacing(place.path) as temporary:
                temporary.write_bytes(encode(tensors)[1])
            return block.bytes
        return 0

    def _path(self, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise ContextError(f"{self._index.path} is damaged: it names a block '{digest[:80]}'")
        return self._blocks / f"{digest}{_SUFFIX}"

    def _place(self, block: Block) -> Place:
        return Place(block, self._path(block.digest), 0, block.bytes)

    def _explained(self, context: StoredContext, error: CacheError | ContextError) -> ContextError:
        """Why blocks of a context cannot be read, and what to do."""
        name = context.name
        with self._index.reading() as db:
            row = db.execute("SELECT id FROM contexts WHERE name = ?", (name,)).fetchone()
        if row is None:
            return ReplacedError(f"context '{name}' was removed by another process")
        if row[0] != context.id:
            return ReplacedError(f"context '{name}' was replaced by another process; run the same command again")
        return ContextError(
            f"context '{name}' is damaged: {error}; remove it with 'kvcli contexts rm {name}' and make it again"
        )

    def no_context(self, name: str) -> ContextError:
        """The error that says that there is no context of this name."""
        return ContextError(
            f"there is no context '{name}' in {self.folder}{suggestion(name, self.names())}; 'kvcli contexts list' "
            "shows those that are there"
        )


def identity_of(session: Session, tokenizer: Any) -> CacheIdentity:
    """What contexts of a session are bound to.

    Args:
        session: that the model is attached by.
        tokenizer: of transformers.
    """
    text = text_identity(tokenizer)
    return replace(session.identity(), tokenizer=text["tokenizer"], chat_template=text["chat_template"])


def _insert(db: sqlite3.Connection, name: str, record: ContextRecord, tokens: Tensor) -> None:
    """Adds a context to the index, whose blocks are there."""
    now, (((kind, start, tail),), blocks, prefixes) = time.time(), index_rows(record, tokens.numpy())
    created = datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds")
    context = db.execute(
        "INSERT INTO contexts (name, created, used, identity, tail_start) VALUES (?, ?, ?, ?, ?)",
        (name, created, now, kind, start),
    ).lastrowid
    db.execute("INSERT INTO records VALUES (?, ?, ?)", (context, record.sealed(), tail))
    db.executemany("INSERT INTO context_blocks VALUES (?, ?)", [(*row, context) for row in blocks])
    db.executemany("INSERT INTO prefixes VALUES (?, ?, ?, ?)", [(*row, context) for row in prefixes])


def _check_index(db: sqlite3.Connection) -> None:
    """Raises sqlite3.DatabaseError if tables contradict each other."""
    said = db.execute("PRAGMA integrity_check(1)").fetchone()[0]
    if said != "ok":
        raise sqlite3.DatabaseError(said)


def _used_bytes(db: sqlite3.Connection) -> int:
    """Bytes of all blocks that a context needs."""
    query = "SELECT total(bytes) FROM blocks WHERE digest IN (SELECT digest FROM context_blocks)"
    return int(db.execute(query).fetchone()[0])


def _as_tokens(token_ids: Sequence[int] | Tensor) -> Tensor:
    """Token ids of one row as int32 [tokens] on the CPU.

    Raises:
        ContextError: several rows.
    """
    tokens = torch.as_tensor(token_ids).int().cpu()
    if tokens.ndim == 2 and tokens.shape[0] == 1:
        tokens = tokens[0]
    if tokens.ndim != 1:
        raise ContextError(f"a context is one sequence of token ids, not a tensor of shape {list(tokens.shape)}")
    return tokens
