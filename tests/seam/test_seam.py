"""The fp16 method against transformers' own cache: the same tokens in every way of generating, the same logits."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from factories import make_model
from transformers import DynamicCache

import kvcli
from kvcli.errors import CacheError, ModelError, UnsupportedModelError
from kvcli.seam.probe import probe

SHORT_WINDOW = {"residual_length": 8, "sink_length": 2, "flush_block": 1}


def generate(model: Any, inputs: dict[str, torch.Tensor], cache: Any, **settings: Any) -> torch.Tensor:
    options = {"max_new_tokens": 24, "do_sample": False, **settings}
    torch.manual_seed(7)
    with torch.no_grad():
        return model.generate(**inputs, past_key_values=cache, **options)


@pytest.mark.parametrize("window", [SHORT_WINDOW, {}, {"residual_length": 0, "sink_length": 0}])
@pytest.mark.parametrize(
    "settings",
    [{}, {"do_sample": True, "top_k": 20}, {"num_beams": 3}, {"prefill_chunk_size": 5}],
    ids=["greedy", "sampling", "beam", "chunked"],
)
@pytest.mark.parametrize("lengths", [(1,), (40,), (6, 23, 1)], ids=["one-token", "long", "left-padded"])
def test_tokens_equal_dynamic_cache(
    any_model: Any, prompt: Any, window: dict[str, int], settings: dict[str, Any], lengths: tuple[int, ...]
) -> None:
    inputs = prompt(*lengths)
    expected = generate(any_model, inputs, DynamicCache(config=any_model.config), **settings)
    with kvcli.attach(any_model, "fp16", **window) as session:
        cache = session.new_cache()
        actual = generate(any_model, inputs, cache, **settings)
    assert torch.equal(actual, expected)
    if window == SHORT_WINDOW and not settings.get("num_beams"):
        assert cache.memory().num_encoded > 0  # the codes took part


def test_conversation_continues_on_the_same_cache(any_model: Any, prompt: Any) -> None:
    first, second = prompt(5, 17), prompt(9, 4, seed=1)

    def talk(cache: Any) -> torch.Tensor:
        reply = generate(any_model, first, cache)
        ids = torch.cat((reply, second["input_ids"]), dim=1)
        generated = torch.ones(2, reply.shape[1] - first["input_ids"].shape[1], dtype=torch.long)
        mask = torch.cat((first["attention_mask"], generated, second["attention_mask"]), dim=1)
        return generate(any_model, {"input_ids": ids, "attention_mask": mask}, cache)

    expected = talk(DynamicCache(config=any_model.config))
    with kvcli.attach(any_model, "fp16", **SHORT_WINDOW) as session:
        assert torch.equal(talk(session.new_cache()), expected)


def test_logits_agree_in_bfloat16(any_model: Any, prompt: Any) -> None:
    model = any_model.to(torch.bfloat16)
    inputs = prompt(12, 31)
    step = {"input_ids": torch.tensor([[5], [6]]), "attention_mask": torch.ones(2, 1, dtype=torch.long)}
    step["attention_mask"] = torch.cat((inputs["attention_mask"], step["attention_mask"]), dim=1)

    def logits(cache: Any) -> list[torch.Tensor]:
        with torch.no_grad():
            return [model(**x, past_key_values=cache).logits[:, -1].float() for x in (inputs, step)]

    expected = logits(DynamicCache(config=model.config))
    with kvcli.attach(model, "fp16", **SHORT_WINDOW) as session:
        actual = logits(session.new_cache())
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours - theirs).norm() / theirs.norm() < 2e-2
    assert torch.equal(actual[0], expected[0])  # a first prompt goes through the same attention


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 64},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
def test_scaled_rope(prompt: Any, rope: dict[str, Any]) -> None:
    model = make_model("llama", rope_parameters=rope)
    inputs = prompt(3, 40)
    expected = generate(model, inputs, DynamicCache(config=model.config))
    with kvcli.attach(model, "fp16", **SHORT_WINDOW) as session:
        assert torch.equal(generate(model, inputs, session.new_cache()), expected)


def test_model_is_restored_exactly(tiny_model: Any, prompt: Any) -> None:
    inputs = prompt(9)
    rotary, implementation = tiny_model.model.rotary_emb, tiny_model.config._attn_implementation
    attributes = [set(vars(layer.self_attn)) for layer in tiny_model.model.layers]
    before = tiny_model(**inputs).logits
    session = kvcli.attach(tiny_model, "fp16")
    assert torch.equal(tiny_model(**inputs, use_cache=False).logits, before)  # plain tensors go to SDPA
    with pytest.raises(ModelError, match="attached already"):
        kvcli.attach(tiny_model, "fp16")
    session.detach()
    session.detach()
    with pytest.raises(RuntimeError, match="boom"), kvcli.attach(tiny_model, "fp16"):
        raise RuntimeError("boom")
    assert tiny_model.model.rotary_emb is rotary
    assert tiny_model.config._attn_implementation == implementation
    assert [set(vars(layer.self_attn)) for layer in tiny_model.model.layers] == attributes
    assert torch.equal(tiny_model(**inputs).logits, before)


def test_foreign_cache_is_refused(tiny_model: Any, prompt: Any) -> None:
    with kvcli.attach(tiny_model, "fp16") as session:
        with pytest.raises(CacheError, match="new_cache"):
            generate(tiny_model, prompt(5), DynamicCache(config=tiny_model.config))
        cache = session.new_cache()
    with pytest.raises(CacheError, match="detached"):
        tiny_model(**prompt(5), past_key_values=cache)


def test_padding_query_rows_give_zero_not_nan(tiny_model: Any, prompt: Any) -> None:
    inputs = prompt(2, 30)
    with kvcli.attach(tiny_model, "fp16", **SHORT_WINDOW) as session:
        cache = session.new_cache()
        logits = tiny_model(**inputs, past_key_values=cache).logits
        more = {"input_ids": torch.full((2, 3), 5), "attention_mask": torch.ones(2, 33, dtype=torch.long)}
        more["attention_mask"][:, :30] = inputs["attention_mask"]
        more["attention_mask"][0, 30:32] = 0
        later = tiny_model(**more, past_key_values=cache).logits
    assert logits.isfinite().all()
    assert later.isfinite().all()


def test_crop_and_batch_operations(tiny_model: Any, prompt: Any) -> None:
    inputs = prompt(30, 12)
    with kvcli.attach(tiny_model, "fp16", **SHORT_WINDOW) as session, torch.no_grad():
        cache, reference = session.new_cache(), DynamicCache(config=tiny_model.config)
        tokens = torch.randint(3, 97, (2, 6), generator=torch.Generator().manual_seed(3))
        mask = torch.cat((inputs["attention_mask"], torch.ones_like(tokens)), dim=1)
        tiny_model(**inputs, past_key_values=cache)
        tiny_model(input_ids=tokens, attention_mask=mask, past_key_values=cache)
        cache.crop(-4)
        assert cache.get_seq_length() == 32
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([3, 0]))
        rows = torch.tensor([1, 0])
        actual = tiny_model(
            input_ids=tokens[rows, 2:4], attention_mask=mask[rows][:, :34], past_key_values=cache
        ).logits
        with pytest.raises(CacheError, match="cannot remove"):
            cache.crop(-100)
        cache.reset()
        assert cache.get_seq_length() == 0
        assert cache.memory().num_tokens == 0
    with torch.no_grad():
        tiny_model(**inputs, past_key_values=reference)
        expected = tiny_model(input_ids=tokens[:, :4], attention_mask=mask[:, :34], past_key_values=reference).logits
    assert torch.allclose(actual, expected[rows, 2:], atol=1e-4)


def test_layers_that_are_not_in_memory_are_refused() -> None:
    model = make_model("llama")
    model.model.layers[1].mlp.to("meta")
    with pytest.raises(UnsupportedModelError, match=r"layer 1 is offloaded or not loaded \(device meta\)"):
        kvcli.attach(model, "kivi-2")


def test_a_probed_model_is_not_kept() -> None:
    model = make_model("llama")
    with kvcli.attach(model, "kivi-2"):
        pass
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("rope_type", ["default", "dynamic"])
def test_a_probe_copies_no_weights(rope_type: str) -> None:
    model = make_model("llama", rope_parameters={"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0})

    def count() -> int:
        return sum(type(x) is torch.nn.Parameter for x in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = count()
        probe(model)
        assert count() == before
    finally:
        gc.enable()
