"""Snapshots of a cache: what is taken out and put into an empty one goes on with the very same numbers."""

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
from factories import make_model
from parts import DEVICE
from passes import assert_equal, filled, go_on, ids, mask_of, read
from pydantic import TypeAdapter
from torch import Tensor

import kvcli
from kvcli.attention.generation import SamplingConfig
from kvcli.cache.record import SnapshotCounts
from kvcli.cache.snapshot import Snapshot
from kvcli.errors import CacheError
from kvcli.registry import METHODS
from kvcli.seam.versions import with_cache


def through_json(snapshot: Snapshot) -> Snapshot:
    """A copy, its counts as a file has them."""
    counts = TypeAdapter(SnapshotCounts).validate_json(json.dumps(asdict(snapshot.counts)))
    return Snapshot(counts, {name: x.clone() for name, x in snapshot.tensors.items()})


def restored(session: Any, snapshot: Snapshot) -> Any:
    cache = session.new_cache()
    cache.restore(through_json(snapshot))
    return cache


def assert_goes_on(session: Any, cache: Any, mask: Tensor) -> None:
    """A cache restored from a snapshot holds and gives what the first one does, bit for bit."""
    snapshot = cache.snapshot()
    again = restored(session, snapshot)
    assert_equal(again.snapshot(), snapshot)
    for name in ("num_tokens", "code_bytes", "window_bytes", "state_bytes"):
        assert getattr(cache.memory(), name) == getattr(again.memory(), name)
    expected, actual = (go_on(session.model, each, mask) for each in (cache, again))
    assert all(map(torch.equal, actual, expected))
    assert_equal(again.snapshot(), cache.snapshot())


def test_the_next_tokens_need_no_larger_buffers(tiny_model: Any, attach: Any) -> None:
    with attach(tiny_model, "kivi") as session:
        cache, mask = filled(session, 40), mask_of(40)
        again = restored(session, cache.snapshot())
        buffers = [codes for layer in again.compressed for codes in (layer.store.key_codes, layer.store.value_codes)]
        before = [codes.capacity for codes in buffers]
        go_on(tiny_model, again, mask)
        assert [codes.capacity for codes in buffers] == before
        assert min(before) > 40


BORDERS = (1, 2, 3, 9, 10, 11, 17, 18, 19, 25, 26, 27, 66)
"""Lengths with which windows are empty, short, full and at the borders of groups."""


@pytest.mark.parametrize(
    ("methods", "settings", "lengths"),
    [
        *((["fp16", "kivi", "squat-pre"], {"sink_length": x}, (y,)) for x in (0, 2) for y in BORDERS),
        *((["fp16", "rtn", "qjl", "commvq"], {"residual_length": x}, (41, 30)) for x in (0, 1, 64)),
    ],
)
def test_a_restored_cache_goes_on_exactly(
    tiny_model: Any, attach: Any, methods: list[str], settings: Any, lengths: tuple[int, ...]
) -> None:
    """At borders of the window; test_context restores caches of all methods, of rows and in bfloat16, from files."""
    for method in methods:
        with attach(tiny_model, method, **settings) as session:
            assert_goes_on(session, filled(session, *lengths), mask_of(*lengths))


@pytest.mark.parametrize("method", ["kivi", "qjl", "fp8", "squat"])
def test_a_ring_that_went_round_reordered_and_cropped_rows(tiny_model: Any, attach: Any, method: str) -> None:
    with attach(tiny_model, method) as session:
        cache, mask = filled(session, 40, 20), mask_of(40, 20)
        go_on(tiny_model, cache, mask, rounds=(1,) * 13)
        mask = torch.cat((mask, mask.new_ones(2, 13)), dim=1)
        cache.reorder_cache(torch.tensor([1, 0, 1]))
        cache.crop(-3)
        assert_goes_on(session, cache, mask[[1, 0, 1], :-3])


@pytest.mark.parametrize("method", ["rtn", "kivi", "qjl", "commvq"])
def test_after_steps_whose_counts_are_on_the_device(tiny_model: Any, attach: Any, method: str) -> None:
    """Positions of tokens to come were noted; they are no content."""
    greedy = SamplingConfig(max_new_tokens=25)
    with attach(tiny_model, method) as session:
        made = session.generate(ids(2, 60), sampling=greedy, mode="steps")
        snapshot = made.cache.snapshot()
        assert snapshot.tensors["positions"].shape == (2, 84)
        again, more = restored(session, snapshot), torch.cat((made.sequences, ids(2, 5)), dim=1)
        assert_equal(again.snapshot(), snapshot)
        first = session.generate(more, sampling=greedy, cache=made.cache, mode="steps")
        second = session.generate(more, sampling=greedy, cache=again, mode="steps")
        assert torch.equal(first.sequences, second.sequences)
        assert_equal(first.cache.snapshot(), second.cache.snapshot())


