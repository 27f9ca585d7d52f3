"""Forward passes that the patch cannot compute as asked, and passes that run at the same time."""

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from factories import WINDOW, make_model
from test_cache_copies import ids
from test_seam_threads import in_threads
from transformers import Cache, DynamicCache

import kvcli
from kvcli.cache.compressed import CompressedCache
from kvcli.errors import CacheError, ModelError
from kvcli.seam.versions import CACHE_ARGUMENT, with_cache


def test_a_stock_cache_is_refused_before_anything_is_written_to_it(tiny_model: Any) -> None:
    cache = DynamicCache(config=tiny_model.config)
    with kvcli.attach(tiny_model, "fp16"):
        for call in (
            lambda: tiny_model(ids(5), **with_cache(cache)),
            lambda: tiny_model(ids(5), **{CACHE_ARGUMENT: cache}, use_cache=False),
            lambda: tiny_model.generate(ids(5), max_new_tokens=2),
            lambda: tiny_model.model(ids(5), None, None, cache),  # by position
        ):
            with pytest.raises(CacheError, match="new_cache"):
                call()
        with pytest.raises(CacheError, match="use_cache=False"):
            tiny_model(ids(5))  # transformers would make a DynamicCache and return it
    assert cache.get_seq_length() == 0


def test_what_makes_passes_of_its_own_is_refused_and_leaves_the_model_whole(tiny_model: Any) -> None:
    """transformers leaves a model with its first layers alone where drafts of them end with an error."""
    with kvcli.attach(tiny_model, "fp16") as session:
        for name, value in (("assistant_early_exit", 1), ("guidance_scale", 1.5), ("use_cache", False)):
            with pytest.raises((ModelError, CacheError), match=name):
                tiny_model.generate(ids(5), max_new_tokens=2, **{CACHE_ARGUMENT: session.new_cache(), name: value})
    assert len(tiny_model.model.layers) == tiny_model.config.num_hidden_layers == 3


def test_attention_that_is_not_causal_is_refused(tiny_model: Any) -> None:
    with kvcli.attach(tiny_model, "fp16") as session:
        for options in ({"use_cache": False}, with_cache(session.new_cache())):
            with pytest.raises(ModelError, match="is_causal"):
                tiny_model(ids(5), is_causal=False, **options)
        tiny_model.config.is_causal = False
        with pytest.raises(ModelError, match="is_causal"):
            tiny_model(ids(5), use_cache=False)


def test_dropout_and_attention_weights_are_refused() -> None:
    model = make_model("llama", attention_dropout=0.5)
    with kvcli.attach(model, "fp16") as session:
        with pytest.raises(ModelError, match="output_attentions"):
            model(ids(5), **with_cache(session.new_cache()), output_attentions=True)
        model.train()
        with pytest.raises(ModelError, match="dropout"):
            model(ids(5), use_cache=False)
        model.eval()
        model(ids(5), use_cache=False)


def test_another_attention_implementation_or_model_of_one_config_inside_the_block_is_refused(tiny_model: Any) -> None:
    before, twin = tiny_model(ids(5)).logits, type(tiny_model)(tiny_model.config)
    with kvcli.attach(tiny_model, "fp16"):
        with pytest.raises(ModelError, match="same config object"):
            twin(ids(5), use_cache=False)
        with pytest.raises(ModelError, match="same config object"):
            kvcli.attach(twin, "fp16")
        tiny_model.set_attn_implementation("sdpa")
        with pytest.raises(ModelError, match="'sdpa' while the model is attached"):
            tiny_model(ids(5), use_cache=False)
    twin(ids(5))
    assert torch.equal(tiny_model(ids(5)).logits, before)


def test_a_cache_of_another_model_is_refused_also_after_a_pass_that_died(tiny_model: Any) -> None:
    """Fault: a cache given to another model, or whose pass died. Result: refused; the cache stays as it was,
    or asks for `reset()`.
    """
    other = make_model("llama")
    with kvcli.attach(tiny_model, "fp16") as session, torch.no_grad():
        cache = session.new_cache()
        tiny_model(ids(5), **with_cache(cache))
        with pytest.raises(CacheError, match="another model"):
            other(ids(5), **with_cache(cache))
        with kvcli.attach(other, "rtn-4"), pytest.raises(CacheError, match="another model"):
            other(ids(5), **with_cache(cache))
        tiny_model(ids(5), **with_cache(cache))
        assert cache.get_seq_length() == 10
        die = tiny_model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with die, pytest.raises(ZeroDivisionError):
            tiny_model(ids(5), **with_cache(cache))
        with pytest.raises(CacheError, match="another model"):
            other(ids(5), **with_cache(cache))
        with pytest.raises(CacheError, match="did not reach the last layer"):
            tiny_model(ids(5), **with_cache(cache))


def gradients(model: Any, *places: torch.Tensor | None) -> list[torch.Tensor]:
    """Of the loss of twelve tokens at these positions."""
    model.zero_grad()
    losses = [model(ids(12), labels=ids(12), position_ids=place, use_cache=False).loss for place in places]
    sum(losses).backward()  # type: ignore[union-attr]
    return [p.grad.clone() for p in model.parameters()]


