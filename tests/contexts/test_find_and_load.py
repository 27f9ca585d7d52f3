"""What is found of a stored context, and that going on from it equals going on from a cropped cache."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contexts_made import WINDOW, Maker, execute, tokens
from passes import assert_equal
from torch import Tensor

from kvcli.cache.identity import CacheIdentity
from kvcli.cache.record import usable_length
from kvcli.contexts import ContextStore
from kvcli.errors import CacheError, ContextError
from kvcli.registry import METHODS

LENGTH = 90


def test_a_part_that_is_fetched_leaves_a_window_to_be_read_and_a_whole_context_does_not(
    maker: Any, store: ContextStore
) -> None:
    """A context that is used whole has its own tokens in full precision."""
    made: Maker = maker("rtn", **WINDOW)
    store.put(made.context(tokens(50)))

    def fetched(prompt: Tensor, window: int) -> int:
        found = store.fetch(prompt, made.identity, window=window)
        assert found is not None
        assert found[0].num_tokens == found[1].snapshot.num_tokens
        return found[0].num_tokens

    longer = torch.cat((tokens(50), tokens(3, seed=9)))
    assert fetched(longer, 0) == fetched(longer, 6) == 50
    assert fetched(tokens(49), 0) == 49
    assert fetched(tokens(49), 6) == 34


def branch(ids: Tensor, common: int, count: int = 20) -> Tensor:
    """A text with the first `common` tokens of another, then others."""
    other = tokens(count, seed=9)
    other[0] = ids[common] % 90 + 4 if common < len(ids) else other[0]
    return torch.cat((ids[:common], other))


@pytest.mark.parametrize("method", METHODS)
def test_what_is_found_goes_on_as_the_cache_cropped_to_it(maker: Any, store: ContextStore, method: str) -> None:
    """The cropped cache read the stored text in the same chunks, and lost what the prompt does not share."""
    made: Maker = maker(method)
    ids = tokens(LENGTH)
    snapshot = made.snapshot(ids)
    store.put(made.context(ids))
    assert store.find(ids[:0], made.identity) is None
    for common in (1, 2, 17, 18, 19, 33, 34, 50, 66, 81, 82, 83, 89, 90):
        prompt = branch(ids, common)
        match = store.find(prompt[:-1], made.identity)
        assert (0 if match is None else match.num_tokens) == usable_length(snapshot.counts, 16, common)
        if match is None:
            assert 2 + (common - 2) // 16 * 16 < max(18, snapshot.counts.observed[0])
            continue
        assert match.is_whole == (common == LENGTH)
        cache, loaded = made.session.new_cache(), store.load(match)
        cache.restore(snapshot)
        if not match.is_whole:
            cache.crop(match.num_tokens - LENGTH)
        assert_equal(loaded.snapshot, cache.snapshot())
        assert made.greedy(made.session.load_cache(loaded), prompt, 2) == made.greedy(cache, prompt, 2)


def test_no_tokens_have_none_in_common_with_a_short_context(maker: Any, store: ContextStore) -> None:
    made: Maker = maker("kivi")
    for length in (3, 17):
        store.put(made.context(tokens(length, seed=length)))
    assert store.find(tokens(1)[:0], made.identity) is None


@pytest.mark.parametrize("method", METHODS)
def test_every_length_that_is_of_use_is_one_to_which_a_cache_can_be_cropped(maker: Any, method: str) -> None:
    for length in (1, 2, 3, 18, 19, 30, 90):
        counts = maker(method).snapshot(tokens(length)).counts
        coded = max(*counts.coded_keys, *counts.coded_values)
        usable = [usable_length(counts, 16, common) for common in range(length + 1)]
        assert all(use <= common for common, use in enumerate(usable))
        assert usable[length] == length
        for use in filter(None, usable):
            counts.without(length - use)
            after_sinks = max(0, use - counts.sinks)
            assert after_sinks >= coded or after_sinks % 16 == 0


def test_blocks_and_whole_windows_are_used(maker: Any) -> None:
    counts = maker("fp16", **WINDOW).snapshot(tokens(90)).counts
    assert counts.coded_keys == (82,)
    expected = {0: 0, 1: 0, 17: 0, 18: 18, 33: 18, 34: 34, 66: 66, 82: 82, 83: 82, 84: 84, 85: 85, 89: 89, 90: 90}
    assert {common: usable_length(counts, 16, common) for common in expected} == expected


def test_a_state_of_later_tokens_is_not_used_for_earlier_ones(maker: Any, store: ContextStore) -> None:
    """SQuat's and QJL's state is computed from all tokens of the passes up to the first that encoded some."""
    for method in ("squat", "qjl"):
        made: Maker = maker(method)
        ids = tokens(90)
        cache = made.read(ids, chunk=40)
        observed = cache.snapshot().counts.observed[0]
        assert observed >= 40
        store.put(made.context(ids, cache))
        assert store.find(branch(ids, observed - 1), made.identity) is None
        assert store.find(branch(ids, 70), made.identity).num_tokens == 66  # type: ignore[union-attr]
        with pytest.raises(CacheError):
            cache.snapshot().prefix(34)


def test_another_identity_is_passed_over_and_refused_by_name(maker: Any, store: ContextStore) -> None:
    """Fault: a context of another model, dtype, RoPE, method, setting, artifact or tokenizer. Result: refused;
    the message names what differs, with both values.
    """
    made: Maker = maker("rtn")
    ids, identity = tokens(40), made.identity
    store.put(made.context(ids), name="a")
    for changes, said in (
        ({"fingerprint": identity.fingerprint[:17] + "3c00" * ((len(identity.fingerprint) - 17) // 4)}, "weights"),
        ({"weights": "0"}, "weights differ beside those of its key and value projections"),
        ({"config": {**identity.config, "residual_length": 7}}, "residual_length"),
        ({"codecs": {"fitted": "0"}}, "without an artifact"),
        ({"tokenizer": "0"}, "another tokenizer"),
        ({"chat_template": "0"}, "another chat template"),
    ):
        other = replace(identity, **changes)
        assert store.find(ids, other) is None, said
        with pytest.raises(ContextError, match=said):
            store.whole("a", other)
    renamed = replace(identity, model="./a/copy")
    assert store.find(ids, renamed) is not None
    assert store.whole("a", renamed).num_tokens == 40


def test_an_index_that_names_other_tokens_is_not_believed(maker: Any, store: ContextStore) -> None:
    made: Maker = maker("rtn")
    ids, other = tokens(60), tokens(60, seed=3)
    store.put(made.context(ids), name="a")
    store.put(made.context(other), name="b")
    (a,), (b,) = execute(store, "SELECT id FROM contexts ORDER BY name")
    execute(store, "DELETE FROM prefixes WHERE context = ?", b)
    execute(store, "UPDATE prefixes SET context = ? WHERE context = ?", b, a)
    execute(store, "UPDATE records SET tail = (SELECT tail FROM records WHERE context = ?) WHERE context = ?", a, b)
    said: list[str] = []
    assert store.find(ids, made.identity, said.append) is None
    assert "'b' is passed over: its tokens are not those that the index says" in said[0]
    assert set(store.damages(["a", "b"])) == {"a", "b"}


class Oracle:
    """What is to be found, from the token ids of every context, compared one by one."""

    def __init__(self, store: ContextStore, identity: CacheIdentity) -> None:
        contexts = [context for context in store.contexts() if context.difference(identity) is None]
        self.known = [(context, store.token_ids(context).tolist()) for context in contexts]  # the last used first

    def find(self, wanted: list[int]) -> tuple[str, int] | None:
        best: tuple[str, int] | None = None
        for context, ids in self.known:
            shorter = min(len(ids), len(wanted))
            common = next((i for i in range(shorter) if ids[i] != wanted[i]), shorter)
            length = usable_length(context.record.counts, context.record.part_tokens, common)
            enough = length >= min(16, len(wanted)) or length == len(ids)
            if length > (best[1] if best else 0) and enough:
                best = context.name, length
        return best


@pytest.mark.parametrize("names", [("rtn", "fp16"), ("kivi", "squat"), ("qjl", "commvq")])
def test_what_is_found_is_what_a_comparison_token_by_token_finds(
    maker: Any, tmp_path: Path, names: tuple[str, str]
) -> None:
    """The longest, and of equals the last used: of texts, also very short ones, that branch off each other at many
    lengths, of two methods, with blocks of two sizes.
    """
    chance = random.Random(0)
    texts = [tokens(90), *(tokens(length) for length in (3, 15, 16, 17) for _ in names), tokens(40, seed=1)]
    for _ in range(20):
        text = chance.choice(texts)
        texts.append(branch(text, chance.randrange(len(text) + 1), chance.randrange(1, 40)))
    identities, store = [], ContextStore(tmp_path / "s", block_tokens=16)
    for i, name in enumerate(names):
        made: Maker = maker(name, **(WINDOW if name in ("rtn", "fp16") else {}))
        identities.append(made.identity)
        for j, text in enumerate(texts[i::2]):
            writer = ContextStore(store.folder, block_tokens=chance.choice((16, 32)))
            writer.put(made.context(text, made.read(text, chunk=chance.choice((16, 32, 90)))), name=f"{name}-{j}")
    for time, (context,) in enumerate(execute(store, "SELECT id FROM contexts ORDER BY random()")):
        execute(store, "UPDATE contexts SET used = ? WHERE id = ?", time % 5, context)
    oracles, found = [(identity, Oracle(store, identity)) for identity in identities], 0
    for text in [*texts, *(branch(text, chance.randrange(len(text) + 1)) for text in texts * 2)]:
        for wanted in (text, text[: chance.randrange(1, 20)]):
            for identity, oracle in oracles:
                match, expected = store.find(wanted, identity), oracle.find(wanted.tolist())
                assert (match and (match.context.name, match.num_tokens)) == expected
                found += expected is not None
    assert found > 150
