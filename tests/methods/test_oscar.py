"""OSCAR (arXiv 2605.17757): rotations, covariances, clipping."""

import math
from functools import partial

import pytest
import torch
from factories import fitted_layer, make_spec
from parts import DEVICE

from kvcli.errors import ConfigError
from kvcli.methods.layer_codec import LayerCodec
from kvcli.methods.oscar import (
    OSCARConfig,
    bit_reversal,
    hadamard,
    oscar_rotation,
    output_covariance,
    rotated_keys,
    rotated_tokens,
)
from kvcli.methods.samples import LayerSamples
from kvcli.registry import get_method
from kvcli.rope import Rotation

WIDTH, SEQ_LEN, SINKS = 16, 40, 3


def rotation(length: int) -> Rotation:
    """RoPE at positions 0 to length - 1 of sequences of `SEQ_LEN` tokens."""
    angle = (torch.arange(length) % SEQ_LEN)[:, None] * 1e2 ** -(torch.arange(WIDTH // 2) / (WIDTH // 2))
    return Rotation(angle.cos()[None, None], angle.sin()[None, None])


def samples(sequences: int = 6, query_sequences: int = 2) -> LayerSamples:
    """Anisotropic queries, keys with large channels, correlated values; without the first tokens of each sequence."""
    generator = torch.Generator().manual_seed(0)
    tokens, queries = sequences * SEQ_LEN, query_sequences * SEQ_LEN
    q = torch.randn(4, queries, WIDTH, generator=generator) * torch.linspace(0.1, 3, WIDTH)
    k = torch.randn(2, tokens, WIDTH, generator=generator)
    k[..., 0] *= 30
    v = torch.randn(2, tokens, WIDTH, generator=generator) @ torch.randn(WIDTH, WIDTH, generator=generator)
    whole = LayerSamples(q, k, v, torch.arange(tokens) % SEQ_LEN, rotation(queries))
    return whole.select((whole.positions >= SINKS).nonzero()[:, 0])


fitted = partial(fitted_layer, "oscar")


def test_hadamard_and_bit_reversal() -> None:
    assert torch.equal(hadamard(2) * math.sqrt(2), torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64))
    assert torch.allclose(hadamard(64) @ hadamard(64).T, torch.eye(64, dtype=torch.float64))
    assert bit_reversal(8) == [0, 4, 2, 6, 1, 5, 3, 7]
    assert bit_reversal(1) == [0]


def test_the_rotation_is_orthogonal_and_makes_all_channels_matter_equally() -> None:
    root = torch.randn(3, WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))
    covariance = root.mT @ torch.diag(torch.logspace(-2, 2, WIDTH)) @ root
    r = oscar_rotation(covariance)
    assert torch.allclose(r.mT @ r, torch.eye(WIDTH).expand(3, -1, -1), atol=1e-5)
    weight = (r.mT @ covariance @ r).diagonal(dim1=-2, dim2=-1)
    assert torch.allclose(weight, weight.mean(-1, keepdim=True).expand_as(weight), rtol=1e-4)


def test_channels_are_eigenvectors_mixed_by_hadamard_in_bit_reversed_order() -> None:
    """With a diagonal covariance, column j of R is column reversed(j) of H on channels of descending variance."""
    variance = torch.tensor([2.0, 9.0, 5.0, 1.0])
    r, order = oscar_rotation(torch.diag(variance)), variance.argsort(descending=True)
    for column, index in enumerate((0, 2, 1, 3)):
        expected = hadamard(4).float()[:, index].abs()
        assert torch.allclose(r[order, column].abs(), expected)
    signs = r[order] * r[order][:, :1].sign()  # an eigenvector's sign is arbitrary
    assert torch.allclose(signs, hadamard(4).float()[:, [0, 2, 1, 3]], atol=1e-6)


