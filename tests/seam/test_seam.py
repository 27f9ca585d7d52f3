"""The fp16 method against transformers' own cache: the same tokens in every way of generating, the same logits."""

import gc
import weakref
from typing import Any

import pytest
import torch
from factories import make_model, prompt_and_steps
from transformers import DynamicCache

import kvcli
from kvcli.errors import CacheError, ModelError, UnsupportedModelError
from kvcli.seam.probe import probe
from kvcli.seam.versions import with_cache

SHORT_WINDOW = {"residual_length": 8, "sink_length": 2, "flush_block": 1}


@torch.no_grad()
def generate(model: Any, inputs: dict[str, torch.Tensor], cache: Any, **settings: Any) -> torch.Tensor:
    torch.manual_seed(7)
    return model.generate(**inputs, **with_cache(cache), **{"max_new_tokens": 24, "do_sample": False, **settings})


@pytest.mark.parametrize("window", [SHORT_WINDOW, {}, {"residual_length": 0, "sink_length": 0}])
@pytest.mark.parametrize(
    "settings",
    [{}, {"do_sample": True, "top_k": 20}, {"num_beams": 3}, {"prefill_chunk_size": 5}],
    ids=["greedy", "sampling", "beam", "chunked"],
)
@pytest.mark.parametrize("lengths", [(1,), (40,), (6, 23, 1)], ids=["one-token", "long", "left-padded"])
def test_tokens_equal_dynamic_cache(
    tiny_model: Any, prompt: Any, window: dict[str, int], settings: dict[str, Any], lengths: tuple[int, ...]
) -> None:
    inputs = prompt(*lengths)
    expected = generate(tiny_model, inputs, DynamicCache(config=tiny_model.config), **settings)
    with kvcli.attach(tiny_model, "fp16", **window) as session:
        cache = session.new_cache()
        assert torch.equal(generate(tiny_model, inputs, cache, **settings), expected)
    if window == SHORT_WINDOW and not settings.get("num_beams"):
        assert cache.memory().num_encoded > 0  # the codes took part


def test_logits_agree_in_bfloat16(any_model: Any, prompt: Any) -> None:
    model = any_model.to(torch.bfloat16)
    pieces = prompt_and_steps(prompt, 12, 31)[:2]

    @torch.no_grad()
    def logits(cache: Any) -> list[torch.Tensor]:
        return [model(**x, **with_cache(cache)).logits[:, -1].float() for x in pieces]

    expected = logits(DynamicCache(config=model.config))
    with kvcli.attach(model, "fp16", **SHORT_WINDOW) as session:
        actual = logits(session.new_cache())
    assert torch.equal(actual[0], expected[0])  # a first prompt goes through the same attention
    assert (actual[1] - expected[1]).norm() / expected[1].norm() < 2e-2


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "linear", "factor": 2.0},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_scaled_rope(prompt: Any, rope: dict[str, Any]) -> None:
    if rope["rope_type"] != "linear":
        rope = {**rope, "original_max_position_embeddings": 64}
    model = make_model("llama", rope_parameters={"rope_theta": 1e4, **rope})
    expected = generate(model, prompt(3, 40), DynamicCache(config=model.config))
    with kvcli.attach(model, "fp16", **SHORT_WINDOW) as session:
        assert torch.equal(generate(model, prompt(3, 40), session.new_cache()), expected)


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


def test_padding_query_rows_give_zero_not_nan(tiny_model: Any, prompt: Any) -> None:
    inputs, ids = prompt(2, 30), torch.full((2, 3), 5)
    mask = torch.cat((inputs["attention_mask"], torch.tensor([[0, 0, 1], [1, 1, 1]])), dim=1)
    with kvcli.attach(tiny_model, "fp16", **SHORT_WINDOW) as session:
        cache = session.new_cache()
        assert tiny_model(**inputs, **with_cache(cache)).logits.isfinite().all()
        assert tiny_model(input_ids=ids, attention_mask=mask, **with_cache(cache)).logits.isfinite().all()


@torch.no_grad()
def test_crop_and_batch_operations(tiny_model: Any, prompt: Any) -> None:
    inputs, reference = prompt(30, 12), DynamicCache(config=tiny_model.config)
    tokens = torch.randint(3, 97, (2, 6), generator=torch.Generator().manual_seed(3))
    mask = torch.cat((inputs["attention_mask"], torch.ones_like(tokens)), dim=1)
    tiny_model(**inputs, **with_cache(reference))
    expected = tiny_model(input_ids=tokens[:, :4], attention_mask=mask[:, :34], **with_cache(reference)).logits
    with kvcli.attach(tiny_model, "fp16", **SHORT_WINDOW) as session:
        cache = session.new_cache()
        tiny_model(**inputs, **with_cache(cache))
        tiny_model(input_ids=tokens, attention_mask=mask, **with_cache(cache))
        cache.crop(-4)
        assert cache.get_seq_length() == 32
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([3, 0]))
        swapped = {"input_ids": tokens[:, 2:4].flip(0), "attention_mask": mask[:, :34].flip(0)}
        actual = tiny_model(**swapped, **with_cache(cache)).logits
        with pytest.raises(CacheError, match="cannot remove"):
            cache.crop(-100)
        cache.reset()
        assert cache.get_seq_length() == cache.memory().num_tokens == 0
    assert torch.allclose(actual, expected.flip(0)[:, 2:], atol=1e-4)


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
