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
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from kvcli.attention.session import Session
from kvcli.cache.blocks import Block, Place, Tensors, encode, read_blocks, verify_blocks
from kvcli.cache.context import INPUT_IDS, Context, tokens_in
from kvcli.cache.identity import CacheIdentity
from kvcli.cache.parts import BLOCK_TOKENS, is_plain, num_coded, tail_start, usable_length
from kvcli.cache.record import ContextRecord
from kvcli.contexts.index import UNUSED, Index, names
from kvcli.errors import CacheError, ContextError, UsageError, suggestion
from kvcli.fingerprint import text_identity
from kvcli.progress import Progress, Say, no_progress, say_nothing
from kvcli.storage.atomic import replacing, temporary_path

FEWEST_TOKENS = 16
"""Tokens in common for which a part of a context is of use, unless a prompt has fewer."""

_SUFFIX = ".safetensors"
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
_LONGEST = 100
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{_LONGEST - 1}}}", re.ASCII)
_ATTEMPTS = 5
_ROW = "SELECT id, name, created, used, record FROM contexts JOIN records ON context = id"
_LENGTHS = """WITH RECURSIVE lengths (n) AS (
    SELECT min(tokens) FROM prefixes WHERE is_tail = :tail UNION ALL
    SELECT (SELECT min(tokens) FROM prefixes WHERE is_tail = :tail AND tokens > n) FROM lengths WHERE n < :most)
    SELECT n FROM lengths WHERE n <= :most"""


class ReplacedError(ContextError):
    """A context that another process has removed or replaced since it was looked up."""


@dataclass(frozen=True)
class StoredContext:
    """A context of a store.

    Attributes:
        id: in the index; a context that replaces it gets another one.
        name: in its store.
        created: when it was stored, ISO 8601 in UTC.
        used: when it was stored or loaded last, seconds since the epoch.
        record: what it holds.
    """

    id: int
    name: str
    created: str
    used: float
    record: ContextRecord


@dataclass(frozen=True)
class Match:
    """A stored context, or how much of it a prompt has in common with it.

    Attributes:
        context: the stored one.
        num_tokens: its first tokens that are of use.
    """

    context: StoredContext
    num_tokens: int

    @property
    def is_whole(self) -> bool:
        """Whether all of the context is of use."""
        return self.num_tokens == self.context.record.num_tokens


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


@dataclass(frozen=True)
class Pruned:
    """What pruning a store removed.

    Attributes:
        evicted: names of contexts, the least recently used first.
        freed_bytes: of all files removed.
    """

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
            row = None if db is None else db.execute(f"{_ROW} WHERE name = ?", (name,)).fetchone()
        if row is None:
            raise self.no_context(name)
        return _stored(row)

    def contexts(self, say: Say = say_nothing) -> list[StoredContext]:
        """All contexts whose records can be read, the most recently used first.

        Args:
            say: called with a line about every other one.
        """
        with self._index.reading() as db:
            rows = [] if db is None else db.execute(f"{_ROW} ORDER BY used DESC, id DESC").fetchall()
        contexts = []
        for row in rows:
            try:
                contexts.append(_stored(row))
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
                match = None if db is None else _longest(db, wanted.numpy(), identity, passed_over, say)
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
        for attempt in range(_ATTEMPTS):
            match = self.find(token_ids, identity, say)
            try:
                return None if match is None else (match, self.load(match, device))
            except ReplacedError:
                if attempt == _ATTEMPTS - 1:
                    raise
        return None

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
        if identity is not None and (reason := _difference(identity, context.record)) is not None:
            raise ContextError(f"context '{name}' cannot be used here: it was made {reason}")
        return Match(context, context.record.num_tokens)

    def token_ids(self, context: StoredContext) -> Tensor:
        """All token ids of a context, int64 [tokens].

        Raises:
            ContextError: their block is missing or damaged, or the context was removed or replaced.
        """
        try:
            (tensors,) = read_blocks([self._place(_tokens_of(context.record))])
            return tokens_in(tensors, context.record)[0]
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
        identity = CacheIdentity.from_dict(record.identity)
        check_name(name)
        if not overwrite:
            self.check_free(name, tokens, identity)
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
                row = db.execute(f"{_ROW} WHERE name = ?", (name,)).fetchone()
                replaces = row is not None
                if replaces and not overwrite:
                    _check_same(_stored(row), record.tokens, identity)
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
        if name in self.names():
            block, _ = encode({INPUT_IDS: _as_tokens(token_ids)[None]})
            _check_same(self.get(name), block, identity)

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
            if db is None:
                return 0, 0
            files = [self._path(digest) for (digest,) in db.execute(f"SELECT digest {UNUSED}")]
            return _used_bytes(db), sum(path.stat().st_size for path in files if path.is_file())

    def shared(self) -> set[str]:
        """Digests of the blocks that several contexts need."""
        query = "SELECT digest FROM context_blocks GROUP BY digest HAVING count(*) > 1"
        with self._index.reading() as db:
            return set() if db is None else {digest for (digest,) in db.execute(query)}

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
            if db is not None:
                _check_index(db)
        with progress("verify", len(names), "contexts") as advance:
            for name in names:
                for _ in range(_ATTEMPTS):  # one that is replaced meanwhile is read again
                    try:
                        self._verify(self.get(name), intact)
                    except ReplacedError:
                        continue
                    except ContextError as error:
                        if name in self.names():
                            damages[name] = str(error)
                    break
                advance(1)
        return damages

    def _verify(self, context: StoredContext, intact: set[Block]) -> None:
        """Reads all blocks of a context but those that are known to be intact, and adds them there."""
        record = context.record
        try:
            verify_blocks([self._place(block) for block in record.blocks if block not in intact])
            tokens = self.token_ids(context)
            expected = _rows(record, tokens.int().numpy())
            queries = (
                "SELECT identity, tail_start, tail FROM contexts JOIN records ON context = id WHERE id = ?",
                "SELECT digest FROM context_blocks WHERE context = ?",
                "SELECT is_tail, tokens, digest FROM prefixes WHERE context = ?",
            )
            with self._index.reading() as db:
                rows = [[] if db is None else db.execute(query, (context.id,)).fetchall() for query in queries]
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
            row = None if db is None else db.execute("SELECT id FROM contexts WHERE name = ?", (name,)).fetchone()
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


