"""The index of a store: an SQLite file of contexts, of the blocks that they need, and of their first tokens.

It is opened for each use, knows neither tensors nor records, and does not import torch. Locks are waited for in short
polls, so that Ctrl-C works.
"""

import errno
import os
import re
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from kvcli.errors import ContextError, UsageError, error_text, suggestion

UNUSED = "FROM blocks WHERE digest NOT IN (SELECT digest FROM context_blocks)"
"""The blocks that no context needs, after SELECT or DELETE."""

LIBRARY = "library"
"""The note of a context that names the library it belongs to."""

_APPLICATION = 0x6B76636C
_VERSION = 4
_MAX_WAIT_S = 600.0
_POLL_S = 0.02
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)
_SCHEMA = f"""
-- id: never given twice, which tells a context from one that replaced it
-- identity: checksum of what it is bound to; tail: token ids from tail_start on, where it can be cut to every length
CREATE TABLE contexts (
    id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, created TEXT NOT NULL, used REAL NOT NULL,
    identity TEXT NOT NULL, tail_start INTEGER NOT NULL);
CREATE TABLE records (
    context INTEGER PRIMARY KEY REFERENCES contexts ON DELETE CASCADE, record TEXT NOT NULL, tail BLOB NOT NULL);
CREATE TABLE blocks (digest TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE context_blocks (
    digest TEXT NOT NULL, context INTEGER NOT NULL REFERENCES contexts ON DELETE CASCADE,
    PRIMARY KEY (digest, context)) WITHOUT ROWID;
CREATE INDEX blocks_of_context ON context_blocks (context);
-- checksums of first tokens: up to each length to which a context can be cut, and up to its tail
CREATE TABLE prefixes (
    is_tail INTEGER NOT NULL, tokens INTEGER NOT NULL, digest INTEGER NOT NULL,
    context INTEGER NOT NULL REFERENCES contexts ON DELETE CASCADE,
    PRIMARY KEY (is_tail, tokens, digest, context)) WITHOUT ROWID;
CREATE INDEX prefixes_of_context ON prefixes (context);
PRAGMA application_id = {_APPLICATION};
PRAGMA user_version = {_VERSION};
"""


