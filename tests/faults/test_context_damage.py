"""Blocks, records and the index of a store that are damaged: one line, and other contexts stay."""

import random
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contexts_made import TWO, Maker, blocks_of, execute, flip, forge, needed_by, path_of, text, tokens
from folders import ODD_VALUES

from kvcli.cache.snapshot import Snapshot
from kvcli.contexts import ContextStore
from kvcli.errors import CacheError, ContextError, KvcliError

DAMAGES: tuple[tuple[Callable[[Path], Any], str], ...] = (
    (flip, "damaged"),
    (lambda path: flip(path, 3), "damaged"),
    (lambda path: path.write_bytes(path.read_bytes()[:-3]), "truncated"),
    (lambda path: path.write_bytes(b""), "truncated"),
    (Path.unlink, "missing"),
)


@pytest.mark.parametrize("part", ["tokens", "first", "coded", "last"])
def test_a_damaged_file_is_one_line_and_other_contexts_stay(two: Maker, store: ContextStore, part: str) -> None:
    """Fault (files): a file of the store damaged, truncated or missing. Result: one line that names context, file and
    remedy; storing the same again repairs it.
    """
    shared, path = part == "first", path_of(store, "a", part)
    good = path.read_bytes()
    for harm, said in DAMAGES:
        harm(path)
        with pytest.raises(ContextError, match=rf"^[^\n]*{said}[^\n]*kvcli contexts rm a[^\n]*$"):
            store.load(store.whole("a", two.identity))
        assert set(store.damages(store.names())) == ({"a", "b"} if shared else {"a"})
        store.prune()
        if not shared:
            assert store.load(store.whole("b", two.identity)).input_ids is not None
        store.put(two.context(TWO["a"]), name="a", overwrite=True)  # the same again heals it
        assert path.read_bytes() == good
        assert store.damages(store.names()) == {}


