"""KVQuant (arXiv 2401.18079): levels, ranges, outliers."""

import itertools
from functools import partial

import pytest
import torch
from factories import fitted_layer, make_spec

from kvcli.errors import ConfigError
from kvcli.methods.kvquant import KVQuantConfig, flat, query_energy, weighted_levels
from kvcli.methods.samples import LayerSamples
from kvcli.registry import get_method

WIDTH, TOKENS = 32, 2000


def samples(queries: int = 50) -> LayerSamples:
    """Keys and values with heavy tails; key channels of different means and sizes."""
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(2, TOKENS, WIDTH, generator=generator) for _ in range(2))
    k, v = k * k.abs(), v * v.abs()
    k = k * torch.logspace(-1, 1, WIDTH) + torch.linspace(-20, 20, WIDTH)
    q = torch.randn(4, queries, WIDTH, generator=generator) * torch.linspace(0.1, 2, WIDTH)
    return LayerSamples(q, k, v, torch.arange(TOKENS))


fitted = partial(fitted_layer, "kvquant")


def round_trip(coder: object, x: torch.Tensor) -> torch.Tensor:
    return coder.decode(coder.encode(x[None]))[0]  # type: ignore[attr-defined]


def test_k_means_of_separate_clusters_is_their_weighted_mean() -> None:
    x = torch.tensor([5.0, -2.6, 5.4, -3.0, 0.2, 0.0])
    weight = torch.tensor([3.0, 1.0, 1.0, 3.0, 2.0, 2.0])
    assert weighted_levels(x, weight, 3).tolist() == pytest.approx([-2.9, 0.1, 5.1])


def test_k_means_is_near_the_optimum_and_better_than_even_levels() -> None:
    """The optimum of 14 points is found by trying all ways to cut the sorted points into four parts."""
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(14, generator=generator).sort().values, torch.rand(14, generator=generator)

    def cost(levels: torch.Tensor) -> float:
        return float((weight * (x[:, None] - levels).square().amin(1)).sum())

    best = min(
        cost(torch.stack([(w * y).sum() / w.sum() for y, w in parts]))
        for cuts in itertools.combinations(range(1, 14), 3)
        for parts in [list(zip(x.tensor_split(cuts), weight.tensor_split(cuts), strict=True))]
    )
    ours = cost(weighted_levels(x, weight, 4))
    assert best - 1e-6 <= ours <= 1.3 * best
    assert ours < cost(torch.linspace(float(x[0]), float(x[-1]), 4))


def test_levels_of_few_different_values_are_finite() -> None:
    levels = weighted_levels(torch.zeros(100), torch.ones(100), 8)
    assert torch.equal(levels, torch.zeros(8))
    assert weighted_levels(torch.randn(100), torch.zeros(100), 8).isfinite().all()


