"""Copies of a cache, tensors made in inference mode, and the bytes that a cache reports."""

import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvcli
from kvcli.errors import CacheError
from kvcli.seam.versions import with_cache

METHODS = ("fp16", "kivi-2", "squat-pre-2", "qjl", "rtn-2")
GROUPS = {"group_size": 8, "residual_length": 16}
SETTINGS = {"kivi-2": GROUPS, "squat-2": {**GROUPS, "subspace_dim": 4}, "squat-pre-2": {**GROUPS, "subspace_dim": 4}}


def attach(model: Any, method: str) -> Any:
    window = {"residual_length": 8, "sink_length": 2, "flush_block": 1}
    return kvcli.attach(model, method, **SETTINGS.get(method, window))


def ids(count: int, seed: int = 0, batch: int = 1) -> torch.Tensor:
    return torch.randint(3, 97, (batch, count), generator=torch.Generator().manual_seed(seed))


def filled(model: Any, session: Any) -> Any:
    """A cache that has read 60 tokens and one more."""
    cache = session.new_cache()
    for count in (60, 1):
        model(ids(count), **with_cache(cache))
    return cache


def storages(root: Any) -> dict[int, int]:
    """Bytes of the tensors reachable from an object, by address of their storage; a model is not entered."""
    seen, found, stack = set(), {}, [root]
    while stack:
        x = stack.pop()
        if id(x) in seen or isinstance(x, (torch.nn.Module, type)) or type(x).__name__ in ("Seam", "Rope"):
            continue
        seen.add(id(x))
        if isinstance(x, torch.Tensor):
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        elif isinstance(x, dict):
            stack += x.values()
        elif isinstance(x, (list, tuple)):
            stack += x
        elif type(x).__module__.startswith("kvcli"):
            stack += vars(x).values()
    return {address: size for address, size in found.items() if size}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("method", METHODS)
def test_a_deep_copy_shares_everything_but_its_tokens(tiny_model: Any, method: str, mode: Any) -> None:
    with attach(tiny_model, method) as session, mode():
        filled(tiny_model, session)
    with attach(tiny_model, method) as session, torch.no_grad():
        with mode():
            cache = filled(tiny_model, session)
        copied = copy.deepcopy(cache)
        assert copied._seam is cache._seam
        assert copied._codecs is not None
        assert all(a is b for a, b in zip(copied._codecs, cache._codecs, strict=True))
        assert all(a.codec is b.codec for a, b in zip(copied.layers, cache.layers, strict=True))
        assert copied.spec is cache.spec
        assert copied.config is cache.config
        modules = [vars(layer)["attention"].module for layer in copied.compressed]
        assert all(any(module is other for other in tiny_model.modules()) for module in modules)
        assert not storages(copied).keys() & storages(cache).keys()
        assert sum(storages(copied).values()) == sum(storages(cache).values())
        # each goes on by itself, as if the other did not exist
        first, second = (tiny_model(ids(20, seed), **with_cache(c)).logits for seed, c in ((1, cache), (2, copied)))
        expected = tiny_model(ids(20, 2), **with_cache(filled(tiny_model, session))).logits
        assert torch.equal(second, expected)
        assert not torch.equal(first, second)
    for detached in (cache, copied):
        with pytest.raises(CacheError, match="detached"):
            tiny_model(ids(1), **with_cache(detached))


def test_an_empty_cache_is_copied_too_and_pickling_one_says_why_not(tiny_model: Any) -> None:
    with attach(tiny_model, "qjl") as session, torch.no_grad():
        copied = copy.deepcopy(session.new_cache())
        tiny_model(ids(30), **with_cache(copied))
        assert copied.get_seq_length() == 30
        for save in (pickle.dumps, lambda cache: torch.save(cache, io.BytesIO())):
            with pytest.raises(CacheError, match="cannot be pickled"):
                save(session.new_cache())


@pytest.mark.parametrize("method", METHODS)
def test_modes_of_autograd_alternate_over_one_cache(tiny_model: Any, method: str) -> None:
    """i: inference mode, o: no_grad, p: neither; tokens enough for growth, and rows are reordered in between."""
    modes = {"i": torch.inference_mode, "o": torch.no_grad, "p": torch.enable_grad}

    def run(session: Any, order: str) -> torch.Tensor:
        cache, outputs = session.new_cache(), []
        for seed, mode in enumerate(order):
            with modes[mode]():
                for count in (40, 1):
                    logits = tiny_model(ids(count, seed, batch=2), **with_cache(cache)).logits
                    outputs.append(logits.detach().clone())
                cache.reorder_cache(torch.tensor([1, 0]))
                cache.layers[0].offload()
                cache.layers[0].prefetch()
        return torch.cat(outputs, dim=1)

    with attach(tiny_model, method) as session:
        expected = run(session, "ooooo")
        for order in ("iopoi", "pipip", "oiopp"):
            assert torch.equal(run(session, order), expected)


@pytest.mark.parametrize("use", [lambda cache: None, lambda cache: cache.reorder_cache(torch.tensor([1, 0]))])
@pytest.mark.parametrize("method", METHODS)
def test_every_byte_of_a_cache_is_reported(tiny_model: Any, method: str, use: Callable[[Any], None]) -> None:
    with attach(tiny_model, method) as session, torch.no_grad():
        cache, mask = session.new_cache(), torch.ones(2, 303, dtype=torch.long)
        mask[0, :7] = 0
        for count, seen in ((300, 300), (1, 301), (1, 302), (1, 303)):
            tiny_model(ids(count, batch=2), attention_mask=mask[:, :seen], **with_cache(cache))
        use(cache)
        assert cache.memory().allocated_bytes == sum(storages(cache).values())


def test_a_deleted_cache_frees_its_tables(tiny_model: Any) -> None:
    with attach(tiny_model, "squat-pre-2") as session, torch.no_grad():
        gc.collect()
        before = {id(x) for x in gc.get_objects() if issubclass(type(x), torch.Tensor)}
        cache = session.new_cache()
        tiny_model(ids(200), **with_cache(cache))
        tiny_model(ids(1), **with_cache(cache))
        codecs = {id(x) for codec in session.codecs for coder in (codec.key, codec.value)
                  for group in coder._encoded_groups.values() for x in group.tensors().values()}  # fmt: skip
        del cache
        gc.collect()
        left = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and id(x) not in before | codecs]
        assert sum(x.nbytes for x in left) < 4096
