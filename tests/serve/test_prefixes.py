"""What is read of a prompt does not depend on what was kept of earlier ones."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from contexts_made import Maker
from families import make
from torch import Tensor

import kvcli
from kvcli.attention.generation import SamplingConfig
from kvcli.cache.snapshot import Snapshot
from kvcli.contexts import ContextStore
from kvcli.registry import METHODS
from kvcli.serve import prefixes as module
from kvcli.serve.prefixes import Prefix, Prefixes, boundaries
from kvcli.serve.store import ServedContexts

LONG = 150


@pytest.fixture(autouse=True)
def _short_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UNIT", 16)
    monkeypatch.setattr(module, "_LONG", 4)


@pytest.fixture
def opened(maker: Callable[..., Maker], tmp_path: Path) -> Iterator[Callable[..., tuple[Maker, Prefixes]]]:
    """Prefixes of a method's session, with a store unless told otherwise; closed at the end."""
    made: list[Prefixes] = []

    def open_them(name: str, *, stored: bool = True, hot_bytes: int = 2**30, **changes: Any) -> tuple[Maker, Prefixes]:
        maker_ = maker(name, **changes)
        store = ContextStore(tmp_path / "served") if stored else None
        made.append(Prefixes(maker_.session, ServedContexts(store, maker_.loaded.tokenizer, None, print), hot_bytes))
        return maker_, made[-1]

    yield open_them
    for prefixes in made:
        prefixes.contexts.close()


def tokens(length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 97, (1, length), generator=torch.Generator().manual_seed(seed))


def content(prefix: Prefix) -> Snapshot:
    return prefix.cache.snapshot().prefix(prefix.flushed)


def assert_equal(ours: Snapshot, theirs: Snapshot) -> None:
    assert ours.counts.lengths == theirs.counts.lengths
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, x in ours.tensors.items():
        assert x.shape == theirs.tensors[name].shape, name
        assert torch.equal(x.contiguous().view(torch.uint8), theirs.tensors[name].contiguous().view(torch.uint8)), name


def answer(maker: Maker, prefixes: Prefixes, ids: Tensor, count: int = 6, **read: Any) -> tuple[list[int], Prefix]:
    """An answer as the engine makes it, and the prefix that it went on from, which is kept."""
    prefix = prefixes.read(ids, read.pop("owner", ""), read.pop("keep", True), lambda tokens: None)
    made = maker.session.generate(ids, sampling=SamplingConfig(count), cache=prefix.cache, eos_token_id=[]).sequences
    prefixes.keep(prefix)
    return made[0, ids.shape[1] :].tolist(), prefix


def test_boundaries_are_long_passes_and_then_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LONG", 16)
    assert boundaries(4, 128, 131) == []
    assert boundaries(4, 128, 400) == [132, 260, 388]
    assert boundaries(4, 128, 1300) == [132, 260, 516, 1028, 1156, 1284]
    assert boundaries(4, 128, 4500) == [132, 260, 516, 1028, 2052, 4100, 4228, 4356, 4484]
    for length in range(4000, 9000, 77):
        ends = boundaries(4, 128, length)
        assert length - ends[-1] < 128
        assert boundaries(4, 128, ends[-1]) == ends


@pytest.mark.parametrize("name", METHODS)
def test_an_answer_does_not_depend_on_what_was_kept(name: str, opened: Callable[..., Any]) -> None:
    """From nothing, from memory and from disk, after turns, edits and other prompts in between."""
    maker, prefixes = opened(name)
    first = tokens(LONG)
    longer = torch.cat((first, tokens(41, seed=1)), dim=1)
    edited = first.clone()
    edited[0, 70] += 1
    short, other = first[:, :9], tokens(LONG, seed=2)
    expected = {}
    for key, ids in {"first": first, "longer": longer, "edited": edited, "short": short, "other": other}.items():
        alone = Prefixes(maker.session, ServedContexts(None, maker.loaded.tokenizer, None, print), 0)
        made, prefix = answer(maker, alone, ids)
        assert not prefix.reused
        expected[key] = ids, made, content(prefix) if prefix.flushed else None
        alone.contexts.close()
    found: set[str] = set()
    for key in ("first", "first", "longer", "edited", "first", "short", "other", "longer", "edited", "first"):
        ids, made, snapshot = expected[key]
        ours, prefix = answer(maker, prefixes, ids)
        assert ours == made, key
        if snapshot is not None:
            assert_equal(content(prefix), snapshot)
        found.add(prefix.source)
    assert found >= {"none", "hot"}
    prefixes.contexts.close()
    fresh = Prefixes(maker.session, ServedContexts(prefixes.contexts.store, maker.loaded.tokenizer, None, print), 0)
    for key, (ids, made, snapshot) in expected.items():
        ours, prefix = answer(maker, fresh, ids)
        assert ours == made, key
        if snapshot is not None:
            assert_equal(content(prefix), snapshot)
            assert prefix.source == "disk", key
            assert prefix.reused == prefix.flushed
    fresh.contexts.close()


