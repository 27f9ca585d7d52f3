"""A store touches nothing in its folder but what it has written, and is not blocked by what it finds there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from contexts_made import Maker, tokens

from kvcli.contexts import ContextStore
from kvcli.errors import ContextError

OTHERS = {
    "package.json": '{"name": "mine"}',
    "data.json": "[1, 2]",
    "notes.tmp": "hello",
    "a.json": "{}",
    "blocks/mine.tmp": "mine",
    "blocks/own.safetensors": "mine",
    "blocks/package.json.tmp": "mine",
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
    assert sorted(path.name for path in (store.folder / "blocks").iterdir()) == [
        "mine.tmp",
        "own.safetensors",
        "package.json.tmp",
    ]


def test_what_a_killed_process_left_is_removed(maker: Any, store: ContextStore) -> None:
    store.put(maker("rtn").context(tokens(60)), name="a")
    left = [store.folder / "b.context.json.tmp", store.folder / "blocks" / f"{'0' * 64}.safetensors.17-0a1b2c3d.tmp"]
    for path in left:
        path.write_text("half")
    assert store.prune().freed_bytes == 8
    assert not any(path.exists() for path in left)


@pytest.mark.parametrize("kind", ["fifo", "dangling link", "folder"])
def test_an_odd_entry_does_not_block_a_store(maker: Any, store: ContextStore, kind: str) -> None:
    made: Maker = maker("rtn")
    store.put(made.context(tokens(60)), name="a")
    for path in (store.folder / "odd.context.json", store.folder / "c.context.json.tmp", store.folder / "pipe.json"):
        match kind:
            case "fifo":
                os.mkfifo(path)
            case "dangling link":
                path.symlink_to("nowhere")
            case _:
                path.mkdir()
    assert store.names() == ["a"]
    assert [manifest.name for manifest in store.manifests()] == ["a"]
    match = store.find(tokens(60), made.identity)
    assert match is not None
    assert store.damages(store.names()) == {}
    store.put(made.context(tokens(60, seed=3)), name="b", max_bytes=10**9)
    assert store.prune(max_bytes=1).evicted == ("a", "b")
    with pytest.raises(ContextError, match="no context 'odd'"):
        store.remove("odd")


def test_a_context_that_is_replaced_while_it_is_read_is_not_called_damaged(maker: Any, store: ContextStore) -> None:
    made: Maker = maker("rtn")
    store.put(made.context(tokens(60)), name="a")
    match = store.whole("a")
    store.put(made.context(tokens(60, seed=3)), name="a", overwrite=True)
    with pytest.raises(ContextError, match="was replaced by another process; run the same command again"):
        store.load(match)
    assert store.load(store.whole("a")).snapshot.num_tokens == 60


def test_a_store_of_an_earlier_version_is_refused_with_what_to_do(maker: Any, store: ContextStore) -> None:
    store.put(maker("rtn").context(tokens(60)), name="a")
    (store.folder / "a.context.json").rename(store.folder / "a.json")
    for use in (store.names, lambda: store.get("a")):
        with pytest.raises(ContextError, match=r"rename each to NAME.context.json"):
            use()
    (store.folder / "a.json").rename(store.folder / "a.context.json")
    assert store.damages(store.names()) == {}


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