def test_sensitivity_is_the_query_energy_of_a_channel_pair() -> None:
    q = torch.randn(4, 100, WIDTH)
    energy = query_energy(q, make_spec(WIDTH))
    expected = q.square().mean(1).view(2, 2, 2, WIDTH // 2).mean((1, 2))
    assert torch.allclose(energy, torch.cat((expected, expected), -1), rtol=1e-5)


def test_keys_are_coded_before_rope_with_fitted_ranges() -> None:
    data = samples()
    codec, _ = fitted(data)
    assert codec.key.space == "pre_rope"
    inside = (codec.key.normalize(flat(data.k[None])).abs() <= 1).float().mean((0, 1, 2))
    assert torch.allclose(inside, torch.full((2 * WIDTH,), 0.99), atol=2e-3)
    assert (codec.key.levels.diff() > 0).all()
    assert codec.key.levels.abs().max() <= 1


def test_levels_weigh_errors_by_queries_and_ranges() -> None:
    """Key levels minimise the error in scores, value levels the error of values: not of normalized data."""
    data = samples()
    codec, _ = fitted(data)
    unit = codec.key.normalize(flat(data.k[None]))[0, 0]
    energy = query_energy(data.q, make_spec(WIDTH)).flatten()
    inside = unit.abs() <= 1
    expected = weighted_levels(unit[inside], (energy * codec.key.half_width.square()).expand_as(unit)[inside], 4)
    assert torch.equal(codec.key.levels, expected)
    unit, outliers, span = codec.value.normalize(flat(data.v[None])[0, 0])
    inside = torch.ones_like(unit, dtype=torch.bool)
    inside.scatter_(-1, outliers, False)
    expected = weighted_levels(unit[inside], span[:, 1:].float().square().expand_as(unit)[inside], 4)
    assert torch.equal(codec.value.levels, expected)
    assert not torch.allclose(expected, weighted_levels(unit[inside], torch.ones_like(unit[inside]), 4), atol=1e-3)


def test_outliers_come_back_as_they_are() -> None:
    codec, _ = fitted(samples(), outlier_fraction=0.05)
    x = torch.randn(1, 2, 5, WIDTH).half().float()
    x[0, 1, :, 7], x[0, 0, :, 3] = 60000.0, -60000.0
    for coder in (codec.key, codec.value):
        assert coder.num_outliers == 4  # 5 % of 64 channels are 3.2
        decoded = coder.decode(coder.encode(x))
        assert torch.equal(decoded[0, 1, :, 7], x[0, 1, :, 7])
        assert torch.equal(decoded[0, 0, :, 3], x[0, 0, :, 3])
        assert (decoded == x).sum() >= 5 * 4


def test_values_span_the_range_without_outliers() -> None:
    codec, _ = fitted(samples(), outlier_fraction=0.03)
    x = torch.linspace(-1, 1, 2 * WIDTH)[torch.randperm(2 * WIDTH)]
    x = torch.where(x == 1, 500.0, torch.where(x == -1, -900.0, x)).view(1, 2, 1, WIDTH)
    codes = codec.value.encode(x)
    rest = x.flatten().sort().values[1:-1]
    assert codes.outliers.flatten().tolist() == [500.0, -900.0]
    assert codes.span.flatten().tolist() == pytest.approx([0.0, float(rest[-1])], abs=1e-3)
    assert float((codec.value.decode(codes) - x).abs().max()) < 0.6


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_outliers_and_fitted_levels_pay_on_heavy_tails(bits: int) -> None:
    data = samples()
    settings = {"k_bits": bits, "v_bits": bits}
    codec, with_outliers = fitted(data, outlier_fraction=0.04, **settings)
    _, without = fitted(data, outlier_fraction=0.0, **settings)
    for name in ("key_error", "value_error"):
        assert max(with_outliers[name]) < 0.8 * min(without[name])
    value = codec.value
    even = torch.linspace(-1, 1, 2**bits)
    fitted_error = (round_trip(value, data.v) - data.v).square().sum()
    value.levels.copy_(even)
    assert fitted_error < (round_trip(value, data.v) - data.v).square().sum()


def test_bits_of_codes_ranges_and_outliers() -> None:
    """Llama-3.1-8B's 1024 channels: 1 % are 10, of 32 bits each."""
    spec = make_spec(128, num_kv_heads=8)
    codec = get_method("kvquant").build(spec, KVQuantConfig(), 0)
    assert codec.key.bits_per_token() / 1024 == 2 + 10 * 32 / 1024
    assert codec.value.bits_per_token() / 1024 == 2 + 10 * 32 / 1024 + 32 / 1024
    none = get_method("kvquant").build(spec, KVQuantConfig(outlier_fraction=0), 0)
    assert none.key.bits_per_token() == 2 * 1024


def test_more_channels_than_indices_are_refused() -> None:
    with pytest.raises(ValueError, match="16-bit indices, too few for 65536 channels"):
        get_method("kvquant").build(make_spec(4096, num_kv_heads=16), KVQuantConfig(), 0)


def test_a_recording_without_queries_is_refused() -> None:
    with pytest.raises(ConfigError, match="--query-tokens"):
        fitted(samples(queries=0))
