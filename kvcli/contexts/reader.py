"""Contexts of a store by name and by their first tokens, read and verified; what lists them imports no torch."""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kvcli.cache.record import Block, Place, start_of
from kvcli.contexts.index import LIBRARY, UNUSED, Index, check_name, names, no_context
from kvcli.contexts.search import CONTEXTS, Match, StoredContext, index_rows, longest
from kvcli.errors import CacheError, ContextError
from kvcli.progress import Progress, Say, no_progress, say_nothing

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kvcli.cache.context import Context
    from kvcli.cache.identity import CacheIdentity

SUFFIX = ".safetensors"
DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)

DOCUMENT, TOKENS = "document", "tokens"
"""Notes of a context: its name in its library, and how many tokens it has when the document is read to its end."""


class ReplacedError(ContextError):
    """A context that another process has removed or replaced since it was looked up."""


class ContextReader:
    """The contexts of a folder, which need not be there."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._index, self._blocks = Index(self.folder), self.folder / "blocks"

    def names(self) -> list[str]:
        """Names of all contexts, also of damaged ones; ContextError for an index that cannot be read."""
        return names(self.folder)

    def get(self, name: str) -> StoredContext:
        """One context, by name; UsageError for no name of a context, ContextError for none or a damaged record."""
        check_name(name)
        with self._index.reading() as db:
            row = db.execute(f"{CONTEXTS} WHERE name = ?", (name,)).fetchone()
        if row is None:
            raise no_context(self.folder, name)
        return StoredContext.of(row)

    def contexts(self, say: Say = say_nothing, limit: int = -1) -> list[StoredContext]:
        """Contexts whose records can be read, the most recently used first, at most `limit`; `say`: of others."""
        with self._index.reading() as db:
            rows = db.execute(f"{CONTEXTS} ORDER BY used DESC, id DESC LIMIT ?", (limit,)).fetchall()
        contexts = []
        for row in rows:
            try:
                contexts.append(StoredContext.of(row))
            except ContextError as error:
                say(str(error))
        return contexts

    def find(
        self,
        token_ids: Sequence[int] | Tensor,
        identity: CacheIdentity,
        say: Say = say_nothing,
        fit: Callable[[int, int], int] = lambda stored, length: length,
    ) -> Match | None:
        """The stored context that has most in common with the beginning of a prompt, compared token by token.

        Args:
            token_ids: of the prompt, one row. A cache needs a token that it does not hold to go on from: leave out the
                prompt's last.
            identity: of the model, the method, the artifact and the tokenizer; other contexts are passed over.
            say: gets a line about every damaged context that begins alike, which is passed over.
            fit: how many of the first tokens of a context of `stored` tokens may be used, where `length` could be.

        Returns:
            None if no context is of use. One is if all of its tokens are the prompt's first, or so many of them that
            they end where a block ends or in its window; fewer than 16 are not, unless the prompt has no more. Of
            several with equally many tokens, the last used one. Token ids of several rows are a ContextError.
        """
        import torch

        wanted, passed_over = as_tokens(token_ids), set[int]()
        while True:
            with self._index.reading() as db:
                match = longest(db, wanted.numpy(), identity, passed_over, say, fit)
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
        window: int = 0,
        fit: Callable[[int, int], int] = lambda stored, length: length,
        more_than: int = 0,
    ) -> tuple[Match, Context] | None:
        """`find` and `load`, again if another process removes or replaces the context in between; raises as both.

        A part of a context leaves at least `window` tokens of the prompt to be read, so that its last ones are in full
        precision as after any other reading; a context that is used whole has its own window. One of which no more than
        `more_than` tokens are of use is not loaded: None.
        """
        while True:
            match = self.find(token_ids, identity, say, fit)
            if window and match is not None and not match.is_whole:
                tokens = as_tokens(token_ids)
                match = self.find(tokens[: max(0, len(tokens) - window)], identity, fit=fit)
            if match is None or match.num_tokens <= more_than:
                return None
            with suppress(ReplacedError):
                return match, self.load(match, device)

    def whole(self, name: str, identity: CacheIdentity | None = None) -> Match:
        """All of a context, by name; raises as `get`, and ContextError for another identity, saying what differs."""
        context = self.get(name)
        if identity is not None and (reason := context.difference(identity)) is not None:
            raise ContextError(f"context '{name}' cannot be used here: it was made {reason}")
        return Match(context, context.record.num_tokens)

    def token_ids(self, context: StoredContext) -> Tensor:
        """All token ids of a context, int64 [tokens]; raises as `load` does."""
        from kvcli.cache.blocks import read_blocks
        from kvcli.cache.context import tokens_in

        record = context.record
        with self._explaining(context):
            (tensors,) = read_blocks([self._place(block) for block in (record.tokens,) if block is not None])
            return tokens_in(tensors, record)[0]

    def load(self, match: Match, device: torch.device | str = "cpu") -> Context:
        """Reads and verifies the blocks of a match, with token ids int64 [1, tokens]; notes that it was used.

        ContextError: a block is missing, truncated or damaged, or the context was removed or replaced.
        """
        from kvcli.cache.context import Context

        stored = match.context
        with self._explaining(stored):
            name = f"context '{stored.name}'"
            context = Context.decode(stored.record, self._place, device, name, match.num_tokens)
        self.touch(stored.name)
        return context

    def touch(self, name: str) -> bool:
        """Notes that a context was used now, so that others are removed before it; False if it is not there."""
        return self._index.at_once("UPDATE contexts SET used = ? WHERE name = ?", [(time.time(), name)]) != 0

    def sizes(self) -> tuple[int, int]:
        """Bytes of all blocks that a context needs, and of the files of the others."""
        with self._index.reading() as db:
            files = [self._path(digest) for (digest,) in db.execute(f"SELECT digest {UNUSED}")]
            return used_bytes(db), sum(path.stat().st_size for path in files if path.is_file())

    def shared(self) -> set[str]:
        """Digests of the blocks that several contexts need."""
        with self._index.reading() as db:
            rows = db.execute("SELECT digest FROM context_blocks GROUP BY digest HAVING count(*) > 1")
            return {digest for (digest,) in rows}

    def damages(self, names: Sequence[str], progress: Progress = no_progress) -> dict[str, str]:
        """Reads all blocks of contexts, shared ones once; returns the defect of each damaged context by its name.

        Contexts that are removed meanwhile are left out. A damaged index is a ContextError.
        """
        damages: dict[str, str] = {}
        intact: set[Block] = set()
        with self._index.reading() as db:
            check_index(db)
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
        """Reads all blocks of a context but the intact ones, and adds them there."""
        from kvcli.cache.blocks import verify_blocks

        queries = (
            "SELECT identity, tail_start, tail FROM contexts JOIN records ON context = id WHERE id = ?",
            "SELECT digest FROM context_blocks WHERE context = ?",
            "SELECT is_tail, tokens, digest FROM prefixes WHERE context = ?",
        )
        with self._explaining(context):
            verify_blocks([self._place(block) for block in context.record.blocks if block not in intact])
            expected = index_rows(context.record, self.token_ids(context).int().numpy())
            with self._index.reading() as db:
                rows = [sorted(db.execute(query, (context.id,))) for query in queries]
            if rows != [*map(sorted, expected)]:
                raise CacheError("the index says other things of it than its record and its token ids")
        intact.update(context.record.blocks)

    def _path(self, digest: str) -> Path:
        if not DIGEST.fullmatch(digest):
            raise ContextError(f"{self._index.path} is damaged: it names a block '{digest[:80]}'")
        return self._blocks / f"{digest}{SUFFIX}"

    def _place(self, block: Block) -> Place:
        return Place(block, self._path(block.digest), 0, block.bytes)

    @contextmanager
    def _explaining(self, context: StoredContext) -> Iterator[None]:
        """A CacheError in the block becomes a ContextError that says what happened to the context, and what to do."""
        name = context.name
        try:
            yield
        except CacheError as error:
            with self._index.reading() as db:
                row = db.execute("SELECT id FROM contexts WHERE name = ?", (name,)).fetchone()
            if row is None:
                raise ReplacedError(f"context '{name}' was removed by another process") from error
            if row != (context.id,):
                reason = "was replaced by another process; run the same command again"
                raise ReplacedError(f"context '{name}' {reason}") from error
            raise ContextError(
                f"context '{name}' is damaged: {error}; remove it with 'kvcli contexts rm {name}' and make it again"
            ) from error


def check_index(db: sqlite3.Connection) -> None:
    """Raises sqlite3.DatabaseError if tables contradict each other."""
    said = db.execute("PRAGMA integrity_check(1)").fetchone()[0]
    if said != "ok":
        raise sqlite3.DatabaseError(said)


def documents_of(store: ContextReader, library: str | None, say: Say = say_nothing) -> dict[str, StoredContext]:
    """Documents that were read to their end, of a library, or of none by context, in order; of two, the last used."""
    found: dict[str, StoredContext] = {}
    for stored in store.contexts(say):
        notes, count = stored.record.notes, stored.record.num_tokens
        name, start = stored.name if library is None else str(notes.get(DOCUMENT)), start_of(notes)
        if notes.get(LIBRARY) == library and notes.get(TOKENS) == count and 0 <= start < count and name.isprintable():
            found.setdefault(name, stored)
    return dict(sorted(found.items()))


def used_bytes(db: sqlite3.Connection) -> int:
    """Bytes of all blocks that a context needs."""
    query = "SELECT total(bytes) FROM blocks WHERE digest IN (SELECT digest FROM context_blocks)"
    return int(db.execute(query).fetchone()[0])


def as_tokens(token_ids: Sequence[int] | Tensor) -> Tensor:
    """Token ids of one row as int32 [tokens] on the CPU; ContextError for several rows."""
    import torch

    tokens = torch.as_tensor(token_ids).int().cpu()
    if tokens.ndim == 2 and tokens.shape[0] == 1:
        tokens = tokens[0]
    if tokens.ndim != 1:
        raise ContextError(f"a context is one sequence of token ids, not a tensor of shape {list(tokens.shape)}")
    return tokens
