"""The context of a store with most in common with the beginning of a prompt.

Of each context the index has checksums of its first tokens, up to every length at which a block of codes ends and up to
its tail, in which it can be cut to every length; and the token ids of the tail.
"""

from __future__ import annotations

import hashlib
import json
import math
import sqlite3
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from blake3 import blake3

from kvcli.cache.record import ContextRecord, num_coded, tail_start, usable_length
from kvcli.errors import CacheError, ContextError, error_text
from kvcli.progress import Say

if TYPE_CHECKING:
    from kvcli.cache.identity import CacheIdentity

TokenIds = np.ndarray[Any, np.dtype[np.int32]]

FEWEST_TOKENS = 16
"""Tokens in common for which a part of a context is of use, unless a prompt has fewer."""

CONTEXTS = "SELECT id, name, created, used, record FROM contexts JOIN records ON context = id"
"""Rows for `StoredContext.of`."""

_COMMON = """SELECT CAST(key AS INTEGER) AS length FROM json_each(?) WHERE EXISTS (
    SELECT 1 FROM prefixes WHERE is_tail = ? AND tokens = length AND digest = value) ORDER BY length DESC"""
_LENGTHS = """WITH RECURSIVE lengths (n) AS (
    SELECT min(tokens) FROM prefixes WHERE is_tail = :tail UNION ALL
    SELECT (SELECT min(tokens) FROM prefixes WHERE is_tail = :tail AND tokens > n) FROM lengths WHERE n < :most)
    SELECT n FROM lengths WHERE n <= :most"""


class StoredContext(NamedTuple):
    """A context of a store."""

    id: int  # in the index; a context that replaces it gets another one
    name: str
    created: str  # ISO 8601 in UTC
    used: float  # when it was stored or loaded last, seconds since the epoch
    record: ContextRecord

    @classmethod
    def of(cls, row: tuple[Any, ...]) -> StoredContext:
        """A context from a row of `CONTEXTS`; ContextError for a damaged record."""
        context, name, created, used, text = row
        remedy = f"remove it with 'kvcli contexts rm {name}'"
        try:
            record = ContextRecord.unseal(str(text), f"context '{name}'", remedy)
        except CacheError as error:
            raise ContextError(str(error)) from error
        if record.last is None or record.tokens is None:
            raise ContextError(f"context '{name}' is no single sequence with its token ids; {remedy}")
        return cls(context, name, str(created), float(used), record)

    def difference(self, identity: CacheIdentity) -> str | None:
        """Why it is of no use here, a clause that goes on from "it was made"; None if it is of use."""
        from kvcli.cache.identity import CacheIdentity  # imports torch

        try:
            return identity.difference(CacheIdentity.from_dict(self.record.identity))
        except ValueError as error:
            return f"with something that this kvcli does not know: {error_text(error)}"


class Match(NamedTuple):
    """A stored context, of which the first `num_tokens` tokens are of use."""

    context: StoredContext
    num_tokens: int

    @property
    def is_whole(self) -> bool:
        """Whether all of the context is of use."""
        return self.num_tokens == self.context.record.num_tokens


def prefix_digests(tokens: TokenIds, lengths: Iterable[int]) -> dict[int, int]:
    """64 bits of the BLAKE3 of the first tokens of a sequence, int32 [tokens], by length, in one pass."""
    state, read, digests = blake3(), 0, {}
    for length in sorted(set(lengths)):
        state.update(tokens[read:length].tobytes())
        digests[length], read = int.from_bytes(state.digest(8), "little", signed=True), length
    return digests


def longest(
    db: sqlite3.Connection,
    wanted: TokenIds,
    identity: CacheIdentity,
    without: set[int],
    say: Say,
    fit: Callable[[int, int], int],
) -> Match | None:
    """The context of most use to a prompt, int32 [tokens], of several the last used; by checksums, which are no proof.

    Contexts whose ids are in `without` are passed over; those of damaged ones are added. `fit` is that of `find`.
    """
    verdicts: dict[str, bool] = {}
    best: Match | None = None
    best_rank: tuple[int, float, int] = (0, math.inf, 0)  # a match has a token

    def use(row: tuple[Any, ...], common: int) -> bool:
        """Notes a context if it is better than all before it; whether none is better with so much in common."""
        nonlocal best, best_rank
        context, kind, used, *_ = row
        if context in without or verdicts.get(kind) is False or (common, used, context) <= best_rank:
            return False
        try:
            stored = StoredContext.of(db.execute(f"{CONTEXTS} WHERE id = ?", (context,)).fetchone())
        except ContextError as error:
            say(f"a context is passed over: {error}")
            without.add(context)
            return False
        if kind not in verdicts:
            verdicts[kind] = stored.difference(identity) is None
        length = usable_length(stored.record.counts, stored.record.part_tokens, common)
        length = fit(stored.record.num_tokens, length) if length else 0
        length = length if length >= max(stored.record.counts.observed) else 0  # a state is of so many tokens
        enough = length >= min(FEWEST_TOKENS, len(wanted)) or length == stored.record.num_tokens
        if not verdicts[kind] or not enough or (length, used, context) <= best_rank:
            return False
        best, best_rank = Match(stored, length), (length, used, context)
        return length == common

    for is_tail in (1, 0):
        rows = db.execute(_LENGTHS, {"tail": is_tail, "most": len(wanted)}).fetchall()
        digests = prefix_digests(wanted, [length for (length,) in rows])
        tables = "prefixes p JOIN contexts ON id = p.context" + " JOIN records r ON r.context = id" * is_tail
        columns = f"id, identity, used{', tail_start, tail' * is_tail}"
        query = f"SELECT {columns} FROM {tables} WHERE is_tail = {is_tail} AND tokens"
        order = "ORDER BY used DESC, id DESC"
        for (length,) in db.execute(_COMMON, (json.dumps(digests), is_tail)).fetchall():
            if not is_tail and length < best_rank[0]:
                break
            for row in db.execute(f"{query} = ? AND p.digest = ? {order}", (length, digests[length])):
                if is_tail:
                    use(row, row[3] + common_tokens(row[4], wanted[row[3] :]))
                elif use(row, length):
                    break
        if is_tail and len(wanted) < FEWEST_TOKENS:  # of so few tokens there is no checksum
            for row in db.execute(f"{query} > ? AND tail_start = 0 {order}", (len(wanted),)):
                use(row, common_tokens(row[4], wanted))
    return best


def index_rows(record: ContextRecord, ids: TokenIds) -> tuple[list[Any], list[Any], list[Any]]:
    """Rows of a context with token ids int32 [tokens]: identity and tail; digests of blocks; checksums of tokens."""
    counts, size, start = record.counts, record.part_tokens, tail_start(record.counts)
    kind = hashlib.sha256(json.dumps(record.identity, sort_keys=True).encode()).hexdigest()
    borders = [counts.sinks + (j + 1) * size for j in range(num_coded(counts, size))]
    borders = [length for length in borders if usable_length(counts, size, length) == length]
    tail = start or min(FEWEST_TOKENS, len(ids))
    digests = prefix_digests(ids, [*borders, tail])
    prefixes = [*((0, length, digests[length]) for length in borders), (1, tail, digests[tail])]
    return [(kind, start, ids[start:].tobytes())], [(block.digest,) for block in record.blocks], prefixes


def common_tokens(tail: bytes, tokens: TokenIds) -> int:
    """How many token ids, int32, two sequences begin with alike."""
    ours = np.frombuffer(tail, np.int32)[: len(tokens)]
    different = np.flatnonzero(ours != tokens[: len(ours)])
    return int(different[0]) if len(different) else len(ours)
