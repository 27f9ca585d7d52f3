"""A store touches nothing in its folder but what it has written, and is not blocked by what it finds there."""

import os
import resource
import shutil
import sqlite3
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from contexts_made import Maker, execute, needed_by, path_of, tokens

from kvcli.contexts import ContextStore, index
from kvcli.contexts.index import Index, names
from kvcli.errors import ContextError

OTHERS = ["package.json", "notes.tmp", "a.json", "a.context.json", "blocks/mine.tmp", "blocks/own.safetensors"]
OTHERS += ["blocks/package.json.tmp", f"blocks/{'0' * 64}.safetensors", f"blocks/{'0' * 64}.safetensors.tmp"]


def test_files_of_others_stay_whatever_a_store_does(maker: Any, store: ContextStore) -> None:
    """Fault (files): pipes, links, folders and files of others in a store, or in the index's place. Result: left as
    they are; they block nothing but what has their name.
    """
    (store.folder / "blocks").mkdir(parents=True)
    for name in OTHERS:
        (store.folder / name).write_text('{"name": "mine"}')
    assert store.names() == []
    for seed, name in enumerate("ab"):
        store.put(maker("rtn").context(tokens(60, seed)), name=name, max_bytes=10**9)
    assert store.names() == ["a", "b"]
    store.prune()
    store.prune(max_bytes=1)
    assert store.names() == []
    assert {(store.folder / name).read_text() for name in OTHERS} == {'{"name": "mine"}'}
    here = {str(path.relative_to(store.folder)) for path in store.folder.rglob("*")}
    assert here == {*OTHERS, "blocks", "index.sqlite"}


def test_what_a_killed_process_left_is_removed(maker: Any, store: ContextStore) -> None:
    """Rows without files, files that no context needs, and those that are half written: of blocks that have a row."""
    store.put(maker("rtn").context(tokens(60)), name="a")
    half = path_of(store, "a", "first").with_suffix(".safetensors.tmp")
    for digest in ("0" * 64, "1" * 64):
        execute(store, "INSERT INTO blocks VALUES (?, 3)", digest)
    left = [half, store.folder / "blocks" / f"{'0' * 64}.safetensors"]
    for path in left:
        path.write_text("half")
    assert store.sizes()[1] == 4
    assert store.prune().freed_bytes == 8
    assert not any(path.exists() for path in left)
    assert {digest for (digest,) in execute(store, "SELECT digest FROM blocks")} == needed_by(store)


def test_an_index_on_a_full_disk_says_so(maker: Any, store: ContextStore, tmp_path: Path) -> None:
    """After kill -9 of a writer, where SQLite cannot make its shared memory of 32 KiB."""
    store.put(maker("rtn").context(tokens(60)), name="a")
    killed = tmp_path / "killed"
    killed.mkdir()
    with sqlite3.connect(store.folder / "index.sqlite") as db:
        db.execute("UPDATE contexts SET used = 0")
        db.commit()
        for path in store.folder.glob("index.sqlite*"):
            if not path.name.endswith("-shm"):
                shutil.copy(path, killed)
    db.close()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        with pytest.raises(ContextError, match="no space is left on its disk"):
            ContextStore(killed).names()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert ContextStore(killed).names() == ["a"]


def make_odd(path: Path, kind: str) -> None:
    """Makes a pipe, a link to nowhere or a folder."""
    {"fifo": os.mkfifo, "dangling link": lambda path: path.symlink_to("nowhere"), "folder": Path.mkdir}[kind](path)


