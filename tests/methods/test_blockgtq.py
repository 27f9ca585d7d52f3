"""Block-GTQ (arXiv 2606.24033): energies of RoPE pairs, bits that follow from them, codes of groups of equal width."""

import itertools
from functools import partial

import pytest
import torch
from factories import fitted_layer, make_spec

from kvcli.errors import ConfigError
from kvcli.methods.blockgtq import BlockGTQConfig, allot_bits, allot_neighbouring, pair_energy
from kvcli.methods.packing import unpack_bits
from kvcli.methods.samples import LayerSamples
from kvcli.methods.turboquant import TurboQuantConfig, lloyd_max
from kvcli.registry import get_method
from kvcli.rope import Rotation, from_pairs, to_pairs

WIDTH, TOKENS = 32, 400


def samples(width: int = WIDTH, queries: int = 100, bias: torch.Tensor | None = None) -> LayerSamples:
    """Queries and keys whose pairs have energies that differ by factors of up to 1000, another order in each head."""
    generator = torch.Generator().manual_seed(0)
    size = torch.logspace(-1, 0.5, width // 2)
    size = from_pairs(torch.stack((size, size), -1), width)
    order = torch.stack((size, size.flip(0)))
    q = torch.randn(4, queries, width, generator=generator) * order.repeat_interleave(2, 0)[:, None]
    k = torch.randn(2, TOKENS, width, generator=generator) * order[:, None]
    angles = torch.arange(float(TOKENS))[:, None] * 1e4 ** -(torch.arange(width // 2) / (width // 2))
    rotation = Rotation(angles.cos()[None, None], angles.sin()[None, None])
    v = torch.randn(2, TOKENS, width, generator=generator)
    at = Rotation(rotation.cos[:, :, :queries], rotation.sin[:, :, :queries])
    k = k if bias is None else k + bias[:, None]
    return LayerSamples(q, k, v, torch.arange(TOKENS), at, key_bias=bias)


fitted = partial(fitted_layer, "blockgtq")


def cost(scores: list[float], widths: tuple[int, ...] | list[int]) -> float:
    return sum(score * 4.0**-bits for score, bits in zip(scores, widths, strict=True))


def test_the_energy_of_a_pair_is_the_mean_square_of_its_channels() -> None:
    x = torch.randn(2, 50, WIDTH)
    expected = (x[..., : WIDTH // 2] ** 2 + x[..., WIDTH // 2 :] ** 2).mean(1)
    assert torch.allclose(pair_energy(x, WIDTH), expected, rtol=1e-5)
    partly = pair_energy(x, 8)  # channels beyond the rotated ones are paired among themselves
    assert torch.allclose(partly[:, 1], (x[..., 1] ** 2 + x[..., 5] ** 2).mean(1), rtol=1e-5)
    assert torch.allclose(partly[:, 4], (x[..., 8] ** 2 + x[..., 20] ** 2).mean(1), rtol=1e-5)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("budget", [5, 8, 11, 20])
def test_greedy_bits_are_optimal(seed: int, budget: int) -> None:
    """Against all ways to share out the bits among 5 pairs."""
    scores = torch.randn(5, generator=torch.Generator().manual_seed(seed)).mul(3).exp().tolist()
    widths = allot_bits(scores, budget, 1, 4)
    ways = (ways for ways in itertools.product(range(1, 5), repeat=5) if sum(ways) == budget)
    assert sum(widths) == budget
    assert cost(scores, widths) == pytest.approx(min(cost(scores, way) for way in ways))


def test_the_widths_of_a_head_are_the_best_neighbouring_ones() -> None:
    scores = torch.randn(5, generator=torch.Generator().manual_seed(3)).mul(2).exp().tolist()
    for n_bits, groups in itertools.product((2, 3, 4), (1, 2, 3)):
        ways = [
            way
            for way in itertools.product(range(1, 9), repeat=5)
            if sum(way) == 5 * n_bits and max(way) - min(way) < groups
        ]
        ours = allot_neighbouring(scores, n_bits, groups)
        assert tuple(ours) in ways
        assert cost(scores, ours) == pytest.approx(min(cost(scores, way) for way in ways))


@pytest.mark.parametrize("scores", [[0.0] * 6, [1.0] * 6])
def test_equal_energies_have_equal_bits(scores: list[float]) -> None:
    assert allot_neighbouring(scores, 3, 4) == [3] * 6


def test_bits_follow_the_mean_energy_of_queries_and_keys() -> None:
    data = samples()
    codec, metrics = fitted(data, k_bits=3)
    for head in range(2):
        of_queries = to_pairs(data.q[2 * head : 2 * head + 2], WIDTH).square().sum(-1).mean((0, 1))
        of_keys = to_pairs(data.k[head], WIDTH).square().sum(-1).mean(0)
        expected = allot_neighbouring(((of_queries + of_keys) / 2).tolist(), 3, 4)
        used = codec.key.rotation[head].abs() > 0  # coordinates of each channel
        widths = [set(codec.key.widths[head][used[:, channel]].tolist()) for channel in range(WIDTH)]
        assert widths == [{bits} for bits in 2 * expected]
        assert metrics["most_bits"][head] == max(expected)
    assert codec.key.widths.sum(-1).tolist() == [3 * WIDTH] * 2


def test_each_group_of_pairs_is_turboquant_in_its_own_dimension() -> None:
    """Norm, rotation, nearest centroid, and back, stretched to the norm; one group after the other."""
    data = samples()
    codec, _ = fitted(data)
    key, x = codec.key, data.k[None, :, :50]
    decoded, stream = key.decode(key.encode(x)), unpack_bits(key.encode(x).packed, 1, 2 * WIDTH)
    for head in range(2):
        start, expected = 0, torch.zeros(50, WIDTH)
        for bits in key.widths[head].unique().tolist():
            rows = (key.widths[head] == bits).nonzero()[:, 0]
            part = key.rotation[head, rows]
            assert torch.allclose(part @ part.T, torch.eye(len(rows)), atol=1e-5)
            rotated = x[0, head] @ part.T
            norm = rotated.norm(dim=-1, keepdim=True)
            levels = torch.tensor(lloyd_max(len(rows), bits))
            index = ((rotated / norm).unsqueeze(-1) - levels).abs().argmin(-1)
            direction = levels[index]
            expected += norm * direction / direction.norm(dim=-1, keepdim=True) @ part
            places = stream[0, head, :, start : start + bits * len(rows)].view(50, -1, bits)
            assert torch.equal((places << torch.arange(bits)).sum(-1), index)
            start += bits * len(rows)
        assert torch.allclose(decoded[0, head], expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("width", "bits", "groups"), [(32, 2, 4), (80, 3, 2), (6, 3, 8)])
def test_bits_are_counted_with_all_norms(width: int, bits: int, groups: int) -> None:
    data = samples(width)
    codec, _ = fitted(data, k_bits=bits, v_bits=bits, rate_groups=groups)
    for coder, norms, x in ((codec.key, groups, data.k), (codec.value, 1, data.v)):
        assert coder.bits_per_token() == 2 * (8 * -(-width * bits // 8) + 16 * norms)
        assert 8 * coder.encode(x[None]).nbytes == TOKENS * coder.bits_per_token()


@pytest.mark.parametrize(("bits", "uniform", "width"), [(2, 2, 128), (3, 3, 128), (2, 3, 64)])
def test_unequal_energies_are_coded_better_than_by_uniform_bits(bits: int, uniform: int, width: int) -> None:
    """At equal bits of the codes; and with 64 channels at fewer bits than turboquant-3 has, norms counted."""
    data = samples(width)
    codec, metrics = fitted(data, k_bits=bits)
    turboquant = get_method("turboquant").build(make_spec(width), TurboQuantConfig(k_bits=uniform), 0).key
    assert codec.key.bits_per_token() <= turboquant.bits_per_token() + (96 if bits == uniform else 0)
    keys, queries = data.k[None], data.q.unflatten(0, (2, 2)).flatten(1, 2)
    errors = [
        ((coder.decode(coder.encode(keys))[0] - keys[0]) @ queries.mT).square().mean((1, 2))
        for coder in (codec.key, turboquant)
    ]
    assert (errors[0] < (0.6 if bits == uniform else 1) * errors[1]).all()
    assert max(metrics["key_error"]) < 0.06


def test_a_bias_of_the_projection_counts_for_nothing() -> None:
    bias = torch.linspace(-50, 50, WIDTH).expand(2, -1)
    plain, _ = fitted(samples())
    biased, metrics = fitted(samples(bias=bias))
    assert torch.equal(plain.key.widths, biased.key.widths)
    assert max(metrics["key_error"]) < 0.1
    kept, _ = fitted(samples(bias=bias), key_offset="none")
    assert not torch.allclose(kept.key.rotation, plain.key.rotation)


def test_channels_that_are_not_rotated_get_bits_too() -> None:
    data, method = samples(), get_method("blockgtq")
    half = Rotation(*(x[..., :4] for x in (data.query_rotation.cos, data.query_rotation.sin)))  # type: ignore[union-attr]
    partly = LayerSamples(data.q, data.keys, data.values, data.positions, half)
    codec = method.build(make_spec(WIDTH, rotary_dim=8), BlockGTQConfig(), 0)
    assert method.fit is not None
    report = method.fit(codec, partly, partly, BlockGTQConfig(), torch.Generator())
    assert codec.key.widths.sum(-1).tolist() == [2 * WIDTH] * 2
    assert max(report.metrics["key_error"]) < 0.1


def test_one_width_is_turboquant() -> None:
    data = samples()
    codec, metrics = fitted(data, rate_groups=1)
    assert codec.key.widths.unique().tolist() == [2]
    assert metrics["most_bits"] == [2, 2]
    assert torch.allclose(codec.key.centroids[0, 0, :4], torch.tensor(lloyd_max(WIDTH, 2)))


def test_a_fit_is_the_same_again_and_another_with_another_seed() -> None:
    first, again, other = (fitted(samples(), rotation_seed=seed)[0].key.rotation for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


def test_an_artifact_is_loaded_without_levels_at_hand() -> None:
    """Codecs are built on the meta device before their buffers are read."""
    lloyd_max.cache_clear()
    with torch.device("meta"):
        codec = get_method("blockgtq").build(make_spec(), BlockGTQConfig(), 0)
    assert all(buffer.is_meta for buffer in codec.buffers())


def test_what_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="a head_dim of 15 is odd"):
        get_method("blockgtq").build(make_spec(15, rotary_dim=14), BlockGTQConfig(), 0)
    with pytest.raises(ConfigError, match="--query-tokens above 0"):
        fitted(samples(queries=0))


def test_silent_groups_and_the_largest_numbers_stay_finite_and_close() -> None:
    data = samples()
    codec, _ = fitted(data, k_bits=4)
    x = data.k[None].clone()
    x[:, :, 3] = 0
    x[:, 0, 4, to_pairs(torch.arange(WIDTH), WIDTH)[:8].flatten()] = 0
    x *= 6.5e4 / x.abs().max()
    decoded = codec.key.decode(codec.key.encode(x))
    assert not decoded[:, :, 3].any()
    assert (decoded - x).norm() < 0.1 * x.norm()
