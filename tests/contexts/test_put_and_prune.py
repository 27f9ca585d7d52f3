"""What a store holds: equal parts once, within a size, and nothing that no context needs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from contexts_made import WINDOW, Maker, blocks_of, execute, needed_by, text, tokens

from kvcli.cache.blocks import encode, stack_layers, unstack_layers
from kvcli.cache.context import Context
from kvcli.contexts import ContextStore
from kvcli.errors import ContextError, UsageError
from kvcli.seam.versions import with_cache
from kvcli.storage.atomic import flush_to_disk


def files_of(store: ContextStore) -> dict[str, bytes]:
    files = (path for path in store.folder.rglob("*") if path.is_file())
    return {path.name: path.read_bytes() for path in files if not path.name.startswith("index.sqlite")}


def test_layers_of_equal_shape_are_one_tensor() -> None:
    made = {f"layers.{i}.keys": torch.full((1, 2, 3 if i == 2 else 4), float(i)) for i in range(12)}
    made |= {f"layers.{i}.state.x": torch.full((1,), i, dtype=torch.int16) for i in (0, 5)}
    made |= {f"layers.{i}.codes": torch.full((1, 2), i).to(torch.float8_e4m3fn) for i in range(2)}
    made["token_ids"] = torch.arange(3)
    stacked, names = stack_layers(made), ("0-1,3-11.keys", "2.keys", "0,5.state.x", "0-1.codes")
    assert set(stacked) == {*(f"layers.{name}" for name in names), "token_ids"}
    again = unstack_layers(stacked)
    assert again.keys() == made.keys()
    assert all(torch.equal(again[name].float(), x.float()) and again[name].dtype == x.dtype for name, x in made.items())
    for name in ("layers.0-9999.keys", "layers.0-1.keys", "layers.3-1.keys"):
        with pytest.raises(ValueError, match=r"zip\(\)"):
            unstack_layers({name: stacked["layers.2.keys"]})


def test_equal_tensors_are_equal_bytes_in_every_process_and_order() -> None:
    tensors = {"a": torch.ones(2)} | {f"layers.{i}.keys": torch.arange(6).half() + i for i in (1, 2, 3)}
    expected = "635341e0997c29fdf432971325e8b7c11b4acfd2c0c342bf22dedd7aea6ef167"
    for shuffled in (tensors, dict(reversed(tensors.items()))):
        assert encode(shuffled)[0].digest == expected


def test_documents_that_share_a_beginning_store_it_once(maker: Any, store: ContextStore) -> None:
    """Each reads the beginning from the store, and the beginning is there once."""
    made: Maker = maker("rtn", **WINDOW)
    count, reused = 6, []
    for i in range(count):
        ids = text(2 + 4 * 16, seed=100 + i)
        found = store.fetch(ids[:-1], made.identity)
        cache = None if found is None else made.session.load_cache(found[1])
        reused.append(0 if found is None else found[0].num_tokens)
        store.put(made.context(ids, made.read(ids, cache)))
    assert reused == [0] + [66] * (count - 1)
    records = [context.record for context in store.contexts()]
    assert {len(record.coded) for record in records} == {6}
    assert {(record.first, *record.coded[:4]) for record in records} == {(records[0].first, *records[0].coded[:4])}
    assert store.shared() == {block.digest for block in (records[0].first, *records[0].coded[:4])}
    assert len(blocks_of(store)) == 1 + 4 + count * 4
    assert store.sizes() == (sum(path.stat().st_size for path in store.folder.glob("blocks/*")), 0)
    assert store.prune().freed_bytes == 0
    assert store.damages(store.names()) == {}


def test_documents_computed_apart_share_what_is_equal(maker: Any, store: ContextStore) -> None:
    for i in range(3):
        stored = store.put(maker("kivi").context(text(64, seed=100 + i)))
        assert (stored.shared_bytes > 0) == (i > 0)
    assert len({context.record.coded[:3] for context in store.contexts()}) == 1


def test_a_context_stored_again_writes_nothing_new(maker: Any, store: ContextStore) -> None:
    context = maker("fp16", **WINDOW).context(tokens(60))
    first, before = store.put(context), files_of(store)
    again = store.put(context)
    assert (again.name, again.new_bytes, again.shared_bytes) == (first.name, 0, first.new_bytes)
    assert files_of(store) == before


def test_a_name_belongs_to_one_context(maker: Any, store: ContextStore) -> None:
    made: Maker = maker("fp16", **WINDOW)
    first, second = tokens(60), tokens(60, seed=1)
    store.put(made.context(first), name="a")
    with pytest.raises(ContextError, match="other tokens or another model already"):
        store.put(made.context(second), name="a")
    assert torch.equal(store.load(store.whole("a")).input_ids[0], first)  # type: ignore[index]
    store.put(made.context(second), name="a", overwrite=True)
    assert torch.equal(store.load(store.whole("a")).input_ids[0], second)  # type: ignore[index]
    assert blocks_of(store) == needed_by(store)
    for name in ("", "../a", ".a", "a/b", "a b", "x" * 101, "é"):
        for use in (lambda name: store.put(made.context(second), name=name), store.remove):
            with pytest.raises(UsageError, match="no name of a context"):
                use(name)


def test_what_cannot_be_found_again_is_refused(maker: Any, store: ContextStore) -> None:
    made: Maker = maker("fp16", **WINDOW)
    with pytest.raises(ContextError, match="without its token ids"):
        store.put(made.read(tokens(20)).context())
    one, two = tokens(20)[None], tokens(40).view(2, 20)
    padded = (torch.arange(20) >= 5).long()[None]
    for ids, options, said in (
        (two, {}, "one sequence of token ids"),
        (one, {"attention_mask": padded}, "no padding"),
        (one, {"position_ids": torch.arange(3, 23)[None]}, "positions are 0, 1, 2"),
    ):
        cache = made.session.new_cache()
        made.loaded.model(ids, **with_cache(cache), **options)
        with pytest.raises(ContextError, match=said):
            store.put(cache.context(ids))
    assert not store.folder.exists() or not files_of(store)


def test_the_least_recently_used_go_first(maker: Any, store: ContextStore) -> None:
    made: Maker = maker("rtn", **WINDOW)
    for i, name in enumerate("abcd"):
        store.put(made.context(tokens(60, seed=i)), name=name)
        execute(store, "UPDATE contexts SET used = ? WHERE name = ?", 1000 + i, name)
    assert [context.name for context in store.contexts()] == ["d", "c", "b", "a"]
    store.load(store.whole("a"))
    assert [context.name for context in store.contexts()] == ["a", "d", "c", "b"]
    each = store.sizes()[0] // 4
    done = store.prune(3 * each + each // 2)
    assert (done.evicted, store.names()) == (("b",), ["a", "c", "d"])
    assert abs(done.freed_bytes - each) < 200
    stored = store.put(made.context(tokens(60, seed=9)), name="e", max_bytes=2 * each + each // 2)
    assert (stored.evicted, store.names()) == (("c", "d"), ["a", "e"])
    assert store.sizes()[0] <= 2 * each + each // 2
    assert blocks_of(store) == needed_by(store)
    with pytest.raises(ContextError, match="more than the 1000 of the whole store"):
        store.put(made.context(tokens(60, seed=8)), name="f", max_bytes=1000)
    assert store.names() == ["a", "e"]
    assert store.damages(["a", "e"]) == {}


def test_what_contexts_share_stays_until_the_last_one_goes(maker: Any, store: ContextStore) -> None:
    for i in range(3):
        store.put(maker("rtn", **WINDOW).context(text(66, seed=i + 5, more=20)), name=f"c{i}")
    for i in range(3):
        store.remove(f"c{i}")
        assert store.damages(store.names()) == {}
        assert blocks_of(store) == needed_by(store)
    assert files_of(store) == {}
    with pytest.raises(ContextError, match="no context 'c0'"):
        store.remove("c0")


def test_a_chat_that_grows_keeps_one_copy(maker: Any, store: ContextStore) -> None:
    """Saved after every turn under one name: old tails go, blocks stay."""
    made: Maker = maker("commvq")
    ids, cache = tokens(150), None
    for length in (40, 70, 110, 150):
        cache = made.read(ids[:length], cache)
        store.put(made.context(ids[:length], cache), name="chat", overwrite=True)
        assert blocks_of(store) == needed_by(store)
    loaded, prompt = store.load(store.whole("chat", made.identity)), torch.cat((ids, tokens(1)))
    assert made.greedy(made.session.load_cache(loaded), prompt) == made.greedy(cache, prompt)


def test_exported_and_imported_it_is_the_same(maker: Any, store: ContextStore, tmp_path: Path) -> None:
    made: Maker = maker("squat")
    other = ContextStore(tmp_path / "other", block_tokens=16)
    store.put(made.context(tokens(70), source="a.txt"), name="a")
    for name in ("a.safetensors", "again.safetensors"):
        store.load(store.whole("a")).save(tmp_path / name)
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "a.safetensors").read_bytes()
    stored = other.put(Context.load(tmp_path / "a.safetensors"), name="b")
    assert store.get("a").record.model_dump() == stored.record.model_dump()
    assert other.find(tokens(70), made.identity) is not None
    assert files_of(store) == files_of(other)


def test_an_empty_or_missing_store(maker: Any, tmp_path: Path) -> None:
    store, identity = ContextStore(tmp_path / "none"), maker("fp16").identity
    assert store.find(tokens(20), identity) is None
    assert store.fetch(tokens(20), identity) is None
    assert (store.names(), store.contexts(), store.sizes(), store.shared()) == ([], [], (0, 0), set())
    assert store.prune().freed_bytes == 0
    for use in (store.get, store.remove):
        with pytest.raises(ContextError, match="no context 'a'"):
            use("a")
    assert not store.folder.exists()


def test_numbers_of_a_record(maker: Any, store: ContextStore) -> None:
    made: Maker = maker("kivi")
    cache = made.read(tokens(90))
    memory, record = cache.memory(), store.put(made.context(tokens(90), cache, source="report.txt"), name="a").record
    assert record.fp16_bytes == memory.fp16_bytes
    assert record.bits == (memory.key_bits, memory.value_bits)
    assert record.bytes_of["key_codes"] + record.bytes_of["value_codes"] == memory.code_bytes
    assert record.bytes_of["keys"] + record.bytes_of["values"] == memory.window_bytes
    assert (record.notes["source"], record.identity["method"]) == ("report.txt", "kivi")
    assert store.get("a").record.model_dump() == record.model_dump()
    assert record.nbytes == sum(path.stat().st_size for path in store.folder.glob("blocks/*"))


def test_content_is_on_the_disk_before_the_index_names_it(maker: Any, store: ContextStore, monkeypatch: Any) -> None:
    flushed: list[Path] = []

    def flush(path: Path) -> None:
        flushed.append(path)
        assert store.names() == []
        flush_to_disk(path)

    monkeypatch.setattr("kvcli.storage.atomic.flush_to_disk", flush)
    store.put(maker("fp16", **WINDOW).context(tokens(60)), name="a")
    written = {path.name.split(".")[0] for path in flushed if path.name.endswith(".tmp")}
    assert written == needed_by(store) == blocks_of(store)
