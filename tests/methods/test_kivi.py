"""KIVI's and RTN's laws: counts after every step, half a step of error, exact constants."""

from typing import Any, get_args

import pytest
import torch
from factories import make_model, make_spec
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

import kvcli
from kvcli.errors import CacheError, ConfigError
from kvcli.methods.config import ScalarBits
from kvcli.methods.scalar.codec import PerChannelKey, PerTokenValue, dequantize, quantize
from kvcli.seam.versions import with_cache


@settings(max_examples=60, deadline=None)
@given(n_bits=st.sampled_from(get_args(ScalarBits)), seed=st.integers(0, 10_000), exponent=st.integers(-3, 3))
def test_error_is_at_most_half_a_step(n_bits: int, seed: int, exponent: int) -> None:
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(seed)) * 10.0**exponent
    codes, scale, zero = quantize(x, n_bits)
    error = (dequantize(codes, scale, zero) - x).abs()
    # scale and zero are stored in 16 bits: their rounding may cost the ends of the range a little more
    rounding = 2**-11 * (x.abs().amax(-1, keepdim=True) + (2**n_bits - 1) * scale.float()) + 2**-24
    assert (error <= scale.float() / 2 + rounding).all()
    assert codes.min() >= 0
    assert codes.max() <= 2**n_bits - 1


@pytest.mark.parametrize("value", [0.0, 1.5, -7.25, 60000.0])
def test_a_constant_group_is_exact(value: float) -> None:
    x = torch.full((2, 8), value)
    assert torch.equal(dequantize(*quantize(x, 2)), x)


def test_overflow_is_clamped() -> None:
    decoded = dequantize(*quantize(torch.tensor([[-1e9, 0.0, 1e9, 5.0]]), 8))
    assert decoded.isfinite().all()
    assert decoded.abs().max() <= 65504 * 1.01


def test_groups_run_along_tokens_for_keys_and_along_channels_for_values() -> None:
    spec = make_spec()
    x = torch.zeros(1, 2, 16, 16)
    x[..., 3] = 100  # one large channel
    x[..., 7, :] += 10  # one large token
    key, value = PerChannelKey(spec, 2, 8), PerTokenValue(spec, 2, 8)
    key_error = (key.decode(key.encode(x)) - x).abs()
    assert key_error[..., 8:, :].max() == 0  # groups of one channel without the odd token are constant
    value_error = (value.decode(value.encode(x)) - x).abs()
    assert value_error[..., 8:].max() == 0  # groups of one token without the odd channel are constant
    assert value.encode(x).scale.shape == (1, 2, 16, 2)
    assert key.encode(x).scale.shape == (1, 2, 2, 16)


def lengths_after(model: Any, prompt_len: int, steps: int, residual: int) -> list[tuple[int, int, int]]:
    """(tokens, encoded keys, encoded values) after the prompt and after every step."""
    seen = []
    settings = {"residual_length": residual, "group_size": 4, "sink_length": 0}
    with kvcli.attach(model, "kivi", **settings) as session, torch.no_grad():
        cache = session.new_cache()
        for ids in (torch.randint(3, 97, (1, prompt_len)), *[torch.tensor([[5]])] * steps):
            model(ids, **with_cache(cache))
            counts = cache.sequences.counts
            seen.append((cache.get_seq_length(), counts.keys.coded[0], counts.values.coded[0]))
    return seen


@pytest.mark.parametrize("prompt_len", [1, 7, 8, 9, 21])
def test_eviction_follows_the_paper_at_every_step(tiny_model: Any, prompt_len: int) -> None:
    residual = 8
    for total, keys, values in lengths_after(tiny_model, prompt_len, 20, residual):
        assert keys == total // residual * residual
        assert values == max(0, total - residual)


def test_one_decode_step_equals_attention_over_dequantized_tokens(tiny_model: Any) -> None:
    """The cache's attention against the definition, while some tokens have coded keys but exact values."""
    ids, nxt = torch.randint(3, 97, (1, 21)), torch.tensor([[5]])
    settings = {"residual_length": 8, "group_size": 4, "sink_length": 0}
    with kvcli.attach(tiny_model, "kivi", **settings) as session, torch.no_grad():
        cache = session.new_cache()
        tiny_model(ids, **with_cache(cache))
        logits = tiny_model(nxt, **with_cache(cache)).logits[:, -1]
        codec = session.codecs[0]
    with torch.no_grad():
        reference = DynamicCache(config=tiny_model.config)
        tiny_model(ids, **with_cache(reference))
        for layer in reference.layers:
            key, value = layer.keys.clone(), layer.values.clone()
            key[:, :, :16] = codec.key.decode(codec.key.encode(layer.keys[:, :, :16]))
            value[:, :, :13] = codec.value.decode(codec.value.encode(layer.values[:, :, :13]))
            layer.keys, layer.values = key, value
        expected = tiny_model(nxt, **with_cache(reference)).logits[:, -1]
    assert torch.allclose(logits, expected, atol=1e-4)


def test_window_must_hold_whole_groups(tiny_model: Any) -> None:
    for residual in (0, 33):
        with pytest.raises(ConfigError, match="multiple of group_size"):
            kvcli.attach(tiny_model, "kivi", residual_length=residual)
    with pytest.raises(ConfigError, match="group_size"):
        kvcli.attach(make_model("llama"), "rtn", group_size=12)


def test_bits_in_the_name(tiny_model: Any) -> None:
    for name, bits in (("kivi-4", 4.0), ("kivi", 2.0), ("rtn-8", 8.0)):
        with kvcli.attach(tiny_model, name) as session:
            assert session.new_cache().memory().nominal_bits == (bits, bits)
    with pytest.raises(ConfigError, match="k_bits"):
        kvcli.attach(tiny_model, "kivi-3")


def test_cropping_into_a_group_is_refused_and_changes_nothing(tiny_model: Any) -> None:
    settings = {"residual_length": 8, "group_size": 4, "sink_length": 0}
    with kvcli.attach(tiny_model, "kivi", **settings) as session, torch.no_grad():
        cache = session.new_cache()
        tiny_model(torch.randint(3, 97, (1, 18)), **with_cache(cache))
        with pytest.raises(CacheError, match="group of 4 tokens that were encoded"):
            cache.crop(-3)  # two exact keys, and one of a group
        assert cache.get_seq_length() == 18
        assert cache.sequences.counts.keys.coded == (16,)
        cache.crop(-6)
        assert cache.get_seq_length() == 12
        assert cache.sequences.counts.keys.coded == (12,)
        assert tiny_model(torch.tensor([[5]]), **with_cache(cache)).logits.isfinite().all()


@pytest.mark.parametrize("method", ["kivi-2", "squat-2"])
def test_a_flush_block_without_effect_is_refused(tiny_model: Any, method: str) -> None:
    with pytest.raises(ConfigError, match="flush_block has no effect"):
        kvcli.attach(tiny_model, method, flush_block=16)
