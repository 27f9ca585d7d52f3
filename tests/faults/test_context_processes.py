"""Kills in the store, and several processes at once: nothing is lost."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from contexts_made import Maker, blocks_of, needed_by, tokens
from kills import moments, run_and_kill

from kvcli.cache.context import Context
from kvcli.contexts import ContextStore
from kvcli.errors import ContextError


def test_kills_while_storing(two: Maker, store: ContextStore, tmp_path: Path) -> None:
    """Whenever it is killed, the store is whole, with the new context or without it; storing again completes it."""
    ids = torch.cat((tokens(50), tokens(60, 9)))
    two.context(ids).save(tmp_path / "new.safetensors")

    def work(folder: Path) -> None:
        ContextStore(folder, block_tokens=16).put(Context.load(tmp_path / "new.safetensors"), name="new")

    def fresh(name: str) -> ContextStore:
        made = ContextStore(tmp_path / name, block_tokens=16)
        for old in ("a", "b"):
            made.put(store.load(store.whole(old)), name=old)
        return made

    counted = fresh("counted")
    seen = set()
    for moment in moments(lambda: work(counted.folder), counted.folder):
        made = fresh(f"store-{moment}")
        run_and_kill(lambda folder=made.folder: work(folder), made.folder, moment)
        assert made.damages(made.names()) == {}
        assert set(made.names()) - {"new"} == {"a", "b"}
        seen.add("new" in made.names())
        work(made.folder)
        made.prune()
        assert made.damages(["a", "b", "new"]) == {}
        assert not list(made.folder.rglob("*.tmp"))
        assert blocks_of(made) == needed_by(made)
        loaded = made.load(made.whole("new", two.identity))
        assert torch.equal(loaded.input_ids[0], ids)  # type: ignore[index]
    assert False in seen


@pytest.mark.parametrize(
    "work",
    [
        lambda store: store.remove("a"),
        lambda store: store.prune(max_bytes=store.get("b").record.nbytes),
        lambda store: store.put(store.load(store.whole("b")), name="a", overwrite=True),
    ],
    ids=["remove", "prune", "overwrite"],
)
def test_kills_while_removing(
    two: Maker, store: ContextStore, tmp_path: Path, work: Callable[[ContextStore], Any]
) -> None:
    contexts = {name: store.load(store.whole(name)) for name in ("a", "b")}

    def fresh(name: str) -> ContextStore:
        made = ContextStore(tmp_path / name, block_tokens=16)
        for old, context in contexts.items():
            made.put(context, name=old)
        return made

    counted, seen = fresh("counted"), set()
    for moment in moments(lambda: work(counted), counted.folder):
        made = fresh(f"store-{moment}")
        run_and_kill(lambda made=made: work(made), made.folder, moment)
        assert made.damages(made.names()) == {}
        assert "b" in made.names()
        seen.add((*made.names(), made.get("a").record.tokens if "a" in made.names() else None))
        made.prune()
        assert made.damages(made.names()) == {}
        assert blocks_of(made) == needed_by(made)
        assert not list(made.folder.rglob("*.tmp"))
    assert len(seen) == 2


def _put_many(folder: str, file: str, first: int, ready: Any) -> None:
    store, context = ContextStore(folder, block_tokens=16), Context.load(file)
    ready.wait()
    for i in range(first, first + 12):
        store.put(context, name=f"context-{i}")
        if i % 4 == 3:
            store.prune()


def _load_many(folder: str, count: int, ready: Any, failures: Any) -> None:
    store = ContextStore(folder, block_tokens=16)
    ready.wait()
    for _ in range(count):
        for context in store.contexts(failures.put):
            try:
                store.load(store.whole(context.name))
            except ContextError as error:
                failures.put(str(error))


def test_two_processes_that_store_and_prune_at_once_lose_nothing(
    two: Maker, store: ContextStore, tmp_path: Path
) -> None:
    """Two writers, whose files are partly the same, with a reader and with pruning in between."""
    files = []
    for i in range(2):
        ids = torch.cat((tokens(50), tokens(60, 20 + i)))
        files.append(str(tmp_path / f"{i}.safetensors"))
        two.context(ids).save(files[-1])
    fork = multiprocessing.get_context("fork")
    ready, failures = fork.Event(), fork.Queue()
    workers = [
        fork.Process(target=_put_many, args=(str(store.folder), file, 12 * i, ready)) for i, file in enumerate(files)
    ]
    workers.append(fork.Process(target=_load_many, args=(str(store.folder), 5, ready, failures)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on: a fork of a process with threads
        for worker in workers:
            worker.start()
    ready.set()
    for worker in workers:
        worker.join(120)
        assert worker.exitcode == 0
    assert failures.empty()
    assert set(store.names()) == {"a", "b", *(f"context-{i}" for i in range(24))}
    assert store.damages(store.names()) == {}
    store.prune()
    assert store.damages(store.names()) == {}


def _replace_and_remove(folder: str, files: list[str], stop: Any) -> None:
    store, contexts = ContextStore(folder, block_tokens=16), [Context.load(file) for file in files]
    while not stop.is_set():
        for context in contexts:
            store.put(context, name="new", overwrite=True)
        store.remove("new")


def test_who_reads_what_is_replaced_and_removed_is_told_so(two: Maker, store: ContextStore, tmp_path: Path) -> None:
    """Never called damaged, never other tokens; a look-up by tokens goes on to what is there."""
    texts = [torch.cat((tokens(50), tokens(60, 20 + i))) for i in range(2)]
    files = [str(tmp_path / f"{i}.safetensors") for i in range(2)]
    for ids, file in zip(texts, files, strict=True):
        two.context(ids).save(file)
    fork = multiprocessing.get_context("fork")
    stop, outcomes = fork.Event(), dict.fromkeys(("whole", "replaced", "removed", "no context"), 0)
    worker = fork.Process(target=_replace_and_remove, args=(str(store.folder), files, stop))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on: a fork of a process with threads
        worker.start()
    try:
        until = time.monotonic() + 20
        while time.monotonic() < until and (outcomes["whole"] < 30 or outcomes["no context"] < 3):
            try:
                context = store.load(store.whole("new"))
            except ContextError as error:
                assert any(said in str(error) for said in outcomes), error  # noqa: PT017
                outcomes[next(said for said in outcomes if said in str(error))] += 1
            else:
                assert any(torch.equal(context.input_ids[0], ids) for ids in texts)  # type: ignore[index]
                outcomes["whole"] += 1
            fetched = store.fetch(torch.cat((texts[0], tokens(3))), two.identity)
            assert fetched is not None
            assert fetched[0].num_tokens >= 50
            assert torch.equal(fetched[1].input_ids[0], texts[0][: fetched[0].num_tokens])  # type: ignore[index]
            assert not any("damaged" in said for said in store.damages(store.names()).values())
    finally:
        stop.set()
        worker.join(60)
    assert worker.exitcode == 0
    assert outcomes["whole"]
    assert store.damages(store.names()) == {}


def test_pruning_waits_for_a_context_that_is_being_stored(two: Maker, store: ContextStore, monkeypatch: Any) -> None:
    """Its files are there, and the index does not name it yet."""
    from kvcli.contexts.store import _insert

    threads = []

    def insert(*arguments: Any) -> None:
        threads.append(threading.Thread(target=ContextStore(store.folder).prune))
        threads[0].start()
        threads[0].join(0.3)
        assert threads[0].is_alive()
        assert set(store.names()) == {"a", "b"}  # who reads does not wait
        _insert(*arguments)

    monkeypatch.setattr("kvcli.contexts.store._insert", insert)
    store.put(two.context(tokens(60, 30)), name="new")
    threads[0].join()
    assert store.damages(["a", "b", "new"]) == {}


def test_what_a_context_needs_may_go_just_before_it_is_stored(
    two: Maker, store: ContextStore, monkeypatch: Any
) -> None:
    """Blocks that were there, and rows that are new: what is missing is written, and stored all the same."""
    contexts = {name: store.load(store.whole(name)) for name in ("a", "b")}
    writing, calls = store._index.writing, []

    def write() -> Any:
        calls.append(1)
        if len(calls) == 2:  # between the rows of its blocks and the row of the context
            ContextStore(store.folder).remove("a", "b")
        return writing()

    monkeypatch.setattr(store._index, "writing", write)
    store.put(contexts["a"], name="again")
    assert len(calls) == 4
    assert store.names() == ["again"]
    assert store.damages(["again"]) == {}
    assert blocks_of(store) == needed_by(store)


def test_two_names_given_at_once_are_one_after_the_other(two: Maker, store: ContextStore, monkeypatch: Any) -> None:
    """Two contexts that want the same name: the second is refused, however late it finds out."""
    first, second = two.context(tokens(60, 30)), two.context(tokens(60, 31))
    other, writing = ContextStore(store.folder, block_tokens=16), store._index.writing

    def write() -> Any:
        monkeypatch.undo()
        other.put(first, name="new")
        return writing()

    monkeypatch.setattr(store._index, "writing", write)
    with pytest.raises(ContextError, match="of other tokens or another model already"):
        store.put(second, name="new")
    assert torch.equal(store.token_ids(store.get("new")), tokens(60, 30))


def test_a_store_that_others_write_to_is_read_at_once_and_waited_for(
    two: Maker, store: ContextStore, monkeypatch: Any
) -> None:
    with closing(sqlite3.connect(store.folder / "index.sqlite", isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        started = time.monotonic()
        assert store.load(store.whole("a")).snapshot.num_tokens == 90
        assert store.names() == ["a", "b"]
        assert time.monotonic() - started < 5
        monkeypatch.setattr("kvcli.contexts.index._MAX_WAIT_S", 0.3)
        with pytest.raises(ContextError, match=r"other kvcli processes use .*; wait until they have ended"):
            store.remove("a")
        monkeypatch.undo()
        # a parent such as nohup may ignore the signal, and children inherit that
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            store.remove("a")
        signal.signal(signal.SIGINT, handler)
        assert time.monotonic() - started < 2
    store.remove("a")
    assert store.names() == ["b"]