@pytest.mark.kernels
@pytest.mark.parametrize("method", ["kivi-2", "qjl", "rtn-2"])
def test_with_kernels(method: str) -> None:
    wide = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "num_hidden_layers": 1}
    model = make_model("llama", **wide).to(DEVICE)
    with kvcli.attach(model, method, impl="fused", sink_length=2, residual_length=32) as session, torch.no_grad():
        cache = session.new_cache()
        model(ids(1, 70).to(DEVICE), **with_cache(cache))
        again = restored(session, cache.snapshot())
        for seed, count in enumerate((1, 5)):
            tokens = ids(1, count, seed).to(DEVICE)
            expected, actual = (model(tokens, **with_cache(x)).logits for x in (cache, again))
            assert torch.equal(expected, actual)
        assert_equal(again.snapshot(), cache.snapshot())


def test_equal_content_has_equal_bytes(tiny_model: Any, attach: Any) -> None:
    """What earlier, longer content left behind in buffers is not part of a snapshot."""
    with attach(tiny_model, "rtn") as session:
        cache = filled(session, 40, 20)
        cache.crop(-10)
        snapshot = cache.snapshot()
        for name, x in snapshot.tensors.items():
            for row, count in enumerate(snapshot.counts.used(name) or ()):
                assert not x[row, :, count:].any(), name
        assert snapshot.counts.lengths == (30, 10)
        assert not snapshot.tensors["positions"][1, 10:].any()
        assert_equal(restored(session, snapshot).snapshot(), snapshot)


def test_a_snapshot_is_a_copy(tiny_model: Any, attach: Any) -> None:
    with attach(tiny_model, "kivi") as session:
        cache, mask = filled(session, 40), mask_of(40)
        snapshot, again = cache.snapshot(), session.new_cache()
        before = through_json(snapshot)
        again.restore(snapshot)
        for each in (cache, again):
            go_on(tiny_model, each, mask)
        assert_equal(snapshot, before)


@pytest.mark.parametrize("method", METHODS)
def test_a_prefix_is_what_crop_leaves(tiny_model: Any, attach: Any, method: str) -> None:
    """Every length: the same content, or refused by both."""
    refused = 0
    with attach(tiny_model, method) as session:
        mask = mask_of(45)
        first = session.new_cache()
        read(tiny_model, first, mask[:, :30])
        go_on(tiny_model, first, mask[:, :30], rounds=(7, 8))
        snapshot = first.snapshot()
        for length in range(1, 46):
            cropped = restored(session, snapshot)
            try:
                cropped.crop(length - 45)
            except CacheError:
                refused += 1
                with pytest.raises(CacheError, match="cannot"):
                    snapshot.prefix(length)
                continue
            prefix, cropped = snapshot.prefix(length), cropped.snapshot()
            assert_equal(through_json(prefix), cropped)
            if length % 8 == 2:
                again = [restored(session, x) for x in (prefix, cropped)]
                assert torch.equal(*(go_on(tiny_model, cache, mask[:, :length])[-1] for cache in again))
        assert (refused > 0) == (snapshot.counts.group > 1 or any(snapshot.counts.observed))


def test_a_prefix_keeps_padding_before_it(tiny_model: Any, attach: Any) -> None:
    with attach(tiny_model, "rtn") as session:
        cache = filled(session, 40, 20)
        cache.batch_select_indices(torch.tensor([1]))
        prefix = cache.snapshot().prefix(15)
        assert prefix.tensors["valid"].tolist() == [[False] * 20 + [True] * 15]
        assert restored(session, prefix).get_seq_length() == 35


