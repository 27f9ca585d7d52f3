"""Kills in the store, and several processes at once: nothing is lost."""

from __future__ import annotations

import multiprocessing
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from contexts_made import Maker, tokens
from kills import moments, run_and_kill

from kvcli.cache.context import Context
from kvcli.contexts import ContextStore
from kvcli.contexts.content import read_context, write_content
from kvcli.contexts.manifest import Manifest, write_manifest
from kvcli.errors import ContextError
from kvcli.storage.locks import lock


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
        assert set(made.usage().held) == {file.digest for name in made.names() for file in made.get(name).files}
        loaded = made.load(made.whole("new", two.identity))
        assert torch.equal(loaded.input_ids[0], ids)  # type: ignore[index]
    assert False in seen


def test_kills_while_removing(two: Maker, store: ContextStore, tmp_path: Path) -> None:
    contexts = {name: store.load(store.whole(name)) for name in ("a", "b")}

    def fresh(name: str) -> ContextStore:
        made = ContextStore(tmp_path / name, block_tokens=16)
        for old, context in contexts.items():
            made.put(context, name=old)
        return made

    for moment in range(1, 8):
        made = fresh(f"store-{moment}")
        run_and_kill(lambda made=made: made.remove("a"), made.folder, moment)
        assert made.damages(made.names()) == {}
        assert "b" in made.names()
        made.prune()
        assert made.damages(made.names()) == {}


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
        for manifest in store.manifests(failures.put):
            try:
                store.load(store.whole(manifest.name))
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


def test_who_removes_waits_for_who_reads(tmp_path: Path) -> None:
    busy = ContextError("other kvcli processes use it")

    def refused(alone: bool) -> None:
        with (
            pytest.raises(ContextError, match="other kvcli processes use"),
            lock(tmp_path, busy, shared=not alone, wait_s=0.1),
        ):
            pass

    with lock(tmp_path, busy, shared=True), lock(tmp_path, busy, shared=True):
        refused(alone=True)
    with lock(tmp_path, busy):
        refused(alone=False)
        refused(alone=True)
    with lock(tmp_path, busy):
        pass


def test_pruning_waits_for_a_context_that_is_being_stored(two: Maker, store: ContextStore, monkeypatch: Any) -> None:
    """Its files are there, and no manifest names them yet."""
    threads = []

    def write(folder: Path, manifest: Manifest) -> None:
        threads.append(threading.Thread(target=ContextStore(folder).prune))
        threads[0].start()
        threads[0].join(0.3)
        assert threads[0].is_alive()
        write_manifest(folder, manifest)

    monkeypatch.setattr("kvcli.contexts.store.write_manifest", write)
    store.put(two.context(tokens(60, 30)), name="new")
    threads[0].join()
    assert store.damages(["a", "b", "new"]) == {}


def test_removing_waits_for_a_context_that_is_being_loaded(two: Maker, store: ContextStore, monkeypatch: Any) -> None:
    threads = []

    def read(*arguments: Any) -> Any:
        threads.append(threading.Thread(target=store.remove, args=("a",)))
        threads[0].start()
        threads[0].join(0.3)
        assert threads[0].is_alive()
        return read_context(*arguments)

    monkeypatch.setattr("kvcli.contexts.store.read_context", read)
    assert store.load(store.whole("a")).snapshot.num_tokens == 90
    threads[0].join()
    assert store.names() == ["b"]


def test_two_names_given_at_once_are_one_after_the_other(two: Maker, store: ContextStore, monkeypatch: Any) -> None:
    """Two contexts that want the same name: the second is refused, however late it finds out."""
    first, second = two.context(tokens(60, 30)), two.context(tokens(60, 31))
    other = ContextStore(store.folder, block_tokens=16)

    def write(*arguments: Any) -> Any:
        monkeypatch.undo()
        other.put(first, name="new")
        return write_content(*arguments)

    monkeypatch.setattr("kvcli.contexts.store.write_content", write)
    with pytest.raises(ContextError, match="of other tokens or another model already"):
        store.put(second, name="new")
    assert torch.equal(store.token_ids(store.get("new")), tokens(60, 30))
