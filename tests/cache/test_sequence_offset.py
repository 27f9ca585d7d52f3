"""Keys with a large constant part and no bias to take it from: the mean of a sequence's first keys is not coded."""

from typing import Any

import pytest
import torch
from factories import make_model
from families import make
from passes import ids, padded

import kvcli
from kvcli.errors import CacheError
from kvcli.plan.memory import MethodPlan, PlannedModel
from kvcli.registry import METHODS, get_method, make_config
from kvcli.seam.probe import probe
from kvcli.seam.versions import with_cache

WINDOW = {"residual_length": 6, "sink_length": 2, "flush_block": 1}
UNFITTED = [name for name in METHODS if not get_method(name).needs_artifact and name != "fp16"]
OFFSET = ["turboquant-3", "rtn-4"]


def normed_model(dtype: torch.dtype = torch.float32) -> Any:
    """Qwen3 with a large constant part of hidden states, and of keys after their norm in a quarter of the channels."""
    model = make_model("qwen3", num_hidden_layers=2)
    embeddings = model.get_input_embeddings().weight.data
    embeddings += 1.5 * embeddings.std() * torch.randn(embeddings.shape[1], generator=torch.Generator().manual_seed(0))
    for layer in model.model.layers:
        layer.self_attn.k_norm.weight.data[::4] *= 8
        layer.self_attn.q_norm.weight.data *= 3
        layer.self_attn.q_norm.weight.data[::4] /= 8  # scores stay those of an ordinary model
    return model.to(dtype)


def settings_of(method: str) -> dict[str, Any]:
    """A short window, of groups where the method has them."""
    return dict(get_method(method.rpartition("-")[0] if method[-1].isdigit() else method).example_settings) | {
        name: value
        for name, value in WINDOW.items()
        if name != "flush_block" or method.partition("-")[0] not in ("kivi", "squat")
    }


@torch.no_grad()
def error(model: Any, exact: torch.Tensor, method: str, **settings: Any) -> float:
    """Relative error of logits of a prompt in chunks, against those of the model in float32 without codes."""
    inputs = padded(70, 52)
    with kvcli.attach(model, method, **settings) as session:
        cache, outputs = session.new_cache(), []
        for start in range(0, 70, 10):
            mask = inputs["attention_mask"][:, : start + 10]
            piece = inputs["input_ids"][:, start : start + 10]
            outputs.append(model(piece, attention_mask=mask, **with_cache(cache)).logits)
    found, real = torch.cat(outputs, 1).float(), inputs["attention_mask"].bool()
    return float((found - exact)[real].norm() / exact[real].norm())


@pytest.fixture(scope="module")
def exact() -> torch.Tensor:
    with torch.no_grad():
        return normed_model()(**padded(70, 52)).logits


@pytest.mark.parametrize("method", OFFSET)
def test_the_mean_of_the_first_keys_takes_the_constant_part(method: str, exact: torch.Tensor) -> None:
    model, settings = normed_model(), {**settings_of(method), "k_bits": 2, "v_bits": 8 if method == "rtn-4" else 4}
    settings["key_offset"] = "none"  # nor units of channels
    errors = {offset: error(model, exact, method, **settings, sequence_offset=offset) for offset in ("mean", "none")}
    assert errors["mean"] < 0.6 * errors["none"], errors
    assert error(model, exact, method, **settings) == errors["mean"]  # auto
    with kvcli.attach(make_model("llama"), method, **settings) as session:
        assert session.config.sequence_offset == "none"  # type: ignore[attr-defined]


@pytest.mark.parametrize("variant", ["mse", "prod"])
def test_channels_of_normalized_keys_have_units_of_their_own(variant: str, exact: torch.Tensor) -> None:
    model, settings = normed_model(), {**settings_of("turboquant-3"), "k_bits": 3, "v_bits": 16, "key_variant": variant}
    own, alike = (error(model, exact, "turboquant-3", **settings, key_offset=x) for x in ("bias", "none"))
    assert own < 0.6 * alike, (own, alike)