def test_what_has_no_snapshot(tiny_model: Any, attach: Any) -> None:
    with attach(tiny_model, "rtn") as session:
        cache = session.new_cache()
        with pytest.raises(CacheError, match="holds no token"):
            cache.snapshot()
        read(tiny_model, cache, mask_of(10, 5))
        with pytest.raises(CacheError, match="prefix is of one sequence"):
            cache.snapshot().prefix(3)
        for length in (0, -1, 11):
            with pytest.raises(CacheError, match=f"a snapshot of 10 tokens has no prefix of {length}"):
                filled(session, 10).snapshot().prefix(length)
        with pytest.raises(CacheError, match="holds 10 tokens; restore into a new one"):
            cache.restore(cache.snapshot())
        hook = tiny_model.model.layers[1].register_forward_pre_hook(lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            read(tiny_model, cache, mask_of(11, 6))
        hook.remove()
        with pytest.raises(CacheError, match="did not reach the last layer"):
            cache.snapshot()


def test_while_tokens_are_made(tiny_model: Any, attach: Any) -> None:
    said = []

    def look(cache: Any) -> None:
        with pytest.raises(CacheError, match="tokens are being made"):
            cache.snapshot()
        said.append(True)

    with attach(tiny_model, "rtn") as session:
        cache = session.new_cache()
        session.generate(
            ids(1, 40),
            sampling=SamplingConfig(max_new_tokens=40),
            cache=cache,
            mode="steps",
            on_tokens=lambda new: look(cache) if cache.passes.step is not None else None,
        )
        assert said
        assert cache.snapshot().num_tokens == 79


NO_PLACE = "which this model and method have no place for"
CHANGES: list[tuple[str, Callable[[Any], Any], str]] = [
    *((name, lambda x: None, f"{name} is missing") for name in ("layers.1.keys", "layers.2.value_codes.scale")),
    ("layers.1.keys", lambda x: x["layers.1.keys"][:, :, 1:], "layers.1.keys is torch.float32"),
    ("layers.0.keys", lambda x: x["layers.0.keys"].half(), "layers.0.values is torch.float32"),
    ("layers.0.keys", lambda x: x["layers.0.keys"].int(), "layers.0.keys is torch.int32"),
    *(
        (name, lambda x: x["layers.0.keys"], f"{name}, {NO_PLACE}")
        for name in ("layers.0.other", "layers.3.keys", "layers.00.keys", "layers.0")
    ),
    ("valid", lambda x: ~x["valid"], "padding marks do not agree"),
    ("valid", lambda x: x["valid"].int(), "padding marks do not agree"),
    ("valid", lambda x: None, "padding marks do not agree"),
    ("positions", lambda x: None, "positions do not agree"),
    ("positions", lambda x: x["positions"].long(), "positions do not agree"),
]


@pytest.mark.parametrize(("name", "change", "said"), CHANGES)
def test_tensors_that_do_not_fit_are_refused(
    tiny_model: Any, attach: Any, name: str, change: Callable[[Any], Any], said: str
) -> None:
    with attach(tiny_model, "rtn") as session:
        snapshot, empty = filled(session, 40).snapshot(), session.new_cache()
        changed = {**snapshot.tensors, name: change(snapshot.tensors)}
        tensors = {key: x for key, x in changed.items() if x is not None}
        with pytest.raises(CacheError, match=said):
            empty.restore(Snapshot(snapshot.counts, tensors))
        assert empty.get_seq_length() == 0
        empty.restore(snapshot)


@pytest.mark.parametrize(
    ("method", "changes", "said"),
    [
        ("rtn", {"sink_length": 3}, "made with sink_length 2, this cache has 3"),
        ("kivi", {"group_size": 16, "residual_length": 16}, "encoded in groups of"),
        ("rtn", {"v_bits": 4}, "layers.0.value_codes.packed is"),
    ],
)
def test_other_settings_are_refused(tiny_model: Any, attach: Any, method: str, changes: Any, said: str) -> None:
    with attach(tiny_model, method) as session:
        snapshot = filled(session, 40).snapshot()
    with attach(tiny_model, method, **changes) as session, pytest.raises(CacheError, match=said):
        session.new_cache().restore(snapshot)


@pytest.mark.parametrize(
    "change",
    [
        *({"lengths": x} for x in ([], [40, 40], [40.0], [-1], [True], [2**50], 40, (3,))),
        *({"coded_keys": (39,)}, {"observed": (41,)}, {"ring": 0}, {"key_group": 0}, {"key_group": 64}, {"more": 1}),
        *({"tokens_per_entry": x} for x in ({"layers.0.key_codes.packed": 0}, 3)),
    ],
)
def test_counts_that_no_cache_has_are_refused(tiny_model: Any, attach: Any, change: dict[str, Any]) -> None:
    with attach(tiny_model, "rtn") as session:
        counts = filled(session, 40).snapshot().counts
    assert SnapshotCounts(**asdict(counts)) == counts
    with pytest.raises(ValueError, match="validation error"):
        SnapshotCounts(**{**asdict(counts), **change})
