"""A store touches nothing in its folder but what it has written, and is not blocked by what it finds there."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import torch
from contexts_made import Maker, execute, needed_by, path_of, tokens

from kvcli.contexts import ContextStore
from kvcli.errors import ContextError

OTHERS = {
    "package.json": '{"name": "mine"}',
    "data.json": "[1, 2]",
    "notes.tmp": "hello",
    "a.json": "{}",
    "a.context.json": "{}",
    "blocks/mine.tmp": "mine",
    "blocks/own.safetensors": "mine",
    "blocks/package.json.tmp": "mine",
    f"blocks/{'0' * 64}.safetensors": "mine",
    f"blocks/{'0' * 64}.safetensors.tmp": "mine",
}


def contents(folder: Path) -> dict[str, str]:
    return {name: (folder / name).read_text() for name in OTHERS}


def test_files_of_others_stay_whatever_a_store_does(maker: Any, store: ContextStore) -> None:
    (store.folder / "blocks").mkdir(parents=True)
    for name, text in OTHERS.items():
        (store.folder / name).write_text(text)
    made: Maker = maker("rtn")
    context = made.context(tokens(60))
    assert store.names() == []
    store.put(context, name="a", max_bytes=10 * context.snapshot.nbytes)
    store.put(made.context(tokens(60, seed=3)), name="b", max_bytes=10 * context.snapshot.nbytes)
    assert store.names() == ["a", "b"]
    store.prune()
    store.prune(max_bytes=1)
    assert store.names() == []
    assert contents(store.folder) == OTHERS
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


@pytest.mark.parametrize("kind", ["fifo", "dangling link", "folder"])
def test_an_odd_entry_does_not_block_a_store(maker: Any, store: ContextStore, kind: str) -> None:
    made: Maker = maker("rtn")
    store.put(made.context(tokens(60)), name="a")
    folder, odd = store.folder, path_of(store, "a", "last").name
    store.remove("a")
    for path in (folder / "odd.context.json", folder / "pipe.json", folder / "blocks" / f"{odd}.tmp"):
        match kind:
            case "fifo":
                os.mkfifo(path)
            case "dangling link":
                path.symlink_to(folder / "nowhere")
            case _:
                path.mkdir()
    if kind == "folder":
        with pytest.raises(OSError, match=odd):
            store.put(made.context(tokens(60)), name="a")
        path.rmdir()
    store.put(made.context(tokens(60)), name="a")
    assert not (folder / "nowhere").exists()
    assert [context.name for context in store.contexts()] == store.names() == ["a"]
    match = store.find(tokens(60), made.identity)
    assert match is not None
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
        case "fifo":
            os.mkfifo(path)
        case "dangling link":
            path.symlink_to("nowhere")
        case "folder":
            path.mkdir()
        case "text":
            path.write_text("mine " * 1000)
        case "newer":
            store.put(context)
            execute(store, "PRAGMA user_version = 9")
        case _:
            execute(store, "CREATE TABLE mine (x)")
    before = path.read_bytes() if path.is_file() else None
    for use in (store.names, lambda: store.put(context), store.prune, lambda: store.remove("a"), store.check_writable):
        with pytest.raises(ContextError, match=r"sqlite (is no file|is damaged|was not written by kvcli|has format)"):
            use()
    assert before == (path.read_bytes() if path.is_file() else None)


def test_a_context_that_is_replaced_while_it_is_read_is_not_called_damaged(maker: Any, store: ContextStore) -> None:
    made: Maker = maker("rtn")
    store.put(made.context(tokens(60)), name="a")
    match = store.whole("a")
    store.put(made.context(tokens(60, seed=3)), name="a", overwrite=True)
    with pytest.raises(ContextError, match="was replaced by another process; run the same command again"):
        store.load(match)
    assert store.load(store.whole("a")).snapshot.num_tokens == 60


@pytest.mark.parametrize("name", ["a.json", "a.context.json"])
def test_a_store_of_an_earlier_version_is_refused_with_what_to_do(maker: Any, store: ContextStore, name: str) -> None:
    context = maker("rtn").context(tokens(60))
    store.folder.mkdir()
    (store.folder / name).write_text('{"format_version": 3, "block_tokens": 256}')
    for use in (store.names, lambda: store.get("a"), lambda: store.put(context), store.prune, store.check_writable):
        with pytest.raises(ContextError, match=r"an earlier version of kvcli, .* again with 'kvcli compress'"):
            use()
    assert [path.name for path in store.folder.rglob("*.*")] == [name]


def test_a_store_that_is_read_only(maker: Any, store: ContextStore, monkeypatch: Any) -> None:
    made: Maker = maker("rtn")
    store.put(made.context(tokens(60)), name="a")
    connect = sqlite3.connect

    def refuse(path: str, **options: Any) -> Any:
        """As for a user who may not write; root may."""
        return connect(path.replace("mode=rwc", "mode=ro").replace("mode=rw", "mode=ro"), **options)

    monkeypatch.setattr("os.access", lambda path, mode: False)
    monkeypatch.setattr("sqlite3.connect", refuse)
    fetched = store.fetch(tokens(60), made.identity)
    assert fetched is not None
    assert (fetched[0].num_tokens, store.names(), store.damages(["a"])) == (60, ["a"], {})
    for use in (lambda: store.put(made.context(tokens(40))), store.prune, lambda: store.remove("a")):
        with pytest.raises(ContextError, match="is read-only: nothing can be stored or removed"):
            use()


@pytest.mark.parametrize("length", [40, 61, 90, 130])
@pytest.mark.parametrize("name", ["fp16", "kivi", "squat", "qjl", "turboquant", "commvq"])
def test_going_on_from_the_middle_equals_reading_the_same_chunks(
    maker: Any, store: ContextStore, name: str, length: int
) -> None:
    """The oracle read the stored text in the same chunks, removed what the prompt does not share, and went on."""
    made: Maker = maker(name)
    stored = torch.cat((tokens(length), tokens(50, seed=5)))
    prompt = torch.cat((tokens(length), tokens(40, seed=6)))
    store.put(made.context(stored), name="a")
    fetched = store.fetch(prompt[:-1], made.identity)
    if fetched is None:
        pytest.skip("the method's state was computed from later tokens, or no whole block is shared")
    match, context = fetched
    assert 0 < match.num_tokens <= length
    oracle = made.read(stored)
    oracle.crop(match.num_tokens - len(stored))
    assert made.greedy(made.session.load_cache(context), prompt) == made.greedy(oracle, prompt)