def test_most_of_a_prompt_is_found_again(opened: Callable[..., Any]) -> None:
    maker, prefixes = opened("kivi", residual_length=16)
    ids = tokens(1610)
    answer(maker, prefixes, ids, 1)
    _, again = answer(maker, prefixes, torch.cat((ids, tokens(8, seed=3)), dim=1), 1)
    assert again.source == "hot"
    assert again.reused > 0.95 * 1618


def test_a_prefix_that_others_go_on_from_stays(opened: Callable[..., Any]) -> None:
    maker, prefixes = opened("kivi", stored=False)
    ids = tokens(LONG)
    answer(maker, prefixes, ids)
    _, branch = answer(maker, prefixes, torch.cat((ids[:, :60], tokens(90, seed=4)), dim=1))
    assert branch.source == "hot"
    assert branch.reused < 61
    _, again = answer(maker, prefixes, ids)
    assert again.reused == again.flushed


def test_owners_have_nothing_in_common(opened: Callable[..., Any]) -> None:
    maker, prefixes = opened("rtn")
    ids = tokens(LONG)
    answer(maker, prefixes, ids, owner="a")
    assert answer(maker, prefixes, ids, owner="b")[1].source == "none"
    assert answer(maker, prefixes, ids)[1].source == "none"
    assert answer(maker, prefixes, ids, owner="a")[1].source == "hot"
    prefixes.contexts.close()
    fresh = Prefixes(maker.session, ServedContexts(prefixes.contexts.store, maker.loaded.tokenizer, None, print), 0)
    assert answer(maker, fresh, ids, owner="c")[1].source == "none"
    assert answer(maker, fresh, ids, owner="b")[1].source == "disk"
    fresh.contexts.close()


def test_what_may_not_be_stored_is_not(opened: Callable[..., Any]) -> None:
    maker, prefixes = opened("rtn")
    answer(maker, prefixes, tokens(LONG), keep=False)
    assert prefixes.contexts.store.names() == []


@pytest.mark.parametrize("hot", [False, True])
def test_what_was_read_of_a_cancelled_request_is_found_again(hot: bool, opened: Callable[..., Any]) -> None:
    """Nor is lost what it went on from."""
    maker, prefixes = opened("rtn", stored=False)
    if hot:
        answer(maker, prefixes, tokens(LONG)[:, :60])

    def check(count: int) -> None:
        if count >= 40:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        prefixes.read(tokens(LONG), "", True, check)
    made, again = answer(maker, prefixes, tokens(LONG))
    assert again.reused >= (80 if hot else 40)
    fresh = Prefixes(maker.session, ServedContexts(None, maker.loaded.tokenizer, None, print), 0)
    assert made == answer(maker, fresh, tokens(LONG))[0]
    fresh.contexts.close()


def test_memory_of_kept_caches_is_limited(opened: Callable[..., Any]) -> None:
    maker, prefixes = opened("rtn", stored=False)
    _, one = answer(maker, prefixes, tokens(LONG))
    prefixes._hot_bytes = int(2.5 * one.nbytes)
    for seed in range(1, 5):
        answer(maker, prefixes, tokens(LONG, seed))
        assert prefixes.hot_bytes <= prefixes._hot_bytes
    assert len(prefixes.hot) == 2
    assert answer(maker, prefixes, tokens(LONG, 4))[1].source == "hot"
    assert answer(maker, prefixes, tokens(4 * LONG, 5))[1].nbytes > prefixes._hot_bytes  # makes no other one go
    assert answer(maker, prefixes, tokens(LONG, 3))[1].source == "hot"
    assert answer(maker, prefixes, tokens(LONG, 0))[1].source == "none"