def test_the_value_covariance_is_that_of_attention_outputs() -> None:
    """Against a loop over queries: softmax over the recorded tokens of the same sequence that are not later."""
    data = samples()
    queries = data.rotated_queries().unflatten(0, (2, 2))
    sequence = torch.cat((torch.zeros(1), (data.positions.diff() < 0).cumsum(0)))
    keys = data.k.clone()
    table = rotation(SEQ_LEN)
    for index, position in enumerate(data.positions.tolist()):
        at = Rotation(table.cos[:, :, position, None], table.sin[:, :, position, None])
        keys[:, index] = at.apply(data.k[None, :, index : index + 1])[0, :, 0]
    expected = torch.zeros(2, WIDTH, WIDTH)
    for n in range(queries.shape[2]):
        seen = (sequence == n // SEQ_LEN) & (data.positions <= n % SEQ_LEN)
        if seen.any():
            weights = (queries[:, :, n] @ keys[:, seen].mT / math.sqrt(WIDTH)).softmax(-1)
            output = weights @ data.v[:, seen]
            expected += output.mT @ output
    assert torch.allclose(output_covariance(queries, data), expected, rtol=1e-4, atol=1e-3)


def test_keys_follow_the_queries_and_values_the_outputs() -> None:
    data = samples()
    codec, _ = fitted(data)
    queries = data.rotated_queries().unflatten(0, (2, -1)).flatten(1, 2)
    for covariance, r in (
        (queries.mT @ queries, codec.key.rotation),
        (output_covariance(data.rotated_queries().unflatten(0, (2, -1)), data), codec.value.rotation),
    ):
        weight = (r.mT @ covariance @ r).diagonal(dim1=-2, dim2=-1)
        assert torch.allclose(weight, weight.mean(-1, keepdim=True).expand_as(weight), rtol=1e-3)


def test_the_fit_reports_the_error_of_scores_and_of_values() -> None:
    data = samples()
    codec, metrics = fitted(data)
    queries = data.rotated_queries().unflatten(0, (2, -1)).flatten(1, 2)
    keys = rotated_keys(data, rotated_tokens(data))
    for x, weight, coder, name in (
        (keys, queries, codec.key, "key_error"),
        (data.v, torch.eye(WIDTH).expand(2, -1, -1), codec.value, "value_error"),
    ):
        error = coder.decode(coder.encode(x[None]))[0] - x
        expected = (error @ weight.mT).square().sum((1, 2)) / (x @ weight.mT).square().sum((1, 2))
        assert metrics[name] == pytest.approx(expected.tolist(), rel=1e-4)
        assert 0 < max(metrics[name]) < 0.5


def test_one_rotation_per_layer_is_that_of_the_mean_covariance() -> None:
    data = samples()
    codec, _ = fitted(data, rotation_scope="layer")
    assert torch.equal(codec.key.rotation[0], codec.key.rotation[1])
    queries = data.rotated_queries().flatten(0, 1)
    assert torch.allclose(codec.key.rotation[0], oscar_rotation(queries.T @ queries / 2), atol=1e-3)
    heads, _ = fitted(data)
    assert not torch.allclose(heads.key.rotation[0], heads.key.rotation[1], atol=0.1)


def test_clipping_keeps_the_given_share_of_a_group() -> None:
    codec, _ = fitted(samples(), k_clip=0.75, group_size=8)
    x = torch.randn(1, 2, 30, WIDTH)
    groups = (x @ codec.key.rotation).unflatten(-1, (-1, 8))
    clipped = codec.key._clipped(x).unflatten(-1, (-1, 8))
    changed = ~torch.isclose(clipped, groups, atol=1e-5)
    assert torch.equal(changed.sum(-1), torch.full((1, 2, 30, 2), 2))
    limit = groups.abs().sort(-1).values[..., 5:6]  # 0.75 * 8 = 6 magnitudes are kept
    assert torch.allclose(clipped, groups.clamp(-limit, limit), atol=1e-5)


def test_fitted_clipping_has_the_least_weighted_error() -> None:
    """Of scores for keys; the error that is reported for keys is that one, and all samples are held out here."""
    data = samples()
    codec, chosen = fitted(data)
    errors = torch.tensor([fitted(data, k_clip=share)[1]["key_error"] for share in (1.0, 0.92, 0.87, 0.8)])
    assert torch.allclose(torch.tensor(chosen["key_error"]), errors.amin(0), rtol=1e-5)
    assert (codec.key.kept < WIDTH).any()
    queries = data.rotated_queries().unflatten(0, (2, -1))
    weight, lost = output_covariance(queries, data), []
    for share in (0, 1.0, 0.92, 0.87, 0.8):
        value = fitted(data, v_clip=share)[0].value
        error = value.decode(value.encode(data.v[None]))[0] - data.v
        lost.append(torch.einsum("htc,hcd,htd->h", error, weight, error))
    assert torch.allclose(lost[0], torch.stack(lost[1:]).amin(0), rtol=1e-5)


def test_bits_with_groups_of_128() -> None:
    config = OSCARConfig()
    key = get_method("oscar").build(make_spec(128), config, 0).key
    assert key.bits_per_token() / (2 * 128) == 2.25
    narrow = get_method("oscar").build(make_spec(64), config, 0)
    assert narrow.key.group_size == 64
    fixed = get_method("oscar").build(make_spec(64), OSCARConfig(k_clip=0.96, v_clip=0.92), 0)
    assert fixed.key.kept.tolist() == [62, 62]  # 96 % of 64
    assert fixed.value.kept.tolist() == [59, 59]


def test_a_large_key_bias_is_not_coded() -> None:
    data = samples()
    bias = torch.zeros(2, WIDTH)
    bias[:, 3] = 300
    data = LayerSamples(data.q, data.k + bias.unsqueeze(1), data.v, data.positions, data.query_rotation, bias)
    errors = {offset: fitted(data, key_offset=offset) for offset in ("bias", "none")}
    clean = fitted(samples())[0]
    assert torch.equal(errors["bias"][0].key.kept, clean.key.kept)
    assert errors["bias"][0].key.rotation.isfinite().all()
    x = rotated_keys(samples(), rotated_tokens(samples())).unsqueeze(0)
    whole = rotated_keys(data, rotated_tokens(data)).unsqueeze(0)

    def lost(codec: LayerCodec, keys: torch.Tensor) -> float:
        return float((codec.key.decode(codec.key.encode(keys)) - keys).norm())

    assert lost(errors["bias"][0], x) < 0.2 * lost(errors["none"][0], whole)


def test_the_range_is_that_of_rotated_values() -> None:
    codec, _ = fitted(samples())
    x = codec.key.rotation[:, :, 5].view(1, 2, 1, WIDTH) * 1e4  # all of it in one rotated channel
    assert x.abs().max() < 6e3
    assert float(codec.key.peak(x, codec.key.encode(x))) == pytest.approx(1e4, rel=1e-4)


def test_encode_and_decode_kernels_equal_the_reference() -> None:
    codec, _ = fitted(samples())
    codec.to(DEVICE)
    x = torch.randn(2, 2, 20, WIDTH, device=DEVICE)
    for coder in (codec.key, codec.value):
        coder.fused = False
        expected, like = coder.decode(coder.encode(x)), coder.encode(x)
        coder.fused = True
        assert torch.allclose(coder.decode_to(coder.encode(x), None, torch.float32), expected, atol=1e-5)
        coder.encode_into(x, None, like)
        assert torch.allclose(coder.decode_to(like, None, torch.float16).float(), expected, atol=2e-2)
        huge = coder.decode_to(coder.encode(torch.full_like(x, 6e4)), None, torch.float16)
        assert huge.isfinite().all()


def test_a_recording_without_queries_is_refused() -> None:
    data = samples(query_sequences=0)
    with pytest.raises(ConfigError, match="--query-tokens"):
        fitted(data)


def test_a_head_without_a_hadamard_matrix_is_refused() -> None:
    with pytest.raises(ValueError, match="power of two, not 96"):
        get_method("oscar").build(make_spec(96), OSCARConfig(), 0)
