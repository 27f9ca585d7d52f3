"""Chunks of engines' caches in a store: chunks/HH/KEY.kvc, and a table of the index, by which they are bounded.

A chunk gets its row before its file and loses it after its file; what errors and kills leave apart goes at a later
start. A file is whole when its name is there, but nothing is flushed to the disk: what a power loss damages is for the
reader's checksum. Processes share a store.
"""

import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple

from kvcli.contexts.index import Index
from kvcli.errors import ContextError

_STALE_S = 600.0
"""After which nobody is writing a file whose row is not there, or whose row says that it was to come."""

_ROOM_BYTES = 16 << 20
"""What is freed on a full disk."""

_SCHEMA = """
-- kind: what chunks of one model, method and settings have in common; errors: NULL where nothing is lost
CREATE TABLE IF NOT EXISTS chunks (
    key TEXT PRIMARY KEY, kind TEXT NOT NULL, bytes INTEGER NOT NULL, plain_bytes INTEGER NOT NULL, used REAL NOT NULL,
    key_error REAL, value_error REAL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS chunks_by_use ON chunks (used, bytes);
"""


class Chunk(NamedTuple):
    """A chunk as it is stored."""

    key: str  # lower-case hexadecimal digits, at least 2
    data: bytes  # with a checksum, which the reader checks
    kind: str  # which model, method and settings, for people
    plain_bytes: int  # in the engine's own dtype
    errors: tuple[float, float] | None = None  # squared, of keys and of values, as a share of energy; None: no loss


class ChunksOfKind(NamedTuple):
    """What a store has of one kind: number, bytes stored and plain, time of last use, errors on average and at most."""

    kind: str
    chunks: int
    bytes: int
    plain_bytes: int
    used: float
    key_error: float | None
    value_error: float | None
    worst_key_error: float | None
    worst_value_error: float | None