def test_a_block_that_vanishes_while_it_is_looked_at_is_told_like_a_missing_one(
    two: Maker, store: ContextStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = path_of(store, "a", "last")
    path.unlink()
    monkeypatch.setattr(Path, "is_file", lambda _: True)
    with pytest.raises(ContextError, match=r"context 'a' is damaged: .* cannot be read"):
        store.load(store.whole("a", two.identity))


def test_a_part_is_loaded_without_files_of_the_rest(two: Maker, store: ContextStore) -> None:
    match = store.find(text(50, 7), two.identity)
    assert match is not None
    assert match.num_tokens == 50
    for part in ("coded", "last"):
        path_of(store, match.context.name, part).unlink()
    assert store.load(match).snapshot.num_tokens == 50


@pytest.mark.parametrize(
    "harm",
    [
        lambda store: forge(store, "a", lambda values: values["counts"].update(lengths=[89]), seal=False),
        lambda store: forge(store, "a", lambda values: values.update(format_version=9)),
        lambda store: execute(store, "UPDATE records SET record = substr(record, 1, 99) WHERE context = 1"),
        lambda store: execute(store, "UPDATE records SET record = '' WHERE context = 1"),
    ],
    ids=["edited", "version", "truncated", "empty"],
)
def test_a_damaged_record_is_passed_over_and_keeps_its_blocks(two: Maker, store: ContextStore, harm: Any) -> None:
    """Fault (files): a record of the store damaged or edited. Result: passed over when a prefix is looked for, refused
    by name.
    """
    before, other, said = blocks_of(store), {block.digest for block in store.get("b").record.blocks}, list[str]()
    harm(store)
    with pytest.raises(ContextError, match=r"context 'a' (is damaged|has format version 9).*kvcli contexts rm a"):
        store.get("a")
    match = store.find(TWO["a"], two.identity, said.append)
    assert match is not None
    assert (match.context.name, match.num_tokens) == ("b", 50)
    assert ["context 'a'" in line for line in said] == [True]
    assert set(store.damages(store.names())) == {"a"}
    store.prune()
    assert blocks_of(store) == before
    store.remove("a")
    assert store.names() == ["b"]
    assert blocks_of(store) == needed_by(store) == other


@pytest.mark.parametrize(
    "change",
    [
        *(lambda values, x=x: values["counts"].update(x) for x in ({"coded_keys": [5]}, {"lengths": [90, 90]})),
        *(lambda values, x=x: values.update(part_tokens=x) for x in (0, "16")),
        lambda values: values["coded"].pop(),
        lambda values: values["coded"].append({"digest": "../../x", "bytes": 3}),
        *(lambda values, x=x: values["coded"][0].update(x) for x in ({"digest": "../../x"}, {"bytes": None})),
        lambda values: values.update(identity=[]),
        lambda values: values.pop("tokens"),
        lambda values: values.update(tokens=None),
        lambda values: values.update(bytes_of={"keys": 1.5}),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(two: Maker, store: ContextStore, change: Any) -> None:
    forge(store, "a", change)
    with pytest.raises(ContextError, match=r"context 'a' is (damaged|no single sequence with its token ids)"):
        store.get("a")


def refused(use: Callable[[], Any]) -> bool:
    """Whether a call raises an error of kvcli, in one line; no other error may be raised."""
    try:
        use()
    except KvcliError as error:
        assert "\n" not in str(error)  # noqa: PT017
        return True
    return False


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
def test_blocks_that_do_not_belong_together_are_refused(two: Maker, store: ContextStore, change: Any) -> None:
    """A record whose checksum agrees, of somebody who can write it: refused, or other tokens of the right shapes."""
    forge(store, "a", change)
    if not refused(lambda: two.session.load_cache(store.load(store.whole("a")))):
        assert change({"coded": [1, 2]}) is None


def places(values: Any) -> list[tuple[Any, Any]]:
    """Every list or object inside of plain values with each of its indices."""
    keys = list(values) if isinstance(values, dict) else list(range(len(values))) if isinstance(values, list) else []
    return [(values, key) for key in keys] + [place for key in keys for place in places(values[key])]


def test_records_with_odd_values_are_read_or_refused(two: Maker, store: ContextStore) -> None:
    """Whatever a sealed record says: an error of kvcli in one line, or a context that the session takes."""
    chance, count = random.Random(0), 0
    ((good,),) = execute(store, "SELECT record FROM records WHERE context = 1")

    def change(values: Any) -> None:
        holder, key = chance.choice(places(values))
        holder[key] = chance.choice(ODD_VALUES)

    def use() -> None:
        store.find(TWO["a"], two.identity)
        two.session.load_cache(store.load(store.whole("a", two.identity)))

    for _ in range(300):
        execute(store, "UPDATE records SET record = ? WHERE context = 1", good)
        forge(store, "a", change)
        started = time.process_time()
        count += refused(use)
        assert time.process_time() - started < 5
        store.sizes(), store.shared(), store.contexts()
    assert count > 200
    execute(store, "UPDATE records SET record = ? WHERE context = 1", good)
    assert store.damages(["a", "b"]) == {}


def test_flipped_bytes_of_the_index_lose_no_block_and_give_no_other_tokens(
    two: Maker, store: ContextStore, tmp_path: Path
) -> None:
    """An error of kvcli in one line, or the right tokens; `rm` and `prune` remove no block of what is left.

    Fault (files): the index of the store damaged. Result: refused in one line, or the right tokens; no block that a
    context needs is removed.
    """
    chance, count = random.Random(0), 0
    index, blocks = store.folder / "index.sqlite", store.folder / "blocks"
    good, needed = index.read_bytes(), {block.digest for block in store.get("b").record.blocks}
    shutil.copytree(blocks, tmp_path / "kept")
    uses: tuple[Callable[[], Any], ...] = (
        lambda: store.find(TWO["a"], two.identity),
        lambda: store.damages(store.names()),
        lambda: (store.contexts(), store.sizes(), store.shared()),
        store.prune,
        lambda: store.remove("a"),
    )
    for i in range(300):
        damaged = bytearray(good)
        for _ in range(chance.choice((1, 1, 3, 40))):
            damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        index.write_bytes(damaged)
        count += sum(refused(use) for use in uses)
        for name, ids in TWO.items():
            loaded: list[Any] = []
            count += refused(lambda name=name, to=loaded: to.append(store.load(store.whole(name, two.identity))))
            assert all(torch.equal(context.input_ids[0], ids) for context in loaded), i
        assert needed <= blocks_of(store), i
        shutil.copytree(tmp_path / "kept", blocks, dirs_exist_ok=True)
        for path in store.folder.glob("index.sqlite-*"):
            path.unlink()
    assert count > 100


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("layers.0.keys", torch.Tensor.double, "is torch.float64, but the model is torch.float32"),
        ("ids", lambda x: x + 10**9, "the model knows 0 to 96"),
        ("ids", lambda x: x - 50, "the model knows 0 to 96"),
        ("positions", lambda x: x.flip(1), "positions of row 0 are negative or not in order"),
        ("positions", lambda x: x - 2**30, "positions of row 0 are negative or not in order"),
    ],
)
def test_a_context_that_contradicts_itself_is_refused_though_its_checksums_agree(
    maker: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    message: str,
) -> None:
    made: Maker = maker("rtn")
    context = made.context(tokens(60))
    tensors: dict[str, Any] = {**context.snapshot.tensors, "ids": context.input_ids}
    tensors[name], counts = change(tensors[name]), context.snapshot.counts
    forged = replace(context, input_ids=tensors.pop("ids"), snapshot=Snapshot(counts, tensors))
    with monkeypatch.context() as patched:  # what writes checks as what reads does
        patched.setattr(Snapshot, "check_positions", lambda self: None)
        forged.save(tmp_path / "c.safetensors")
    with pytest.raises(CacheError, match=message):
        made.session.load_cache(tmp_path / "c.safetensors")