def check_name(name: str) -> None:
    """Raises UsageError unless a name is fit for a context."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"'{name}' is no name of a context: letters, digits, dots, underscores and hyphens, at most 100, "
            "the first a letter or a digit"
        )


def name_from(text: str) -> str:
    """A name of a context that resembles a text, such as the name of a file."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:_LONGEST]
    return name or "context"


def prefix_digests(tokens: np.ndarray[Any, Any], lengths: Iterable[int]) -> dict[int, bytes]:
    """BLAKE3 of the first tokens of a sequence, for several lengths, in one pass.

    Args:
        tokens: int32 [tokens].
        lengths: up to all tokens.
    """
    state, read, digests = blake3(), 0, {}
    for length in sorted(set(lengths)):
        state.update(tokens[read:length].tobytes())
        digests[length], read = state.digest(16), length
    return digests


def _longest(
    db: sqlite3.Connection, wanted: np.ndarray[Any, Any], identity: CacheIdentity, without: set[int], say: Say
) -> Match | None:
    """The context of which most is of use: in the tokens after its codes, or up to a border of its blocks.

    Args:
        db: the index.
        wanted: token ids of the prompt, int32 [tokens].
        identity: see `ContextStore.find`.
        without: ids of contexts that are passed over; damaged ones are added.
        say: see `ContextStore.find`.
    """
    verdicts: dict[str, bool] = {}
    best: Match | None = None
    best_rank: tuple[int, float, int] = (0, 0.0, 0)

    def use(context: int, kind: str, used: float, common: int) -> bool:
        """Whether a context is better than all before it."""
        nonlocal best, best_rank
        if context in without or verdicts.get(kind) is False or (common, used, context) <= best_rank:
            return False
        try:
            stored = _stored(db.execute(f"{_ROW} WHERE id = ?", (context,)).fetchone())
        except ContextError as error:
            say(f"a context is passed over: {error}")
            without.add(context)
            return False
        if kind not in verdicts:
            verdicts[kind] = _difference(identity, stored.record) is None
        length = usable_length(stored.record.counts, stored.record.part_tokens, common)
        enough = length >= min(FEWEST_TOKENS, len(wanted)) or length == stored.record.num_tokens
        if not verdicts[kind] or not enough or (length, used, context) <= best_rank:
            return False
        best, best_rank = Match(stored, length), (length, used, context)
        return True

    for is_tail in (1, 0):
        rows = db.execute(_LENGTHS, {"tail": is_tail, "most": len(wanted)}).fetchall()
        digests = prefix_digests(wanted, [length for (length,) in rows])
        tables = "prefixes p JOIN contexts ON id = p.context" + " JOIN records r ON r.context = id" * is_tail
        columns = f"id, identity, used{', tail_start, tail' * is_tail}"
        query = f"SELECT {columns} FROM {tables} WHERE is_tail = {is_tail} AND tokens"
        order = "ORDER BY used DESC, id DESC"
        for length in sorted(digests, reverse=True):
            if not is_tail and length < best_rank[0]:
                break
            for row in db.execute(f"{query} = ? AND p.digest = ? {order}", (length, digests[length])):
                if is_tail:
                    *known, start, tail = row
                    use(*known, start + _common(tail, wanted[start:]))
                elif use(*row, length):
                    break
        if is_tail and len(wanted) < FEWEST_TOKENS:  # of so few tokens there is no checksum
            for *known, _, tail in db.execute(f"{query} > ? AND tail_start = 0 {order}", (len(wanted),)):
                use(*known, _common(tail, wanted))
    return best


