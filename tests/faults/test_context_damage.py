"""Blocks, records and the index of a store that are damaged: one line, and other contexts stay."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contexts_made import Maker, blocks_of, execute, flip, forge, needed_by, path_of, tokens

from kvcli.cache.snapshot import Snapshot
from kvcli.contexts import ContextStore
from kvcli.errors import CacheError, ContextError, KvcliError


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def empty(path: Path) -> None:
    path.write_bytes(b"")


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "flipped": (flip, "damaged"),
    "flipped-first": (lambda path: flip(path, 3), "damaged"),
    "truncated": (truncate, "truncated"),
    "empty": (empty, "truncated"),
    "missing": (Path.unlink, "missing"),
}


@pytest.mark.parametrize("part", ["tokens", "first", "coded", "last"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_one_line_and_other_contexts_stay(
    two: Maker, store: ContextStore, part: str, damage: str
) -> None:
    shared, path = part == "first", path_of(store, "a", part)
    good = path.read_bytes()
    harm, said = DAMAGES[damage]
    harm(path)
    with pytest.raises(ContextError, match=said) as caught:
        store.load(store.whole("a", two.identity))
    assert "kvcli contexts rm a" in str(caught.value)
    assert "\n" not in str(caught.value)
    damages = store.damages(store.names())
    assert set(damages) == ({"a", "b"} if shared else {"a"})
    store.prune()
    if not shared:
        assert store.load(store.whole("b", two.identity)).input_ids is not None
    # storing the same again heals it
    ids = torch.cat((tokens(50), tokens(40, 5)))
    store.put(two.context(ids), name="a", overwrite=True)
    assert path.read_bytes() == good
    assert store.damages(store.names()) == {}


def test_a_part_is_loaded_without_files_of_the_rest(two: Maker, store: ContextStore) -> None:
    ids = torch.cat((tokens(50), tokens(40, 7)))
    match = store.find(ids, two.identity)
    assert match is not None
    assert match.num_tokens == 50
    for part in ("coded", "last"):
        path_of(store, match.context.name, part).unlink()
    assert store.load(match).snapshot.num_tokens == 50


@pytest.mark.parametrize("damage", ["edited", "version", "truncated", "empty"])
def test_a_damaged_record_is_passed_over_and_keeps_its_blocks(two: Maker, store: ContextStore, damage: str) -> None:
    before, other = blocks_of(store), {block.digest for block in store.get("b").record.blocks}
    match damage:
        case "edited":
            forge(store, "a", lambda values: values["counts"].update(lengths=[89]), seal=False)
        case "version":
            forge(store, "a", lambda values: values.update(format_version=9))
        case "truncated":
            execute(store, "UPDATE records SET record = substr(record, 1, length(record) - 3) WHERE context = 1")
        case _:
            execute(store, "UPDATE records SET record = '' WHERE context = 1")
    with pytest.raises(ContextError, match=r"context 'a' (is damaged|has format version 9).*kvcli contexts rm a"):
        store.get("a")
    said: list[str] = []
    match = store.find(torch.cat((tokens(50), tokens(40, 5))), two.identity, said.append)
    assert match is not None
    assert (match.context.name, match.num_tokens) == ("b", 50)
    assert len(said) == 1
    assert "context 'a'" in said[0]
    assert set(store.damages(store.names())) == {"a"}
    store.prune()
    assert blocks_of(store) == before
    store.remove("a")
    assert store.names() == ["b"]
    assert blocks_of(store) == needed_by(store) == other


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values["counts"].update(coded_keys=[5]),
        lambda values: values["counts"].update(lengths=[90, 90]),
        lambda values: values.update(part_tokens=0),
        lambda values: values.update(part_tokens="16"),
        lambda values: values.update(coded=values["coded"][:-1]),
        lambda values: values["coded"].append({"digest": "../../x", "bytes": 3}),
        lambda values: values["coded"][0].update(digest="../../x"),
        lambda values: values["coded"][0].update(bytes=None),
        lambda values: values.update(identity=[]),
        lambda values: values.pop("tokens"),
        lambda values: values.update(tokens=None),
        lambda values: values.update(bytes_of={"keys": 1.5}),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(
    two: Maker, store: ContextStore, change: Callable[[Any], Any]
) -> None:
    forge(store, "a", change)
    with pytest.raises(ContextError, match=r"context 'a' is (damaged|no single sequence with its token ids)"):
        store.get("a")


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values.update(first=values["last"]),
        lambda values: values.update(last=values["first"]),
        lambda values: values.update(tokens=values["last"]),
        lambda values: values["coded"].reverse(),
        lambda values: values["coded"].__setitem__(0, values["last"]),
        lambda values: values["counts"].update(lengths=[89]),
        lambda values: values["identity"].update(method="none"),
    ],
)
def test_blocks_that_do_not_belong_together_are_refused(
    two: Maker, store: ContextStore, change: Callable[[Any], Any]
) -> None:
    """A record whose checksum agrees, of somebody who can write it: refused, or other tokens of the right shapes."""
    forge(store, "a", change)
    try:
        context = store.load(store.whole("a"))
        two.session.load_cache(context)
    except KvcliError as error:
        assert "\n" not in str(error)  # noqa: PT017
    else:
        assert change({"coded": [1, 2]}) is None


ODD_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2, 3, 10**6, 2**31, 2**63, 10**400, 0.5, 1e308, float("nan"), float("inf"), "", "x",
    "0" * 64, "../../etc/passwd", "\x00", "\ud800", [], [[]], [1, 2], {}, {"x": {}},
)  # fmt: skip


def places(values: Any) -> list[tuple[Any, Any]]:
    """Every list or object inside of plain values with each of its indices."""
    keys = list(values) if isinstance(values, dict) else list(range(len(values))) if isinstance(values, list) else []
    return [(values, key) for key in keys] + [place for key in keys for place in places(values[key])]


def test_records_with_odd_values_are_read_or_refused(two: Maker, store: ContextStore) -> None:
    """Whatever a sealed record says: an error of kvcli in one line, or a context that the session takes."""
    chance, refused = random.Random(0), 0
    ((good,),) = execute(store, "SELECT record FROM records WHERE context = 1")
    ids = torch.cat((tokens(50), tokens(40, 5)))

    def change(values: Any) -> None:
        holder, key = chance.choice(places(values))
        holder[key] = chance.choice(ODD_VALUES)

    for _ in range(300):
        execute(store, "UPDATE records SET record = ? WHERE context = 1", good)
        forge(store, "a", change)
        started = time.monotonic()
        try:
            store.find(ids, two.identity)
            two.session.load_cache(store.load(store.whole("a", two.identity)))
        except KvcliError as error:
            refused += 1
            assert "\n" not in str(error)  # noqa: PT017
        assert time.monotonic() - started < 5
        store.sizes(), store.shared(), store.contexts()
    assert refused > 200
    execute(store, "UPDATE records SET record = ? WHERE context = 1", good)
    assert store.damages(["a", "b"]) == {}


def test_flipped_bytes_of_the_index_lose_no_block_and_give_no_other_tokens(
    two: Maker, store: ContextStore, tmp_path: Path
) -> None:
    """An error of kvcli in one line, or the right tokens; `rm` and `prune` remove no block of what is left."""
    chance, refused = random.Random(0), 0
    ids = torch.cat((tokens(50), tokens(40, 5)))
    expected = {name: store.load(store.whole(name)).input_ids for name in ("a", "b")}
    good, blocks = (store.folder / "index.sqlite").read_bytes(), store.folder / "blocks"
    shutil.copytree(blocks, tmp_path / "kept")
    needed = {name: {block.digest for block in store.get(name).record.blocks} for name in ("a", "b")}
    for i in range(300):
        damaged = bytearray(good)
        for _ in range(chance.choice((1, 1, 3, 40))):
            damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        (store.folder / "index.sqlite").write_bytes(damaged)
        for use in (
            lambda: store.find(ids, two.identity),
            lambda: store.damages(store.names()),
            lambda: (store.contexts(), store.sizes(), store.shared()),
            store.prune,
            lambda: store.remove("a"),
        ):
            try:
                use()
            except KvcliError as error:
                refused += 1
                assert "\n" not in str(error)  # noqa: PT017
        for name in ("a", "b"):
            try:
                context = store.load(store.whole(name, two.identity))
                assert torch.equal(context.input_ids, expected[name]), i  # type: ignore[arg-type]
            except KvcliError:
                refused += 1
        assert needed["b"] <= blocks_of(store), i
        shutil.rmtree(blocks)
        shutil.copytree(tmp_path / "kept", blocks)
        for path in store.folder.glob("index.sqlite-*"):
            path.unlink()
    assert refused > 100


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("dtype", "is torch.float64, but the model is torch.float32"),
        ("large ids", "the model knows 0 to 96"),
        ("negative ids", "the model knows 0 to 96"),
        ("reversed positions", "positions of row 0 are negative or not in order"),
        ("negative positions", "positions of row 0 are negative or not in order"),
    ],
)
def test_a_context_that_contradicts_itself_is_refused_though_its_checksums_agree(
    maker: Any, tmp_path: Path, change: str, message: str
) -> None:
    made = maker("rtn")
    ids = tokens(60)
    context = made.context(ids)
    tensors, input_ids = dict(context.snapshot.tensors), ids[None].clone()
    match change:
        case "dtype":
            tensors["layers.0.keys"] = tensors["layers.0.keys"].double()
        case "large ids":
            input_ids[0, 7] = 10**9
        case "negative ids":
            input_ids[0, 7] = -5
        case "reversed positions":
            tensors["positions"] = tensors["positions"].flip(1)
        case _:
            tensors["positions"] = tensors["positions"] - 2**30
    forged = replace(context, snapshot=Snapshot(context.snapshot.counts, tensors), input_ids=input_ids)
    forged.save(tmp_path / "c.safetensors")
    with pytest.raises(CacheError, match=message):
        made.session.load_cache(tmp_path / "c.safetensors")