def test_states_of_earlier_passes_give_way_to_a_small_memory() -> None:
    """The prompt itself is kept, with the states at its end."""
    kept: list[Prefix] = []
    with kvcli.attach(make("gemma3_text"), "rtn", residual_length=8) as session:
        for hot_bytes in (2**30, 0):
            contexts = ServedContexts(None, byte_tokenizer(), None, print)
            prefixes = Prefixes(session, contexts, hot_bytes or kept[0].nbytes - 1)
            prefixes.keep(prefixes.read(tokens(200), "", True, lambda count: None))
            kept += prefixes.hot
            contexts.close()
    assert len(kept) == 2
    assert 1 <= len(kept[1].ends) < len(kept[0].ends)
    assert max(kept[1].ends) == kept[1].flushed


def test_a_full_disk_is_told_and_costs_no_answer(opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    maker, prefixes = opened("rtn")
    told: list[str] = []
    written: list[bool] = []
    prefixes.contexts._say, prefixes.contexts._stored = told.append, written.append

    def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prefixes.contexts.store, "put", full)
    made, _ = answer(maker, prefixes, tokens(LONG))
    prefixes.contexts.close()
    assert len(made) == 6
    assert written == [False]
    assert "No space left" in told[0]


def test_a_damaged_context_is_passed_over(opened: Callable[..., Any]) -> None:
    maker, prefixes = opened("rtn")
    made, _ = answer(maker, prefixes, tokens(LONG))
    prefixes.contexts.close()
    for path in (prefixes.contexts.store.folder / "blocks").iterdir():
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    fresh = Prefixes(maker.session, ServedContexts(prefixes.contexts.store, maker.loaded.tokenizer, None, print), 0)
    again, prefix = answer(maker, fresh, tokens(LONG))
    assert again == made
    assert prefix.source == "none"
    fresh.contexts.close()


def test_of_two_contexts_the_one_that_was_read_alike_is_found(opened: Callable[..., Any]) -> None:
    """The longer one was read in other passes where the prompt needs short ones."""
    maker, prefixes = opened("rtn", residual_length=16)
    ids = tokens(400)
    lengths = (160, 140)  # boundaries at 18, 34, 66, 130, or 98 and 114 in place of the last: sinks of 2, passes of 64
    first, second = (prefixes._boundaries(length - 16) for length in lengths)
    assert set(first) - set(second)
    for length in lengths:
        answer(maker, prefixes, ids[:, :length])
    prefixes.contexts.close()
    fresh = Prefixes(maker.session, ServedContexts(prefixes.contexts.store, maker.loaded.tokenizer, None, print), 0)
    for length in (*lengths, lengths[0]):
        _, prefix = answer(maker, fresh, ids[:, :length])
        assert (prefix.source, prefix.reused) == ("disk", prefix.flushed)
    other_end = torch.cat((ids[:, :105], tokens(35, seed=5)), dim=1)
    assert answer(maker, fresh, other_end)[1].reused == 98  # of the second, though the first was used last
    fresh.contexts.close()


def test_a_context_that_is_used_from_memory_stays_on_disk(opened: Any) -> None:
    """Others go before it; and once it was removed there, it is stored again when it is used next."""
    maker, prefixes = opened("rtn")
    store, texts = prefixes.contexts.store, [tokens(100, seed) for seed in range(3)]

    def use(ids: Tensor) -> str:
        name = answer(maker, prefixes, ids)[1].name
        prefixes.contexts._writer.submit(lambda: None).result()
        return name

    first, second = use(texts[0]), use(texts[1])
    prefixes.contexts._max_bytes = store.sizes()[0]  # both fit, a third one does not
    assert use(texts[0]) == first
    third = use(texts[2])
    assert {*store.names()} == {first, third} != {second, third}
    store.remove(first)
    for _ in range(2):
        use(texts[0])
    assert {*store.names()} == {first, third}