class Index:
    """The index of a store's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "index.sqlite"

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """One moment of the index inside the block; an empty one where nothing was stored.

        ContextError: a store of another version of kvcli, a damaged index, or one that others use all the time.
        """
        if self._exists():
            read_only = "mode=ro" if self.path.with_name("index.sqlite-wal").exists() else "mode=ro&immutable=1"
            writable = os.access(self.path, os.W_OK) and os.access(self.folder, os.W_OK)
            with self._open("mode=rw" if writable else read_only) as db:
                _patiently(db, "BEGIN")
                if not self._is_new(db):
                    yield db
                    return
        with closing(sqlite3.connect(":memory:")) as empty:
            empty.executescript(_SCHEMA)
            yield empty

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction that alone writes, undone if the block raises; makes the index if there is none.

        ContextError: as for `reading`, or a store that is read-only; OSError: the disk is full.
        """
        self._exists()
        with self._open("mode=rwc") as db:
            _patiently(db, "BEGIN")  # of one moment: others may be making the index
            self._is_new(db)  # what is not ours is not changed
            db.execute("COMMIT")
            with suppress(sqlite3.OperationalError):  # other processes use it, or its file system has no shared memory
                db.execute("PRAGMA journal_mode = WAL")
            _patiently(db, "BEGIN IMMEDIATE")
            if self._is_new(db):
                for statement in _SCHEMA.split(";\n"):
                    db.execute(statement)
            db.execute("DELETE FROM blocks WHERE digest = ''")  # refused at once where nothing can be written
            yield db
            _patiently(db, "COMMIT")

    def at_once(self, statement: str, rows: Iterable[Sequence[object]]) -> int | None:
        """Executes a statement for each row and returns how many rows of the index it changed.

        None: it was given up, because the store cannot be written to, or somebody else is writing.
        """
        with suppress(ContextError, OSError), self._open("mode=rw") as db:
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute("BEGIN IMMEDIATE")
            changed = db.executemany(statement, rows).rowcount
            db.execute("COMMIT")
            return changed
        return None

    def _exists(self) -> bool:
        """Whether there is an index; ContextError if something else is in its place."""
        if self.path.is_file():
            return True
        if self.path.exists() or self.path.is_symlink():
            raise ContextError(f"{self.path} is no file; remove it, or name another folder with --store")
        return False

    @contextmanager
    def _open(self, mode: str) -> Iterator[sqlite3.Connection]:
        address = f"{self.path.absolute().as_uri()}?{mode}"
        try:
            with closing(sqlite3.connect(address, uri=True, timeout=0.1, isolation_level=None)) as db:
                db.execute("PRAGMA foreign_keys = ON")
                db.text_factory = lambda text: text.decode(errors="replace")
                yield db
        except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter of its own messages
            extended = getattr(error, "sqlite_errorcode", 0)
            code = extended & 0xFF
            if code == sqlite3.SQLITE_FULL:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path)) from error
            if extended == sqlite3.SQLITE_IOERR_SHMSIZE:
                raise ContextError(f"{self.path} cannot be opened: no space is left on its disk") from error
            said = error_text(error)
            reasons = {
                sqlite3.SQLITE_BUSY: f"other kvcli processes use {self.folder}; wait until they have ended",
                sqlite3.SQLITE_READONLY: f"the store {self.folder} is read-only: nothing can be stored or removed",
                sqlite3.SQLITE_CANTOPEN: f"{self.path} cannot be opened; see whether the store is read-only",
                sqlite3.SQLITE_IOERR: f"{self.path} cannot be read or written ({said})",
            }
            damaged = f"{self.path} is damaged ({said}); remove the store, and make its contexts again"
            raise ContextError(reasons.get(code, damaged)) from error

    def _is_new(self, db: sqlite3.Connection) -> bool:
        """Whether the index has no tables yet; ContextError if it is not kvcli's, or another version's."""
        application, version, tables = (
            _patiently(db, query).fetchone()[0]
            for query in ("PRAGMA application_id", "PRAGMA user_version", "SELECT count(*) FROM sqlite_schema")
        )
        if (application, version) == (_APPLICATION, _VERSION) or (not application and not tables):
            return not tables
        if application != _APPLICATION:
            raise ContextError(f"{self.path} was not written by kvcli; name another folder with --store")
        raise ContextError(
            f"{self.path} has format version {version}; this kvcli reads version {_VERSION}; name another folder "
            "with --store"
        )


def names(folder: Path) -> list[str]:
    """Names of all contexts of a store, also of damaged ones; none without a store. Raises as `Index.reading` does."""
    with Index(folder).reading() as db:
        return [name for (name,) in db.execute("SELECT name FROM contexts ORDER BY name")]


def libraries(folder: Path) -> set[str]:
    """Names of all libraries of a store, also of one whose documents are damaged; raises as `names` does."""
    query = f"SELECT DISTINCT json_extract(record, '$.notes.{LIBRARY}') FROM records WHERE json_valid(record)"
    with Index(folder).reading() as db:
        return {str(name) for (name,) in db.execute(query)}


def no_context(folder: Path, name: str) -> ContextError:
    """The error that a store has no context of this name."""
    hint = f"{suggestion(name, names(folder))}; 'kvcli contexts list' shows those that are there"
    return ContextError(f"there is no context '{name}' in {folder}{hint}")


def check_name(name: str) -> None:
    """Raises UsageError unless a name is fit for a context."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"'{name}' is no name of a context: letters, digits, dots, underscores and hyphens, at most 100, "
            "the first a letter or a digit"
        )


def name_from(text: str) -> str:
    """A name of a context that resembles a text, such as the name of a file."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:100] or "context"


def _patiently(db: sqlite3.Connection, statement: str) -> sqlite3.Cursor:
    """Executes a statement again until other processes let it."""
    until = time.monotonic() + _MAX_WAIT_S
    while True:
        try:
            return db.execute(statement)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
        time.sleep(_POLL_S)