@pytest.mark.parametrize(("family", "more"), [("qwen3", 0), ("gemma3_text", 1), ("olmo2", 0)])
def test_units_are_of_the_sizes_that_norms_give(family: str, more: int) -> None:
    attention = probe(make(family))
    spec, layer, sizes = attention.spec, attention.layers[0], []
    for weight in (layer.module.k_norm.weight, layer.module.q_norm.weight):
        weight.data.normal_(generator=torch.Generator().manual_seed(weight.numel()))
        sizes.append((weight.detach() + more).view(-1, 2, spec.head_dim // 2).square().mean((0, 1)))
    ratio = (sizes[0] / sizes[1]).sqrt().sqrt().repeat(2)
    assert torch.allclose(layer.key_units(spec.head_dim), ratio / ratio.min(), rtol=1e-3)
    assert probe(make("llama")).layers[0].key_units(spec.head_dim) is None


@pytest.mark.parametrize("method", UNFITTED)
def test_no_method_loses_more_in_bfloat16_than_in_float32(method: str, exact: torch.Tensor) -> None:
    settings = get_method(method).example_settings
    own = error(normed_model(torch.bfloat16), exact, "fp16")
    lost = error(normed_model(torch.bfloat16), exact, method, **settings)
    assert lost < 1.2 * error(normed_model(), exact, method, **settings) + 1.2 * own


@pytest.mark.parametrize("method", OFFSET)
def test_each_row_has_the_mean_of_its_own_keys_after_the_sinks(method: str) -> None:
    model, inputs = normed_model(), padded(40, 23)
    with kvcli.attach(model, method, **settings_of(method)) as session, torch.no_grad():
        cache = session.new_cache()
        model(**inputs, **with_cache(cache))
        both = [layer.store.state for layer in cache.compressed]
        for row, length in enumerate((40, 23)):
            alone = session.new_cache()
            model(inputs["input_ids"][row : row + 1, 40 - length :], **with_cache(alone))
            for state, layer in zip(both, alone.compressed, strict=True):
                assert torch.allclose(state.mean[row], layer.store.state.mean[0], atol=1e-4)
                assert int(state.count[row]) == length - WINDOW["sink_length"]


@pytest.mark.parametrize("method", OFFSET)
def test_it_is_kept_with_the_sequence(method: str, tmp_path: Any) -> None:
    """A saved cache goes on alike; rows are chosen with their means; what the mean is of cannot be removed."""
    model = normed_model()
    with kvcli.attach(model, method, **settings_of(method)) as session, torch.no_grad():
        cache = session.new_cache()
        model(ids(2, 30), **with_cache(cache))
        cache.save(tmp_path / "c.safetensors")
        loaded = session.load_cache(tmp_path / "c.safetensors")
        loaded.batch_select_indices(torch.tensor([1]))
        more = ids(2, 5, seed=1)
        expected = model(more, **with_cache(cache)).logits[1:]
        assert torch.allclose(model(more[1:], **with_cache(loaded)).logits, expected, atol=1e-5)
        assert cache.memory().state_bytes > 0
        with pytest.raises(CacheError, match="state was computed from some of them"):
            cache.crop(-20)


@pytest.mark.parametrize("name", ["turboquant", "rtn"])
def test_a_plan_counts_it(name: str) -> None:
    method, model = get_method(name), make_model("qwen3", max_position_embeddings=4096)
    config = make_config(method.name, method.example_settings)
    planned = PlannedModel("tiny", model.config, model.dtype, model.device)
    with kvcli.attach(model, name, **method.example_settings) as session, torch.no_grad():
        cache = session.new_cache()
        model(ids(1, 100), **with_cache(cache))
        assert MethodPlan(planned, name, method, config).cache.memory(100) == cache.memory()
        assert cache.memory().state_bytes > 0
