"""Kills in the store, and several processes at once: nothing is lost."""

import multiprocessing
import os
import re
import shutil
import signal
import sqlite3
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from contexts_made import Maker, blocks_of, needed_by, text, tokens
from kills import killed

from kvcli.cache.context import Context
from kvcli.contexts import ContextStore
from kvcli.contexts.store import _insert
from kvcli.errors import ContextError


def contents(store: ContextStore) -> dict[str, list[int]]:
    """Token ids by name."""
    return {name: store.token_ids(store.get(name)).tolist() for name in store.names()}


def check_whole(store: ContextStore) -> None:
    """Also: the next prune leaves nothing of what was not finished."""
    assert store.damages(store.names()) == {}
    store.prune()
    assert store.damages(store.names()) == {}
    assert blocks_of(store) == needed_by(store)
    assert not list(store.folder.rglob("*.tmp"))


@pytest.mark.parametrize(
    "work",
    [
        lambda store, new: store.put(new, name="new"),
        lambda store, new: store.put(new, name="a", overwrite=True),
        lambda store, new: store.remove("a"),
        lambda store, new: store.prune(max_bytes=store.get("b").record.nbytes),
    ],
    ids=["store", "overwrite", "remove", "prune"],
)
def test_kills(two: Maker, store: ContextStore, tmp_path: Path, work: Callable[[ContextStore, Context], Any]) -> None:
    """Whenever it is killed, the store is as before or as after; storing again completes it.

    Fault (kills): `contexts rm` or `prune` killed; several processes store, load and prune. Result: every context
    that is left is complete; writers wait for each other, and who reads what is removed or replaced is told so,
    never that it is damaged.
    """

    def opened(folder: Path) -> ContextStore:
        return ContextStore(folder, block_tokens=16)

    new, seen = two.context(text(50, 9, more=60)), []
    copy = partial(shutil.copytree, store.folder)
    for made in map(opened, killed(lambda folder: work(opened(folder), new), tmp_path, copy)):
        check_whole(made)
        seen.append(contents(made))
        after = contents(opened(tmp_path / "counted"))
        if "new" in after:
            work(made, new)
            check_whole(made)
            assert contents(made) == after
    assert all(content in (contents(store), after) for content in seen)
    assert contents(store) in seen
    assert after in seen or "new" in after


@contextmanager
def processes(*works: Callable[[], Any]) -> Iterator[None]:
    """Runs functions in processes of their own, which have to end well."""
    workers = [multiprocessing.get_context("fork").Process(target=work) for work in works]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on: a fork of a process with threads
        for worker in workers:
            worker.start()
    try:
        yield
    finally:
        for worker in workers:
            worker.join(120)
    assert [worker.exitcode for worker in workers] == [0] * len(workers)


def test_two_processes_that_store_and_prune_at_once_lose_nothing(two: Maker, store: ContextStore) -> None:
    """Two writers, whose files are partly the same, with a reader and with pruning in between."""
    contexts, ready = [two.context(text(50, 20 + i, more=60)) for i in range(2)], multiprocessing.Event()

    def put_many(writer: int) -> None:
        ready.wait()
        for i in range(12):
            store.put(contexts[writer], name=f"context-{writer}-{i}")
            if i % 4 == 3:
                store.prune()

    def load_many() -> None:
        ready.wait()
        for _ in range(5):
            for context in store.contexts(pytest.fail):
                store.load(store.whole(context.name))

    with processes(partial(put_many, 0), partial(put_many, 1), load_many):
        ready.set()
    assert len(store.names()) == 2 + 24
    check_whole(store)


def test_who_reads_what_is_replaced_and_removed_is_told_so(two: Maker, store: ContextStore) -> None:
    """Never called damaged, never other tokens; a look-up by tokens goes on to what is there."""
    texts, stop = [text(50, 20 + i, more=60) for i in range(2)], multiprocessing.Event()
    contexts, outcomes = [two.context(ids) for ids in texts], Counter[str]()

    def replace_and_remove() -> None:
        while not stop.is_set():
            for context in contexts:
                store.put(context, name="new", overwrite=True)
            store.remove("new")

    with processes(replace_and_remove):
        until = time.monotonic() + 20
        try:
            while time.monotonic() < until and (outcomes["whole"] < 20 or outcomes["no context"] < 2):
                try:
                    context = store.load(store.whole("new"))
                except ContextError as error:
                    outcomes[re.search("replaced|removed|no context", str(error))[0]] += 1  # type: ignore[index]
                else:
                    assert any(torch.equal(context.input_ids[0], ids) for ids in texts)  # type: ignore[index]
                    outcomes["whole"] += 1
                match, part = store.fetch(torch.cat((texts[0], tokens(3))), two.identity)  # type: ignore[misc]
                assert match.num_tokens >= 50
                assert torch.equal(part.input_ids[0], texts[0][: match.num_tokens])  # type: ignore[index]
                assert not any("damaged" in said for said in store.damages(store.names()).values())
        finally:
            stop.set()
    assert outcomes["whole"]
    assert store.damages(store.names()) == {}


def test_pruning_waits_for_a_context_that_is_being_stored(two: Maker, store: ContextStore, monkeypatch: Any) -> None:
    """Its files are there, and the index does not name it yet."""
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
    context, writing, calls = store.load(store.whole("a")), store._index.writing, []

    def write() -> Any:
        calls.append(1)
        if len(calls) == 2:  # between the rows of its blocks and the row of the context
            ContextStore(store.folder).remove("a", "b")
        return writing()

    monkeypatch.setattr(store._index, "writing", write)
    store.put(context, name="again")
    assert len(calls) == 4
    assert store.names() == ["again"]
    check_whole(store)


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
        assert time.monotonic() - started < 60
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
        assert time.monotonic() - started < 60
    store.remove("a")
    assert store.names() == ["b"]
