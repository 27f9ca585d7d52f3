"""Forward passes that the patch cannot compute as asked, and passes that run at the same time."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from factories import make_model
from transformers import Cache, DynamicCache

import kvcli
from kvcli.cache.compressed import CompressedCache
from kvcli.errors import CacheError, ModelError

WINDOW = {"residual_length": 8, "sink_length": 2, "flush_block": 1}


def ids(count: int, seed: int = 0, batch: int = 1) -> torch.Tensor:
    return torch.randint(3, 97, (batch, count), generator=torch.Generator().manual_seed(seed))


def test_a_stock_cache_is_refused_before_anything_is_written_to_it(tiny_model: Any) -> None:
    cache = DynamicCache(config=tiny_model.config)
    with kvcli.attach(tiny_model, "fp16"):
        with pytest.raises(CacheError, match="new_cache"):
            tiny_model(ids(5), past_key_values=cache)
        with pytest.raises(CacheError, match="new_cache"):
            tiny_model(ids(5), past_key_values=cache, use_cache=False)
        with pytest.raises(CacheError, match="use_cache=False"):
            tiny_model(ids(5))  # transformers would make a DynamicCache and return it
        with pytest.raises(CacheError, match="new_cache"):
            tiny_model.generate(ids(5), max_new_tokens=2)
        with pytest.raises(CacheError, match="new_cache"):
            tiny_model.model(ids(5), None, None, cache)  # by position
    assert cache.get_seq_length() == 0


def test_attention_that_is_not_causal_is_refused(tiny_model: Any) -> None:
    with kvcli.attach(tiny_model, "fp16") as session:
        with pytest.raises(ModelError, match="is_causal"):
            tiny_model(ids(5), is_causal=False, use_cache=False)
        with pytest.raises(ModelError, match="is_causal"):
            tiny_model(ids(5), is_causal=False, past_key_values=session.new_cache())
        tiny_model.config.is_causal = False
        with pytest.raises(ModelError, match="is_causal"):
            tiny_model(ids(5), use_cache=False)


def test_dropout_and_attention_weights_are_refused() -> None:
    model = make_model("llama", attention_dropout=0.5)
    with kvcli.attach(model, "fp16") as session:
        with pytest.raises(ModelError, match="output_attentions"):
            model(ids(5), past_key_values=session.new_cache(), output_attentions=True)
        model.train()
        with pytest.raises(ModelError, match="dropout"):
            model(ids(5), use_cache=False)
        model.eval()
        model(ids(5), use_cache=False)


def test_another_attention_implementation_inside_the_block_is_refused(tiny_model: Any) -> None:
    before = tiny_model(ids(5)).logits
    with kvcli.attach(tiny_model, "fp16"):
        tiny_model.set_attn_implementation("sdpa")
        with pytest.raises(ModelError, match="'sdpa' while the model is attached"):
            tiny_model(ids(5), use_cache=False)
    assert torch.equal(tiny_model(ids(5)).logits, before)


def test_a_cache_of_another_model_is_refused(tiny_model: Any) -> None:
    other = make_model("llama")
    with kvcli.attach(tiny_model, "fp16") as session, torch.no_grad():
        cache = session.new_cache()
        tiny_model(ids(5), past_key_values=cache)
        with pytest.raises(CacheError, match="another model"):
            other(ids(5), past_key_values=cache)
        with kvcli.attach(other, "rtn-4"), pytest.raises(CacheError, match="another model"):
            other(ids(5), past_key_values=cache)
        tiny_model(ids(5), past_key_values=cache)
        assert cache.get_seq_length() == 10


def test_two_models_with_one_config_object(tiny_model: Any) -> None:
    twin = type(tiny_model)(tiny_model.config)
    with kvcli.attach(tiny_model, "fp16"):
        with pytest.raises(ModelError, match="same config object"):
            twin(ids(5), use_cache=False)
        with pytest.raises(ModelError, match="same config object"):
            kvcli.attach(twin, "fp16")
    twin(ids(5))


def test_no_backward_through_a_cache(tiny_model: Any) -> None:
    x = ids(12)
    tiny_model(x, labels=x, use_cache=False).loss.backward()
    expected = [p.grad.clone() for p in tiny_model.parameters()]
    tiny_model.zero_grad()
    with kvcli.attach(tiny_model, "kivi-2", residual_length=32) as session:
        tiny_model(x, labels=x, use_cache=False).loss.backward()
        assert all(torch.equal(p.grad, want) for p, want in zip(tiny_model.parameters(), expected, strict=True))
        cache = session.new_cache()
        for step in range(3):
            logits = tiny_model(ids(30, step), past_key_values=cache).logits
        with pytest.raises(CacheError, match="no gradient"):
            logits.sum().backward()
        stores = [layer.store for layer in cache.layers]
        codes = [x for s in stores for codes in (s.key_codes, s.value_codes) for x in codes.codes.tensors().values()]
        kept = [*codes, *(x for store in stores for x in (store.keys, store.values))]
        assert not any(x.requires_grad for x in kept)


def test_gradient_checkpointing_recomputes_each_pass_with_its_own_positions(tiny_model: Any) -> None:
    x, places = ids(12), (torch.arange(12)[None], torch.arange(12)[None] * 7 + 100)
    tiny_model.train()

    def gradients() -> list[torch.Tensor]:
        tiny_model.zero_grad()
        losses = [tiny_model(x, labels=x, position_ids=place, use_cache=False).loss for place in places]
        (losses[0] + losses[1]).backward()
        return [p.grad.clone() for p in tiny_model.parameters()]

    expected = gradients()
    enable = getattr(tiny_model, "activation_checkpointing_enable", None) or tiny_model.gradient_checkpointing_enable
    enable()
    with kvcli.attach(tiny_model, "fp16"):
        found = gradients()
    assert all(torch.allclose(ours, theirs, atol=1e-6) for ours, theirs in zip(found, expected, strict=True))


def test_passes_of_two_threads_interleave(tiny_model: Any) -> None:
    """A second thread passes the rotary module, with other positions, before the first thread's first layer runs."""
    x, steps = ids(20), [ids(1, seed) for seed in range(4)]

    def run(session: Any, offset: int) -> torch.Tensor:
        cache, outputs, start = session.new_cache(), [], offset
        with torch.no_grad():
            for piece in (x, *steps):
                place = torch.arange(start, start + piece.shape[1])[None]
                outputs.append(tiny_model(piece, position_ids=place, past_key_values=cache).logits[:, -1])
                start += piece.shape[1]
        return torch.cat(outputs)

    offsets = (0, 300)
    with kvcli.attach(tiny_model, "rtn-2", **WINDOW) as session:
        expected = [run(session, offset) for offset in offsets]
        meet, found = threading.Barrier(2, timeout=20), {}

        def wait(module: Any, args: Any) -> None:
            meet.wait()

        hook = tiny_model.model.layers[0].register_forward_pre_hook(wait)

        def work(offset: int) -> None:
            found[offset] = run(session, offset)

        threads = [threading.Thread(target=work, args=(offset,)) for offset in offsets]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        hook.remove()
    for offset, want in zip(offsets, expected, strict=True):
        assert torch.allclose(found[offset], want, atol=1e-5)


