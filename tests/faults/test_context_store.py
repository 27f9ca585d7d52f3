"""Damage, kills, and several processes at once: one line, and nothing lost."""

from __future__ import annotations

import json
import multiprocessing
import random
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from contexts_made import Maker, tokens
from folders import edit, flip
from kills import moments, run_and_kill

from kvcli.cache.context import Context
from kvcli.contexts import ContextStore
from kvcli.contexts.content import read_context, write_content
from kvcli.contexts.lock import lock
from kvcli.contexts.manifest import Manifest, write_manifest
from kvcli.errors import ContextError, KvcliError
from kvcli.files import write_sealed

WINDOW = {"residual_length": 6, "flush_block": 1}


@pytest.fixture
def two(maker: Any, store: ContextStore) -> Maker:
    """Two contexts in the store: `a` and `b`, which begin alike."""
    made: Maker = maker("rtn", **WINDOW)
    for name, seed in (("a", 5), ("b", 6)):
        ids = torch.cat((tokens(50), tokens(40, seed)))
        store.put(made.context(ids), name=name)
    return made


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


@pytest.mark.parametrize("part", ["tokens", "first", "block", "last"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_one_line_and_other_contexts_stay(
    two: Maker, store: ContextStore, part: str, damage: str
) -> None:
    manifest = store.get("a")
    file = manifest.blocks[-1] if part == "block" else getattr(manifest, part)
    shared = part == "first"
    path = store.folder / "blocks" / f"{file.digest}.safetensors"
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
    manifest = match.manifest
    for file in (manifest.blocks[-1], manifest.last):
        (store.folder / "blocks" / f"{file.digest}.safetensors").unlink()
    assert store.load(match).snapshot.num_tokens == 50


@pytest.mark.parametrize("damage", [*DAMAGES, "edited", "version"])
def test_a_damaged_manifest_is_passed_over_and_keeps_its_files(two: Maker, store: ContextStore, damage: str) -> None:
    path = store.folder / "a.json"
    held = set(store.usage().held)
    if damage == "missing":
        return
    if damage == "edited":
        edit(path, lambda values: values["counts"].update(lengths=[89]))
    elif damage == "version":
        edit(path, lambda values: values.update(format_version=9), seal=True)
    else:
        DAMAGES[damage][0](path)
    with pytest.raises(ContextError, match=r"a\.json"):
        store.get("a")
    said: list[str] = []
    match = store.find(torch.cat((tokens(50), tokens(40, 5))), two.identity, said.append)
    assert match is not None
    assert (match.manifest.name, match.num_tokens) == ("b", 50)
    if damage != "empty":  # nothing tells how it began
        assert len(said) == 1
        assert "a.json" in said[0]
    assert set(store.damages(store.names())) == {"a"}
    if damage != "empty":
        store.prune()
        assert set(store.usage().held) == held
    store.remove("a")
    store.prune()
    assert store.names() == ["b"]
    assert set(store.usage().held) == {file.digest for file in store.get("b").files}


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values["counts"].update(coded_keys=[5]),
        lambda values: values["counts"].update(lengths=[90, 90]),
        lambda values: values.update(block_tokens=0),
        lambda values: values.update(block_tokens="16"),
        lambda values: values.update(blocks=values["blocks"][:-1]),
        lambda values: values["blocks"].append({"digest": "../../x", "bytes": 3}),
        lambda values: values["blocks"][0].update(bytes=None),
        lambda values: values.update(identity=[]),
        lambda values: values.pop("tokens"),
        lambda values: values.update(window_bytes=1.5),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(
    two: Maker, store: ContextStore, change: Callable[[Any], Any]
) -> None:
    edit(store.folder / "a.json", change, seal=True)
    with pytest.raises(ContextError, match=r"a\.json is damaged"):
        store.get("a")


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values.update(first=values["last"]),
        lambda values: values.update(last=values["first"]),
        lambda values: values.update(tokens=values["last"]),
        lambda values: values["blocks"].reverse(),
        lambda values: values["blocks"].__setitem__(0, values["last"]),
        lambda values: values["counts"].update(lengths=[89]),
        lambda values: values["identity"].update(method="none"),
    ],
)
def test_files_that_do_not_belong_together_are_refused(
    two: Maker, store: ContextStore, change: Callable[[Any], Any]
) -> None:
    """A manifest whose checksum agrees, of somebody who can write it: refused, or other tokens of the right shapes."""
    edit(store.folder / "a.json", change, seal=True)
    try:
        context = store.load(store.whole("a"))
        two.session.load_cache(context)
    except ContextError as error:
        assert "\n" not in str(error)  # noqa: PT017
    except Exception as error:
        assert type(error).__name__ == "CacheError"  # noqa: PT017
    else:
        assert change({"blocks": [1, 2]}) is None


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
    def refused(alone: bool) -> None:
        with (
            pytest.raises(ContextError, match="other kvcli processes use"),
            lock(tmp_path, alone=alone, max_seconds=0.1),
        ):
            pass

    with lock(tmp_path, alone=False), lock(tmp_path, alone=False):
        refused(alone=True)
    with lock(tmp_path, alone=True):
        refused(alone=False)
        refused(alone=True)
    with lock(tmp_path, alone=True):
        pass


ODD_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2, 3, 10**6, 2**31, 2**63, 10**400, 0.5, 1e308, float("nan"), float("inf"), "", "x",
    "0" * 64, "../../etc/passwd", "\x00", "\ud800", [], [[]], [1, 2], {}, {"x": {}},
)  # fmt: skip


def places(values: Any) -> list[tuple[Any, Any]]:
    """Every list or object inside of plain values with each of its indices."""
    keys = list(values) if isinstance(values, dict) else list(range(len(values))) if isinstance(values, list) else []
    return [(values, key) for key in keys] + [place for key in keys for place in places(values[key])]


def test_manifests_with_odd_values_are_read_or_refused(two: Maker, store: ContextStore) -> None:
    """Whatever a sealed manifest says: an error of kvcli in one line, or a context that the session takes."""
    path, chance, refused = store.folder / "a.json", random.Random(0), 0
    good = path.read_text()
    ids = torch.cat((tokens(50), tokens(40, 5)))
    for _ in range(300):
        values = json.loads(good)
        holder, key = chance.choice(places(values))
        holder[key] = chance.choice(ODD_VALUES)
        del values["sha256"]
        write_sealed(path, values)
        started = time.monotonic()
        try:
            store.find(ids, two.identity)
            two.session.load_cache(store.load(store.whole("a", two.identity)))
        except KvcliError as error:
            refused += 1
            assert "\n" not in str(error)  # noqa: PT017
        assert time.monotonic() - started < 5
        store.usage()
    assert refused > 200
    path.write_text(good)
    assert store.damages(["a", "b"]) == {}


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
