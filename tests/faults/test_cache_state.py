"""Cropping a cache whose codec keeps a state per sequence, speculative decoding, and passes that break off."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from factories import WINDOW, make_model
from test_cache_copies import attach, ids

import kvcli
from kvcli.artifact.artifact import Artifact
from kvcli.cache import forward
from kvcli.errors import CacheError, UnsupportedModelError, UsageError
from kvcli.registry import get_method
from kvcli.seam.versions import with_cache

STATEFUL = ("squat-2", "squat-pre-2", "qjl")


def feed(model: Any, tokens: torch.Tensor, *caches: Any) -> None:
    with torch.no_grad():
        for cache in caches:
            model(tokens, **with_cache(cache))


def kept(cache: Any, codes: bool = True) -> list[torch.Tensor]:
    """States and codes of all keys."""
    stores, count = [layer.store for layer in cache.layers], cache.sequences.counts.keys.coded[0]
    held = [*(x.state for x in stores), *(x.key_codes.codes.slice(0, count) for x in stores if codes)]
    return [x for each in held for x in each.tensors().values()]


@pytest.mark.parametrize("method", STATEFUL)
def test_tokens_that_a_state_was_computed_from_are_removed_all_or_none(tiny_model: Any, method: str) -> None:
    with attach(tiny_model, method) as session:
        for prompt in (6, 40):  # the state is open, or final
            cache, other = session.new_cache(), session.new_cache()
            feed(tiny_model, ids(prompt), cache, other)
            for crop in (-3, 1):
                with pytest.raises(CacheError, match="state was computed from some of them"):
                    cache.crop(crop)
            feed(tiny_model, ids(30, 1), cache, other)
            assert all(map(torch.equal, kept(cache), kept(other)))  # nothing has changed
        cache.crop(-70)
        feed(tiny_model, ids(50, 1), cache, fresh := session.new_cache())
        assert all(map(torch.equal, kept(cache), kept(fresh)))


def test_rejected_drafts_leave_no_trace(tiny_model: Any) -> None:
    with attach(tiny_model, "qjl") as session:
        cache, plain = session.new_cache(), session.new_cache()
        feed(tiny_model, ids(40), cache, plain)
        feed(tiny_model, ids(6, 7), cache)
        cache.crop(-6)
        states = kept(cache, codes=False)
        feed(tiny_model, ids(20, 1), cache, plain)
        assert all(map(torch.equal, states, kept(plain, codes=False)))


@pytest.mark.parametrize("method", ["kivi-2", *STATEFUL])
@pytest.mark.parametrize("assisted", ["prompt_lookup_num_tokens", "assistant_model"])
def test_speculation_that_cannot_work_is_refused_before_the_first_token(
    tiny_model: Any, method: str, assisted: str
) -> None:
    """Fault: speculative decoding with a method that cannot crop. Result: refused before the first token. Also
    in: test_seam_calls.
    """
    drafts: dict[str, Any] = {assisted: 3 if assisted == "prompt_lookup_num_tokens" else make_model("llama")}
    with kvcli.attach(tiny_model, method) as session, torch.no_grad():
        cache = session.new_cache()
        with pytest.raises(CacheError, match="speculative decoding"):
            tiny_model.generate(ids(20), **with_cache(cache), max_new_tokens=30, **drafts)
        assert cache.get_seq_length() == 0


@pytest.mark.parametrize("method", ["fp16", "rtn-4", "fp8", "commvq"])
def test_speculation_that_works(tiny_model: Any, method: str, tiny_artifact: Callable[[Any], Artifact]) -> None:
    artifact = tiny_artifact(get_method(method)) if method == "commvq" else None
    with kvcli.attach(tiny_model, method, artifact=artifact, **WINDOW) as session, torch.no_grad():
        cache, sampling = session.new_cache(), {"max_new_tokens": 40, "do_sample": False, "prompt_lookup_num_tokens": 4}
        assert tiny_model.generate(ids(30), **with_cache(cache), **sampling).shape == (1, 70)
        assert cache.get_seq_length() == 69


def test_the_state_follows_reordered_rows(tiny_model: Any, prompt: Any) -> None:
    """Of a long and a short row, the long one has a final state; reordering must not swap what may be cropped."""
    with attach(tiny_model, "qjl") as session, torch.no_grad():
        cache = session.new_cache()
        tiny_model(**prompt(40, 6), **with_cache(cache))
        cache.reorder_cache(torch.tensor([1, 0, 0]))
        assert cache.sequences.observed == [6, 40, 40]


def padded(batch: int, past: int, query_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A mask [batch, 1, query_len, slots] and what is valid [batch, slots]; padding is anywhere."""
    slots = past + query_len
    valid = torch.rand(batch, slots, generator=torch.Generator().manual_seed(query_len)) > 0.3
    causal = torch.arange(slots) <= torch.arange(past, slots)[:, None]
    return (valid[:, None] & causal)[:, None], valid