def test_no_backward_through_a_cache(tiny_model: Any) -> None:
    expected = gradients(tiny_model, None)
    with kvcli.attach(tiny_model, "kivi-2", residual_length=32) as session:
        assert all(map(torch.equal, gradients(tiny_model, None), expected))
        cache = session.new_cache()
        for step in range(3):
            logits = tiny_model(ids(30, step), **with_cache(cache)).logits
        with pytest.raises(CacheError, match="no gradient"):
            logits.sum().backward()
        stores = [layer.store for layer in cache.layers]
        codes = [x for s in stores for codes in (s.key_codes, s.value_codes) for x in codes.codes.tensors().values()]
        assert not any(x.requires_grad for x in (*codes, *(x for store in stores for x in (store.keys, store.values))))


def test_gradient_checkpointing_recomputes_each_pass_with_its_own_positions(tiny_model: Any) -> None:
    places = (torch.arange(12)[None], torch.arange(12)[None] * 7 + 100)
    tiny_model.train()
    expected = gradients(tiny_model, *places)
    enable = getattr(tiny_model, "activation_checkpointing_enable", None) or tiny_model.gradient_checkpointing_enable
    enable()
    with kvcli.attach(tiny_model, "fp16"):
        found = gradients(tiny_model, *places)
    assert all(torch.allclose(ours, theirs, atol=1e-6) for ours, theirs in zip(found, expected, strict=True))


def test_passes_of_two_threads_interleave(tiny_model: Any) -> None:
    """A second thread passes the rotary module, with other positions, before the first thread's first layer runs."""

    def run(session: Any, start: int) -> torch.Tensor:
        cache, outputs = session.new_cache(), []
        with torch.no_grad():
            for piece in (ids(20), *(ids(1, seed) for seed in range(4))):
                place = torch.arange(start, start + piece.shape[1])[None]
                outputs.append(tiny_model(piece, position_ids=place, **with_cache(cache)).logits[:, -1])
                start += piece.shape[1]
        return torch.cat(outputs)

    with kvcli.attach(tiny_model, "rtn-2", **WINDOW) as session:
        expected = [run(session, 300 * i) for i in range(2)]
        meet, found = threading.Barrier(2, timeout=20), {}
        with tiny_model.model.layers[0].register_forward_pre_hook(lambda *_: (meet.wait(), None)[1]):
            in_threads(lambda i: found.update({i: run(session, 300 * i)}), 2)
    assert all(torch.allclose(found[i], expected[i], atol=1e-5) for i in range(2))


def test_nothing_of_a_pass_is_kept_and_an_attached_model_is_not_copied(tiny_model: Any) -> None:
    with kvcli.attach(tiny_model, "fp16") as session, torch.no_grad():
        tiny_model(ids(5), **with_cache(session.new_cache()))
        assert session.seam.current.output is None
        for make in (copy.deepcopy, pickle.dumps):
            for attached in (tiny_model, session):
                with pytest.raises(ModelError, match="detach first"):
                    make(attached)
    copy.deepcopy(tiny_model)


def test_a_forgotten_mask_after_a_padded_prompt_is_refused(tiny_model: Any, prompt: Any) -> None:
    with kvcli.attach(tiny_model, "fp16", **WINDOW) as session, torch.no_grad():
        cache = session.new_cache()
        tiny_model(**prompt(3, 9), **with_cache(cache))
        for count in (1, 2):
            with pytest.raises(CacheError, match="pass attention_mask"):
                tiny_model(ids(count, batch=2), **with_cache(cache))
        mask = torch.cat((prompt(3, 9)["attention_mask"], torch.ones(2, 1, dtype=torch.long)), dim=1)
        tiny_model(ids(1, batch=2), attention_mask=mask, **with_cache(cache))


def test_drafts_are_refused_by_transformers_without_a_hook_for_caches(tiny_model: Any, monkeypatch: Any) -> None:
    monkeypatch.delattr(Cache, "activate_past_recording")
    monkeypatch.setattr(CompressedCache, "activate_past_recording", lambda self: None)
    before = dict(vars(tiny_model))
    with kvcli.attach(tiny_model, "kivi-2") as session, torch.no_grad():
        cache = session.new_cache()
        with pytest.raises(CacheError, match="speculative decoding"):
            tiny_model.generate(ids(20), **with_cache(cache), max_new_tokens=30, prompt_lookup_num_tokens=3)
        assert cache.get_seq_length() == 0
    assert vars(tiny_model).keys() == before.keys()


def test_a_compiled_model() -> None:
    """The patch itself is not traced: a cache is written in order, by what really happens.

    Fault: `torch.compile` of an attached model. Result: works; the graph breaks at every layer's attention.
    """
    model, prompt = make_model("llama", num_hidden_layers=1), {"max_new_tokens": 3, "do_sample": False}
    expected = model.generate(ids(12), **prompt)
    with kvcli.attach(model, "fp16", **WINDOW) as session:
        model.compile(backend="eager")
        found = model.generate(ids(12), **with_cache(session.new_cache()), **prompt)
    torch._dynamo.reset()
    assert torch.equal(found, expected)