def test_nothing_of_a_pass_is_kept_after_it(tiny_model: Any) -> None:
    with kvcli.attach(tiny_model, "fp16") as session, torch.no_grad():
        tiny_model(ids(5), past_key_values=session.new_cache())
        assert session._seam.current.output is None


def test_an_attached_model_is_not_copied(tiny_model: Any) -> None:
    with kvcli.attach(tiny_model, "fp16") as session:
        for make in (copy.deepcopy, pickle.dumps):
            with pytest.raises(ModelError, match="detach first"):
                make(tiny_model)
            with pytest.raises(ModelError, match="detach first"):
                make(session)
    copy.deepcopy(tiny_model)


def test_a_forgotten_mask_after_a_padded_prompt_is_refused(tiny_model: Any, prompt: Any) -> None:
    with kvcli.attach(tiny_model, "fp16", **WINDOW) as session, torch.no_grad():
        cache = session.new_cache()
        tiny_model(**prompt(3, 9), past_key_values=cache)
        for count in (1, 2):
            with pytest.raises(CacheError, match="pass attention_mask"):
                tiny_model(ids(count, batch=2), past_key_values=cache)
        mask = torch.cat((prompt(3, 9)["attention_mask"], torch.ones(2, 1, dtype=torch.long)), dim=1)
        tiny_model(ids(1, batch=2), attention_mask=mask, past_key_values=cache)


def test_a_cache_whose_pass_died_is_refused_by_another_model(tiny_model: Any) -> None:
    """Fault (calls): a cache given to another model, or whose pass died. Result: refused; the cache stays as it was,
    or asks for `reset()`.
    """
    other = make_model("llama")
    with kvcli.attach(tiny_model, "fp16") as session, torch.no_grad():
        cache = session.new_cache()
        tiny_model(ids(5), past_key_values=cache)

        def die(module: Any, args: Any) -> None:
            raise KeyError("between two layers")

        with tiny_model.model.layers[1].register_forward_pre_hook(die), pytest.raises(KeyError):
            tiny_model(ids(5), past_key_values=cache)
        with pytest.raises(CacheError, match="another model"):
            other(ids(5), past_key_values=cache)
        with pytest.raises(CacheError, match="did not reach the last layer"):
            tiny_model(ids(5), past_key_values=cache)


def test_drafts_are_refused_by_transformers_without_a_hook_for_caches(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Cache, "activate_past_recording")
    monkeypatch.setattr(CompressedCache, "activate_past_recording", lambda self: None)
    before = dict(vars(tiny_model))
    with kvcli.attach(tiny_model, "kivi-2") as session, torch.no_grad():
        cache = session.new_cache()
        with pytest.raises(CacheError, match="speculative decoding"):
            tiny_model.generate(ids(20), past_key_values=cache, max_new_tokens=30, prompt_lookup_num_tokens=3)
        assert cache.get_seq_length() == 0
    assert vars(tiny_model).keys() == before.keys()


def test_a_compiled_model() -> None:
    """The patch itself is not traced: a cache is written in order, by what really happens.

    Fault (calls): `torch.compile` of an attached model. Result: works; the graph breaks at every layer's attention.
    """
    model, prompt = make_model("llama", num_hidden_layers=1), {"max_new_tokens": 3, "do_sample": False}
    expected = model.generate(ids(12), **prompt)
    with kvcli.attach(model, "fp16", **WINDOW) as session:
        model.compile(backend="eager")
        found = model.generate(ids(12), past_key_values=session.new_cache(), **prompt)
    torch._dynamo.reset()
    assert torch.equal(found, expected)
