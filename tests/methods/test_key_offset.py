"""The constant that is not coded: exact in reference and kernels, and what it does for keys with a large bias."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from factories import clustered, make_model, make_spec
from parts import DEVICE, FIRST_POSITION, Rotary, assert_same, make_codec, make_part

from kvcli.attention import reference
from kvcli.attention.attach import attach
from kvcli.methods.commvq.config import CommVQConfig
from kvcli.methods.commvq.fit import choose_offset, fit_layer
from kvcli.methods.commvq.method import METHOD
from kvcli.methods.layer_codec import EncodedTokens, LayerCodec, OffsetState
from kvcli.methods.samples import LayerSamples
from kvcli.registry import METHODS, get_method, make_config
from kvcli.rope import Rope, Rotation, TokenRotations, unrotate
from kvcli.seam.versions import with_cache

LENGTH = 70


def set_offset(codec: LayerCodec, size: float = 300.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    codec.key_offset = (
        size * torch.randn(codec.key.spec.num_kv_heads, codec.key.spec.head_dim, generator=generator)
    ).to(DEVICE)
    assert codec.offset is not None
    return codec.offset


def rotation_of(codec: LayerCodec, length: int = LENGTH) -> Rotation:
    positions = torch.arange(FIRST_POSITION, FIRST_POSITION + length, device=DEVICE)[None]
    return TokenRotations(Rope(Rotary(codec.key.spec.rope.rotary_dim)), positions).tokens(0, length)


@pytest.mark.parametrize("name", [name for name in METHODS if not get_method(name).needs_artifact])
def test_an_offset_is_taken_off_and_added_exactly(name: str) -> None:
    """encode(R(k + b)) are the codes of R k, and decoding them adds R b."""
    method = get_method(name)
    codec = method.build(make_spec(), make_config(method.name, dict(method.example_settings)), 0)
    length = LENGTH // codec.tokens_per_group * codec.tokens_per_group
    keys = torch.randn(1, 2, length, 16)
    rotation = rotation_of(codec, length)
    state = codec.key.new_state(1, keys.device)
    if state is not None:
        codec.key.observe(state, torch.randn(1, 4, length, 16), keys, torch.tensor([float(length)]))
        codec.key.finalize_state(state, [0])
    plain_codes = codec.key.encode(codec.encoder_input(rotation.apply(keys), rotation, unrotate), state)
    plain = codec.decode_keys(plain_codes, state, rotation, torch.float32)
    offset = set_offset(codec, 8.0)  # a power of two, and small: sums are nearly exact
    shifted = rotation.apply(keys + offset)
    codes = codec.key.encode(codec.encoder_input(shifted, rotation, unrotate), state)
    decoded = codec.decode_keys(codes, state, rotation, torch.float32)
    error = (decoded - rotation.apply(offset + 0 * keys) - plain).norm() / plain.norm()
    assert error < (1e-2 if name == "qjl" else 2e-3)  # some codes at a rounding edge differ


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("name", "settings", "length", "query_len", "lengths"),
    [
        *[("commvq-1", {}, *case) for case in ((1, 1, None), (131, 3, [131, 64]), (200, 1, None))],
        *[("qjl", {}, *case) for case in ((1, 1, None), (131, 3, [131, 64]), (200, 1, None))],
        ("commvq-1", {"value_groups": 2}, 33, 2, [33, 20]),
        *[("turboquant-3", {}, *case) for case in ((1, 1, None), (131, 3, [131, 64]), (200, 1, None))],
    ],
)
def test_kernels_add_the_offset(
    name: str, settings: dict[str, Any], dtype: torch.dtype, length: int, query_len: int, lengths: list[int] | None
) -> None:
    from importlib import import_module

    torch.manual_seed(0)
    method, codec = make_codec(name, 8, 2, 64, **settings)
    offset = set_offset(codec, 3.0)
    codec.key.use_units(torch.linspace(1, 9, 64, device=DEVICE))
    assert codec.needs_rotations
    part = make_part(codec, 8, 2, length, lengths)
    query = torch.randn(2, 8, query_len, 64, device=DEVICE).to(dtype)
    fused = import_module(method.attend_kernels).fused_attend(codec, query, part, 0.125)
    assert_same(fused, reference.attend_codes(codec, query.float(), part, 0.125), dtype)
    codec.key_offset = torch.zeros_like(offset[0, :, 0])
    without = reference.attend_codes(codec, query.float(), part, 0.125)
    assert (fused[1] - without[1]).abs().amax() > 0.1


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernels_add_the_mean_of_each_sequence(dtype: torch.dtype) -> None:
    from kvcli.methods.token_attend_kernels import fused_attend

    _, codec = make_codec("rtn-4", 4, 2, 64)
    codec.sequence_offset = True
    part = make_part(codec, 4, 2, 131, [131, 64])
    mean = torch.randn(2, 2, 1, 64, device=DEVICE)
    part = replace(part, key_state=OffsetState(mean, torch.ones(2, device=DEVICE)))
    query = torch.randn(2, 4, 1, 64, device=DEVICE).to(dtype)
    assert_same(
        fused_attend(codec, query, part, 0.125), reference.attend_codes(codec, query.float(), part, 0.125), dtype
    )


@pytest.mark.kernels
@pytest.mark.parametrize("hopper", [True, False])
def test_wide_heads_take_smaller_tiles_where_memory_is_small(hopper: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcli.kernels import offset as kernels

    monkeypatch.setattr(kernels, "has_hopper_shared_memory", lambda device: hopper)
    rotations = TokenRotations(Rope(Rotary(160)), torch.arange(5, 85, device=DEVICE)[None])
    query, offset = torch.randn(1, 2, 1, 160, device=DEVICE), torch.randn(1, 1, 1, 160, device=DEVICE)
    scores = torch.zeros(1, 1, 2, 80, device=DEVICE)
    kernels.offset_scores(query, offset, rotations, scores, 0.5)
    keys = rotations.tokens(0, 80).apply(offset.expand(-1, -1, 80, -1))
    assert torch.allclose(scores, 0.5 * query.flatten(1, 2)[:, None] @ keys.mT, rtol=1e-4, atol=1e-3)
    assert ("tiles", 64 if hopper else 32, 0) in rotations._tables


@pytest.mark.kernels
@pytest.mark.parametrize(("rotary_dim", "scaling"), [(32, 1.0), (64, 1.3), (48, 0.7)])
def test_offset_scores_of_partly_rotated_keys_and_scaled_rope(rotary_dim: int, scaling: float) -> None:
    from kvcli.kernels.offset import offset_scores

    rotary = Rotary(rotary_dim)
    rotary.attention_scaling = scaling
    positions = torch.stack([torch.arange(5, 145), torch.arange(1000, 1140)]).to(DEVICE)
    rotations = TokenRotations(Rope(rotary), positions)
    query, offset = torch.randn(2, 6, 3, 64, device=DEVICE), 300 * torch.randn(1, 2, 1, 64, device=DEVICE)
    scores = torch.zeros(2, 2, 9, 256, device=DEVICE)
    offset_scores(query, offset, rotations, scores, 0.5)
    keys = rotations.tokens(0, 140).apply(offset.expand(2, -1, 140, -1))
    expected = 0.5 * query.unflatten(1, (2, 3)).flatten(2, 3) @ keys.transpose(-1, -2)
    assert torch.allclose(scores[..., :140], expected, rtol=1e-4, atol=1e-3 * float(expected.abs().max()) / 10)
    assert not scores[..., 140:].any()
    of_rows = torch.zeros_like(scores)
    offset_scores(query, torch.cat((offset, -offset)), rotations, of_rows, 0.5)
    assert torch.equal(of_rows, torch.cat((scores[:1], -scores[1:])))
    ragged, lengths = torch.zeros_like(scores), torch.tensor([70, 9], dtype=torch.int32, device=DEVICE)
    offset_scores(query, offset, rotations, ragged, 0.5, lengths)
    for row, last in enumerate(lengths.tolist()):
        assert torch.equal(ragged[row, ..., :last], scores[row, ..., :last])
        assert not ragged[row, ..., last:].any()


@pytest.mark.parametrize("name", ["fp8", "rtn-4", "qjl", "turboquant-4"])
def test_methods_that_are_not_fitted_take_the_bias_of_the_projection(name: str) -> None:
    model = make_model("qwen2")
    layer = model.model.layers[0].self_attn
    torch.nn.init.normal_(layer.k_proj.bias, std=100)
    ids = torch.randint(3, 97, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(ids).logits
        errors = {}
        for key_offset in ("none", "bias"):
            settings = {"group_size": 8} if name in ("rtn-4", "qjl") else {}
            with attach(model, name, residual_length=4, flush_block=1, key_offset=key_offset, **settings) as session:
                assert (session.codecs[0].offset is not None) == (key_offset == "bias")
                cache = session.new_cache()
                logits = [model(part, **with_cache(cache)).logits for part in ids.split(1, dim=1)]
            errors[key_offset] = float((torch.cat(logits, dim=1) - expected).norm())
    assert errors["bias"] < 0.5 * errors["none"]


def samples(keys: torch.Tensor, bias: torch.Tensor | None = None) -> LayerSamples:
    values = clustered(2, keys.shape[1], 16, seed=1)
    queries = torch.randn(4, 50, 16, generator=torch.Generator().manual_seed(2))
    return LayerSamples(queries, keys, values, torch.arange(keys.shape[1]), key_bias=bias)


CONFIG = CommVQConfig(codebook_size=16, num_residuals=4, key_iterations=6, value_iterations=1).resolve(make_spec())


def fit(train: LayerSamples, config: CommVQConfig = CONFIG, seed: int = 0) -> tuple[Any, dict[str, Any]]:
    with torch.no_grad():
        codec = METHOD.build(make_spec(), config, 0)
        report = fit_layer(codec, train, train, config, torch.Generator().manual_seed(seed))
    return codec, dict(report.metrics)


def test_commvq_finds_a_large_bias() -> None:
    """One constant vector holds nearly all energy, as in layer 0 of Qwen2.5 models."""
    keys = clustered(2, 2000, 16)
    bias = torch.zeros(2, 16)
    bias[:, 3], bias[:, 12] = 300, -150
    biased = samples(keys + bias.unsqueeze(1), bias)
    codec, found = fit(biased)
    assert found["key_offset"] in ("bias", "mean")
    assert torch.allclose(codec.key_offset, bias, atol=3)
    without = fit(biased, CONFIG.model_copy(update={"key_offset": "none"}))[1]
    plain = fit(samples(keys), CONFIG.model_copy(update={"key_offset": "none"}))[1]
    assert max(found["key_nmse"]) < 0.6 * max(without["key_nmse"])
    assert max(found["key_nmse"]) < 1.2 * max(plain["key_nmse"])


def test_keys_without_a_constant_part_keep_none() -> None:
    keys = clustered(2, 2000, 16)
    keys = torch.cat((keys, -keys), dim=1)
    assert fit(samples(keys))[1]["key_offset"] == "none"


@pytest.mark.parametrize(("size", "expected"), [(0.0, {"none"}), (30.0, {"bias", "mean"}), (300.0, {"bias", "mean"})])
def test_an_offset_is_chosen_by_few_stages_as_by_all(
    monkeypatch: pytest.MonkeyPatch, size: float, expected: set[str]
) -> None:
    keys = clustered(2, 2000, 16)
    bias = size * torch.randn(2, 16, generator=torch.Generator().manual_seed(3))
    biased = samples(torch.cat((keys, -keys), dim=1) + bias.unsqueeze(1), bias)
    config = CONFIG.model_copy(update={"num_residuals": 12})
    codec, found = METHOD.build(make_spec(), config, 0).key, []
    for _ in range(2):
        found.append(choose_offset(codec, biased, biased, config, torch.Generator().manual_seed(0))[0])
        monkeypatch.setattr("kvcli.methods.commvq.fit._PILOT_STAGES", config.num_residuals)
    assert set(found) <= expected


@pytest.mark.parametrize("seed", [0, 1])
def test_codes_do_not_depend_on_a_scaling_that_the_model_does_not_see(seed: int) -> None:
    """Channel pairs of K times any factors and of Q times their inverses: the same scores, so the same codes."""
    train = samples(clustered(2, 2000, 16))
    generator = torch.Generator().manual_seed(seed)
    factors = torch.exp2(torch.randint(-10, 11, (2, 8), generator=generator).float()).repeat(1, 2).unsqueeze(1)
    scaled = LayerSamples(train.q / factors.repeat_interleave(2, 0), train.k * factors, train.v, train.positions)
    codec, metrics = fit(train)
    other, other_metrics = fit(scaled)
    assert metrics["key_nmse"] == pytest.approx(other_metrics["key_nmse"], rel=1e-3)
    codes, other_codes = codec.key.encode(train.k[None]), other.key.encode(scaled.k[None])
    assert (codes.packed != other_codes.packed).float().mean() < 1e-3
    decoded = other.key.decode(other_codes) / factors
    assert torch.allclose(decoded, codec.key.decode(codes), rtol=1e-2, atol=1e-2)


def test_a_part_without_an_offset_has_no_rotations() -> None:
    codec = make_codec("qjl", 8, 2, 64)[1]
    part: EncodedTokens = make_part(codec, 8, 1, 10, None)
    assert part.rotations is None
    assert codec.offset is None