class ChunkStore:
    """The chunks of a folder, at most `max_bytes`: those that were not used for longest are removed.

    ContextError: something else is in the index's place, or it is read-only; OSError: the folder cannot be made.
    """

    def __init__(self, folder: str | Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = Path(folder), max_bytes
        self._index, self._chunks = Index(self.folder), self.folder / "chunks"
        self._uses, self._lock = dict[str, float](), threading.Lock()
        self._chunks.mkdir(parents=True, exist_ok=True)
        self._with_room(self._sweep)

    def has(self, key: str) -> bool:
        """Whether a chunk is there; its bytes may be damaged."""
        return self._path(key).is_file()

    def get(self, key: str) -> bytearray | None:
        """The bytes of a chunk, fewer or none if it is damaged; None if it is not there or cannot be read."""
        try:
            with self._path(key).open("rb") as file:
                data = bytearray(os.fstat(file.fileno()).st_size)
                return data[: file.readinto(data)]
        except OSError:
            return None

    def put(self, chunks: Sequence[Chunk], used: Mapping[str, float] | None = None) -> None:
        """Stores chunks that were `used` then, by default as a text now; to keep the bound, the least recently used go,
        which may be of these.

        OSError: the disk is full of other things, and nothing is left of what was not written; ContextError: the index
        cannot be written, or a chunk is larger than the bound, and nothing goes.
        """
        used = used or used_now(x.key for x in chunks)
        if (largest := max((len(x.data) for x in chunks), default=0)) > self.max_bytes:
            raise ContextError(f"a chunk has {largest} bytes, more than the {self.max_bytes} of the whole store")

        def insert(kept: Sequence[Chunk], otherwise: str) -> list[Chunk]:
            rows = [(x.key, x.kind, len(x.data), x.plain_bytes, used[x.key], *(x.errors or (None, None))) for x in kept]
            with self._index.writing() as db:
                db.executemany(f"INSERT OR {otherwise} INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
                removed = self._prune(db)
            return [x for x in kept if x.key not in removed]

        def write() -> None:
            kept = insert(chunks, "REPLACE")
            for chunk in kept:
                self._write(chunk)
            insert(kept, "IGNORE")  # another process may have removed some in between

        try:
            self._with_room(write)
        except (OSError, ContextError):
            with suppress(OSError, ContextError):
                self.remove([x.key for x in chunks if not self.has(x.key)])
            raise

    def touch(self, used: Mapping[str, float]) -> None:
        """Notes when chunks were used; while somebody else is writing, it is left to the next call."""
        with self._lock:
            self._uses |= used
            statement, rows = "UPDATE chunks SET used = max(used, ?) WHERE key = ?", self._uses.items()
            if self._index.at_once(statement, [(time, key) for key, time in rows]) is not None:
                self._uses.clear()

    def remove(self, keys: Iterable[str]) -> None:
        """Removes chunks, such as damaged ones."""
        with self._index.writing() as db:
            self._remove(db, list(keys))

    def clear(self, kind: str) -> None:
        """Removes all chunks of a kind."""
        with self._index.writing() as db:
            self._remove(db, [key for (key,) in db.execute("SELECT key FROM chunks WHERE kind = ?", (kind,))])

    def _write(self, chunk: Chunk) -> None:
        path = self._path(chunk.key)
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
        try:
            temporary.write_bytes(chunk.data)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    def _prune(self, db: sqlite3.Connection) -> list[str]:
        (left,) = db.execute("SELECT ifnull(sum(bytes), 0) FROM chunks").fetchone()
        victims = []
        for key, size in db.execute("SELECT key, bytes FROM chunks ORDER BY used, key"):
            if left <= self.max_bytes:
                break
            victims.append(key)
            left -= size
        self._remove(db, victims)
        return victims

    def _sweep(self) -> None:
        """Makes the table, and removes rows without files, files without rows and halves that nobody is writing now."""
        with self._index.writing() as db:
            for statement in _SCHEMA.split(";\n")[:-1]:
                db.execute(statement)
            known = {key for (key,) in db.execute("SELECT key FROM chunks")}
            for path in self._chunks.glob("*/*"):
                with suppress(OSError):
                    if path.suffix == ".kvc" and path.stem in known:
                        known.remove(path.stem)
                    elif time.time() - path.stat().st_mtime > _STALE_S:
                        path.unlink()
            old = time.time() - _STALE_S
            rows = [(key, old) for key in known]
            db.executemany("DELETE FROM chunks WHERE key = ? AND used < ?", rows)

    def _with_room(self, work: Callable[[], None]) -> None:
        """Does what writes; if that fails on a full disk, once more, without the oldest files."""
        try:
            work()
        except (OSError, ContextError):  # the index has an error of its own for its shared memory
            if shutil.disk_usage(self.folder).free > _ROOM_BYTES:
                raise
            files, freed, keys = list[tuple[float, int, Path]](), 0, list[str]()
            for path in self._chunks.glob("*/*.kvc"):
                with suppress(FileNotFoundError):  # another process removes some, too
                    files.append((path.stat().st_mtime, path.stat().st_size, path))
            for _, size, path in sorted(files):
                if freed <= _ROOM_BYTES:
                    path.unlink(missing_ok=True)
                    freed, keys = freed + size, [*keys, path.stem]
            self.remove(keys)  # from the index, too, now that it can be written
            work()

    def _remove(self, db: sqlite3.Connection, keys: list[str]) -> None:
        for key in keys:
            self._path(key).unlink(missing_ok=True)
        db.executemany("DELETE FROM chunks WHERE key = ?", [(key,) for key in keys])

    def _path(self, key: str) -> Path:
        return self._chunks / key[:2] / f"{key}.kvc"


def used_now(text: Iterable[str]) -> dict[str, float]:
    """Times of use of chunks in a text's order, earlier for each: the last go first, as they need those before them."""
    return dict(zip(text, count(time.time(), -1e-6), strict=False))


def chunks_of(folder: Path) -> list[ChunksOfKind]:
    """What a store has of each kind, the last used first; raises as `Index.reading` does."""
    with Index(folder).reading() as db:
        if not db.execute("SELECT 1 FROM sqlite_schema WHERE name = 'chunks'").fetchone():
            return []
        return [
            ChunksOfKind(*row)
            for row in db.execute(
                "SELECT kind, count(*), sum(bytes), sum(plain_bytes), max(used), avg(key_error), avg(value_error), "
                "max(key_error), max(value_error) FROM chunks GROUP BY kind ORDER BY max(used) DESC"
            )
        ]
