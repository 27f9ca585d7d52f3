"""Files and manifests of the store that are damaged: one line, and other contexts stay."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contexts_made import Maker, tokens
from folders import edit, flip

from kvcli.cache.snapshot import Snapshot
from kvcli.contexts import ContextStore
from kvcli.errors import CacheError, ContextError, KvcliError
from kvcli.storage.manifest import write_sealed


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
    path = store.folder / "a.context.json"
    held = set(store.usage().held)
    if damage == "missing":
        return
    if damage == "edited":
        edit(path, lambda values: values["counts"].update(lengths=[89]))
    elif damage == "version":
        edit(path, lambda values: values.update(format_version=9), seal=True)
    else:
        DAMAGES[damage][0](path)
    with pytest.raises(ContextError, match=r"a\.context\.json"):
        store.get("a")
    said: list[str] = []
    match = store.find(torch.cat((tokens(50), tokens(40, 5))), two.identity, said.append)
    assert match is not None
    assert (match.manifest.name, match.num_tokens) == ("b", 50)
    if damage != "empty":  # nothing tells how it began
        assert len(said) == 1
        assert "a.context.json" in said[0]
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
    edit(store.folder / "a.context.json", change, seal=True)
    with pytest.raises(ContextError, match=r"a\.context\.json is damaged"):
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
    edit(store.folder / "a.context.json", change, seal=True)
    try:
        context = store.load(store.whole("a"))
        two.session.load_cache(context)
    except ContextError as error:
        assert "\n" not in str(error)  # noqa: PT017
    except Exception as error:
        assert type(error).__name__ == "CacheError"  # noqa: PT017
    else:
        assert change({"blocks": [1, 2]}) is None


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
    path, chance, refused = store.folder / "a.context.json", random.Random(0), 0
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