@pytest.mark.parametrize("kind", ["fifo", "dangling link", "folder"])
def test_an_odd_entry_does_not_block_a_store(maker: Any, store: ContextStore, kind: str) -> None:
    made: Maker = maker("rtn")
    context = made.context(tokens(60))
    store.put(context, name="a")
    odd = path_of(store, "a", "last").name
    store.remove("a")
    for name in ("odd.context.json", "pipe.json", f"blocks/{odd}.tmp"):
        make_odd(store.folder / name, kind)
    if kind == "folder":
        with pytest.raises(OSError, match=odd):
            store.put(context, name="a")
        (store.folder / name).rmdir()
    store.put(context, name="a")
    assert not list(store.folder.rglob("nowhere"))
    assert [context.name for context in store.contexts()] == store.names() == ["a"]
    assert store.find(tokens(60), made.identity) is not None
    assert store.damages(store.names()) == {}
    store.put(made.context(tokens(60, seed=3)), name="b", max_bytes=10**9)
    assert store.prune(max_bytes=1).evicted == ("a", "b")
    with pytest.raises(ContextError, match="no context 'odd'"):
        store.remove("odd")


@pytest.mark.parametrize("kind", ["fifo", "dangling link", "folder", "text", "index of others", "newer"])
def test_something_else_in_the_place_of_the_index_is_refused_and_kept(
    maker: Any, store: ContextStore, kind: str
) -> None:
    context, path = maker("rtn").context(tokens(60)), store.folder / "index.sqlite"
    store.folder.mkdir()
    match kind:
        case "text":
            path.write_text("mine " * 1000)
        case "newer":
            store.put(context)
            execute(store, "PRAGMA user_version = 9")
        case "index of others":
            execute(store, "CREATE TABLE mine (x)")
        case _:
            make_odd(path, kind)
    before = path.read_bytes() if path.is_file() else None
    for use in (store.names, lambda: store.put(context), store.prune, lambda: store.remove("a"), store.check_writable):
        with pytest.raises(ContextError, match=r"sqlite (is no file|is damaged|was not written by kvcli|has format)"):
            use()
    assert before == (path.read_bytes() if path.is_file() else None)


def test_a_context_that_is_replaced_while_it_is_read_is_not_called_damaged(maker: Any, store: ContextStore) -> None:
    store.put(maker("rtn").context(tokens(60)), name="a")
    match = store.whole("a")
    store.put(maker("rtn").context(tokens(60, seed=3)), name="a", overwrite=True)
    with pytest.raises(ContextError, match="was replaced by another process; run the same command again"):
        store.load(match)
    assert store.load(store.whole("a")).snapshot.num_tokens == 60


def test_a_store_that_is_read_only(maker: Any, store: ContextStore, monkeypatch: Any) -> None:
    made: Maker = maker("rtn")
    store.put(made.context(tokens(60)), name="a")
    connect = sqlite3.connect

    def refuse(path: str, **options: Any) -> Any:
        """As for a user who may not write; root may."""
        return connect(path.replace("mode=rwc", "mode=ro").replace("mode=rw", "mode=ro"), **options)

    monkeypatch.setattr("os.access", lambda path, mode: False)
    monkeypatch.setattr("sqlite3.connect", refuse)
    match, _ = store.fetch(tokens(60), made.identity)  # type: ignore[misc]
    assert (match.num_tokens, store.names(), store.damages(["a"])) == (60, ["a"], {})
    for use in (lambda: store.put(made.context(tokens(40))), store.prune, lambda: store.remove("a")):
        with pytest.raises(ContextError, match="is read-only: nothing can be stored or removed"):
            use()


def test_an_index_that_two_processes_make_at_once_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One asks what the file is while the other one makes its tables."""
    patiently, others = index._patiently, list[Thread]()

    def other() -> None:
        with Index(tmp_path).writing():
            pass

    def asked(db: Any, statement: str) -> Any:
        found = patiently(db, statement)
        if statement == "PRAGMA user_version" and not others:
            others.append(Thread(target=other))
            others[0].start()
            others[0].join(0.3)
        return found

    monkeypatch.setattr(index, "_patiently", asked)
    with Index(tmp_path).writing():
        pass
    others[0].join()
    assert names(tmp_path) == []