def _insert(db: sqlite3.Connection, name: str, record: ContextRecord, tokens: Tensor) -> None:
    """Adds a context to the index, whose blocks are there."""
    now, (((kind, start, tail),), blocks, prefixes) = time.time(), _rows(record, tokens.numpy())
    created = datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds")
    context = db.execute(
        "INSERT INTO contexts (name, created, used, identity, tail_start) VALUES (?, ?, ?, ?, ?)",
        (name, created, now, kind, start),
    ).lastrowid
    db.execute("INSERT INTO records VALUES (?, ?, ?)", (context, record.sealed(), tail))
    db.executemany("INSERT INTO context_blocks VALUES (?, ?)", [(*row, context) for row in blocks])
    db.executemany("INSERT INTO prefixes VALUES (?, ?, ?, ?)", [(*row, context) for row in prefixes])


def _rows(record: ContextRecord, ids: np.ndarray[Any, Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """What the index says of a context: identity and tail; digests of blocks; checksums of first tokens.

    Args:
        record: of the context.
        ids: its token ids, int32 [tokens].
    """
    counts, size = record.counts, record.part_tokens
    start = tail_start(counts)
    kind = hashlib.sha256(json.dumps(record.identity, sort_keys=True).encode()).hexdigest()
    borders = [counts.sinks + (j + 1) * size for j in range(num_coded(counts, size))]
    borders = [length for length in borders if usable_length(counts, size, length) == length]
    tail = start or min(FEWEST_TOKENS, len(ids))
    digests = prefix_digests(ids, [*borders, tail])
    prefixes = [*((0, length, digests[length]) for length in borders), (1, tail, digests[tail])]
    return [(kind, start, ids[start:].tobytes())], [(block.digest,) for block in record.blocks], prefixes


def _stored(row: tuple[Any, ...]) -> StoredContext:
    """A context as `_ROW` gives it.

    Raises:
        ContextError: a damaged record.
    """
    context, name, created, used, text = row
    remedy = f"remove it with 'kvcli contexts rm {name}'"
    try:
        record = ContextRecord.unseal(str(text), f"context '{name}'", remedy)
        _tokens_of(record)
    except CacheError as error:
        raise ContextError(str(error)) from error
    return StoredContext(context, name, str(created), float(used), record)


def _tokens_of(record: ContextRecord) -> Block:
    if record.last is None or record.tokens is None:
        raise CacheError("it is no single sequence with its token ids")
    return record.tokens


def _check_same(stored: StoredContext, tokens: Block | None, identity: CacheIdentity) -> None:
    if stored.record.tokens != tokens or _difference(identity, stored.record) is not None:
        raise ContextError(
            f"there is a context '{stored.name}' of other tokens or another model already; choose another name, or "
            "replace it with --overwrite"
        )


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


def _common(tail: bytes, tokens: np.ndarray[Any, Any]) -> int:
    """How many token ids, int32, two sequences begin with alike."""
    ours = np.frombuffer(tail, np.int32)[: len(tokens)]
    different = np.flatnonzero(ours != tokens[: len(ours)])
    return int(different[0]) if len(different) else len(ours)


def _difference(identity: CacheIdentity, record: ContextRecord) -> str | None:
    """Why a stored context is of no use here, a clause that goes on from "it was made"; None if it is of use."""
    try:
        return identity.difference(CacheIdentity.from_dict(record.identity))
    except ValueError as error:
        return f"with something that this kvcli does not know: {' '.join(str(error).split())}"