@pytest.mark.parametrize(("past", "query_len"), [(0, 1), (0, 9), (5, 1), (5, 3), (13, 16), (0, 17)])
def test_every_wrong_entry_of_a_mask_is_seen(monkeypatch: pytest.MonkeyPatch, past: int, query_len: int) -> None:
    monkeypatch.setattr(forward, "_BLOCK", 4)
    mask, valid = padded(2, past, query_len)
    forward.check_mask(mask, valid, query_len)
    for row, _, query, key in torch.ones_like(mask).nonzero().tolist():
        wrong = mask.clone()
        wrong[row, 0, query, key] ^= True
        if valid[row, past + query]:
            with pytest.raises(CacheError, match="hides or shows"):
                forward.check_mask(wrong, valid, query_len)
        else:
            forward.check_mask(wrong, valid, query_len)  # what padding sees does not matter


def test_checking_a_mask_writes_little_more_than_the_mask() -> None:
    mask, valid = padded(1, 4096, 512)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        forward.check_mask(mask, valid, 512)
    written = sum(event.cpu_memory_usage for event in profile.events() if event.cpu_memory_usage > 0)
    assert written < 2 * mask.nbytes


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("layer_idx", [0, 1, 2])
def test_a_pass_that_raises_in_any_layer_leaves_a_cache_that_refuses_to_go_on(
    tiny_model: Any, layer_idx: int, error: type[BaseException]
) -> None:
    """Also after the last layer's attention, when all layers hold the tokens: a retry would add them a second time."""
    tokens = ids(47)

    def fail(*_: Any) -> None:
        raise error

    with attach(tiny_model, "kivi-2") as session, torch.no_grad():
        cache, first, other = (session.new_cache() for _ in range(3))
        feed(tiny_model, tokens[:, :40], cache)
        with tiny_model.model.layers[layer_idx].mlp.register_forward_pre_hook(fail):
            with pytest.raises(error):
                tiny_model(tokens[:, 40:], **with_cache(cache))
            with pytest.raises(error):
                session.generate(tokens, cache=first)
        feed(tiny_model, tokens, other)
        for again in (tokens, tokens.repeat(1, 2)):
            with pytest.raises(CacheError, match="did not reach the last layer"):
                session.generate(again, cache=first)
        with pytest.raises(CacheError, match=r"call cache.reset\(\)"):
            tiny_model(tokens[:, 40:], **with_cache(cache))
        with pytest.raises(CacheError, match=r"call cache.reset\(\)"):
            cache.snapshot()
        cache.reset()
        logits = tiny_model(tokens, **with_cache(cache)).logits
        assert torch.equal(logits, tiny_model(tokens, **with_cache(session.new_cache())).logits)
        assert tiny_model(tokens[:, :1], **with_cache(other)).logits.isfinite().all()


def test_a_call_that_is_refused_leaves_the_cache_as_it_was(tiny_model: Any) -> None:
    with attach(tiny_model, "kivi-2") as session, torch.no_grad():
        cache, other = session.new_cache(), session.new_cache()
        feed(tiny_model, ids(40), cache, other)
        with pytest.raises(CacheError, match="sequences"):
            tiny_model(ids(40, batch=2), **with_cache(cache))
        assert torch.equal(*(tiny_model(ids(1), **with_cache(each)).logits for each in (cache, other)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_default_dtype_of_torch_is_refused(dtype: torch.dtype, tiny_model: Any) -> None:
    """Buffers of codecs and states would be of it: rounded, or of no use with others."""
    torch.set_default_dtype(dtype)
    try:
        with pytest.raises(UsageError, match=f"set_default_dtype is {dtype}; methods need torch.float32"):
            kvcli.attach(tiny_model, "rtn-4")
        kvcli.attach(tiny_model, "fp16").detach()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("method", ["kivi-2", "qjl", "squat-2", "turboquant-3"])
def test_a_model_in_float64_is_refused_when_it_is_attached(tiny_model: Any, method: str) -> None:
    with pytest.raises(UnsupportedModelError, match="float64; load it in float32"):
        kvcli.attach(tiny_model.double(), method)
