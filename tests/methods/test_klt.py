"""KLT: the transform of a head, keys in tiles of positions, and the fit."""

import dataclasses
import math

import pytest
import torch
from factories import make_spec
from torch import Tensor, nn

from kvcli.errors import ConfigError, UsageError
from kvcli.methods.klt.codec import KLTKey
from kvcli.methods.klt.fields import BANDS
from kvcli.methods.klt.method import KLTConfig, allocate, in_tiles, tile_rotation, transform
from kvcli.methods.layer_codec import LayerCodec
from kvcli.methods.samples import LayerFisher, LayerSamples
from kvcli.registry import get_method
from kvcli.rope import OFFSET_BLOCK, ROPE_TILE, NoRope, Rope, Rotation, unrotate

WIDTH, TOKENS = 16, 600


class Rotary(nn.Module):
    """A rotary module as models have it, with a factor of cos and sin."""

    def __init__(self, rotary_dim: int, scaling: float = 1.0) -> None:
        super().__init__()
        self.attention_scaling = scaling
        self.register_buffer("inv_freq", 1e4 ** -(torch.arange(0, rotary_dim, 2) / rotary_dim))

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = (positions.unsqueeze(-1).float() * self.inv_freq).repeat(1, 1, 2)
        return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling


def matrices(width: int, smallest: float = 1e-3, heads: int = 2, seed: int = 0) -> Tensor:
    """Covariances with eigenvalues from 1 down to `smallest`, in random axes, float64 [heads, width, width]."""
    square = torch.randn(heads, width, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    axes = torch.linalg.qr(square)[0]
    return axes * torch.logspace(0, math.log10(smallest), width, dtype=torch.float64) @ axes.mT


def normal(covariance: Tensor, count: int, seed: int = 0) -> Tensor:
    """Normal vectors [heads, count, width] of a covariance."""
    shape = (len(covariance), count, covariance.shape[-1])
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (x @ torch.linalg.cholesky(covariance).mT).float()


def mean_cost(weight: Tensor, x: Tensor) -> Tensor:
    """Mean of x^T W x of each head, for x [heads, tokens, width]."""
    return torch.einsum("htc,hcd,htd->h", x.double(), weight.double(), x.double()) / x.shape[1]


def samples(width: int = WIDTH, rotary_dim: int | None = None, queries: int = 100) -> LayerSamples:
    """Correlated keys with a large mean in slow pairs, correlated values with a mean, anisotropic queries."""
    mean = torch.linspace(-0.5, 0.5, width)
    mean[width // 2 - 2 : width // 2], mean[-2:] = 20, -20
    keys = normal(matrices(width, seed=1), TOKENS, 1) + mean
    values = normal(matrices(width, seed=2), TOKENS, 2) + 0.5
    q = torch.randn(4, queries, width, generator=torch.Generator().manual_seed(3)) * torch.linspace(0.1, 3, width)
    positions = torch.arange(TOKENS) % 300
    rotation = Rope(Rotary(rotary_dim or width)).rotation(torch.arange(queries)[None], torch.float32)
    return LayerSamples(q, keys, values, positions, rotation)


def with_fisher(data: LayerSamples) -> LayerSamples:
    width = data.q.shape[-1]
    key, value = (torch.tensor([1.0, 30.0]).view(2, 1, 1) * matrices(width, seed=seed).float() for seed in (4, 5))
    other = torch.eye(width).expand(2, -1, -1)  # what is weighted is not used
    fisher = LayerFisher(other, key, _covariance(data.k).float(), other, value, _covariance(data.v).float())
    return LayerSamples(data.q, data.keys, data.values, data.positions, data.query_rotation, fisher=fisher)


def _covariance(x: Tensor) -> Tensor:
    less = x.double() - x.double().mean(1, keepdim=True)
    return less.mT @ less / x.shape[1]


def fitted(data: LayerSamples, name: str = "klt", **settings: object) -> tuple[LayerCodec, dict[str, list[float]]]:
    assert data.query_rotation is not None
    spec = make_spec(data.q.shape[-1], rotary_dim=2 * data.query_rotation.cos.shape[-1])
    method = get_method(name)
    assert method.allocate is not None
    fisher = None if data.fisher is None else [data.fisher]
    config = method.allocate(spec, KLTConfig(**settings), fisher, lambda layer_idx: data)
    codec = method.build(spec, config, 0)
    assert method.fit is not None
    return codec, dict(method.fit(codec, data, data, config, torch.Generator()).metrics)


@pytest.mark.parametrize("width", [16, 24, 32, 96])
@pytest.mark.parametrize(("power", "of_fisher"), [(0.75, True), (0.5, False), (1.0, True)])
def test_components_have_unit_variance_and_bands_descend_in_cost(width: int, power: float, of_fisher: bool) -> None:
    covariance, fisher = matrices(width, seed=1), matrices(width, seed=2)
    found = transform(fisher, covariance, power, cost_of_fisher=of_fisher)
    inverse = torch.linalg.inv(found.basis)
    of_components = inverse @ covariance @ inverse.mT
    assert torch.allclose(of_components.diagonal(dim1=-2, dim2=-1), torch.ones(2, width, dtype=torch.float64))
    z = normal(covariance, 20_000).double() @ inverse.mT
    assert torch.allclose(z.square().mean(1), torch.ones(2, width, dtype=torch.float64), atol=0.06)
    assert (found.costs.diff(dim=-1) <= 0).all()
    band = torch.arange(width) // (width // BANDS)
    between = of_components.masked_fill(band[:, None] == band, 0)
    assert torch.allclose(between, torch.zeros_like(between), atol=1e-8)


@pytest.mark.parametrize("width", [16, 24, 96])
@pytest.mark.parametrize(("power", "of_fisher"), [(0.75, True), (0.5, False)])
def test_errors_of_a_band_cost_what_the_transform_says(width: int, power: float, of_fisher: bool) -> None:
    """x = B z: errors e of z, independent and as large in all of a band, cost E[e^T B^T F B e]."""
    covariance, fisher = matrices(width, seed=1), matrices(width, seed=2)
    found = transform(fisher, covariance, power, cost_of_fisher=of_fisher)
    weight = fisher
    if not of_fisher:  # errors cost what the metric says, Fisher information of mean 1 to a power
        mean = fisher.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
        values, vectors = torch.linalg.eigh(fisher / mean)
        weight = vectors * (values**power).unsqueeze(-2) @ vectors.mT * mean
    each = (found.basis.mT @ weight @ found.basis).diagonal(dim1=-2, dim2=-1)
    assert torch.allclose(each.unflatten(-1, (BANDS, -1)).sum(-1), found.costs)


def test_the_transform_does_not_depend_on_the_unit_of_fisher_information() -> None:
    covariance, fisher = matrices(WIDTH, seed=1), matrices(WIDTH, seed=2)
    one, other = (transform(f, covariance, 0.75, cost_of_fisher=True) for f in (fisher, 1e6 * fisher))
    assert torch.allclose(one.basis.abs(), other.basis.abs())
    assert torch.allclose(1e6 * one.costs, other.costs)
    assert torch.allclose(1e6 * one.level, other.level)


def test_no_fisher_information_and_no_variance_stay_finite() -> None:
    zero = torch.zeros(2, WIDTH, WIDTH)
    for fisher, covariance in ((zero, matrices(WIDTH)), (matrices(WIDTH), zero), (zero, zero)):
        found = transform(fisher, covariance, 0.75, cost_of_fisher=True)
        assert all(x.isfinite().all() for x in (found.basis, found.costs, found.level))


@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_matrices_are_averaged_over_the_positions_of_a_tile(rotary_dim: int) -> None:
    tile = tile_rotation(Rotary(rotary_dim).inv_freq)
    matrix, expected = matrices(WIDTH), torch.zeros(2, WIDTH, WIDTH, dtype=torch.float64)
    for position in range(ROPE_TILE):
        at = Rotation(tile.cos[:, :, position, None], tile.sin[:, :, position, None])
        turn = at.apply(torch.eye(WIDTH, dtype=torch.float64)[None, None])[0, 0].T  # columns are rotated unit vectors
        expected += turn @ matrix @ turn.T / ROPE_TILE
    assert torch.allclose(in_tiles(matrix, tile), expected)
    assert torch.allclose(expected[:, rotary_dim:, rotary_dim:], matrix[:, rotary_dim:, rotary_dim:])
    still = tile_rotation(torch.zeros(WIDTH // 2))
    assert torch.allclose(in_tiles(matrix, still), matrix)


ROPES = {
    "whole": Rope(Rotary(WIDTH)),
    "part": Rope(Rotary(8)),
    "scaled": Rope(Rotary(WIDTH, 1.2)),
    "none": NoRope(WIDTH, torch.device("cpu")),
}


def block_offsets(codec: LayerCodec, tile: Rotation) -> Tensor:
    """The offset at each position of a tile: rotated to the first position of its block."""
    assert codec.key_offset is not None
    first = torch.arange(ROPE_TILE) // OFFSET_BLOCK * OFFSET_BLOCK
    at = Rotation(tile.cos[:, :, first].float(), tile.sin[:, :, first].float())
    return at.at_each_position(codec.key_offset[None, :, None])[0]


@pytest.mark.parametrize("name", ROPES)
def test_codes_depend_on_the_position_within_a_tile_alone(name: str) -> None:
    rope = ROPES[name]
    data = samples(rotary_dim=2 * len(rope.inv_freq))
    codec, _ = fitted(data)
    k, start = data.k[None, :, :60], torch.arange(200, 260)[None]
    inputs, codes = [], []
    for tiles in (0, 1, 7):
        at = rope.rotation(start + tiles * ROPE_TILE, torch.float32)
        inputs.append(codec.encoder_input(at.apply(k), at, unrotate))
        codes.append(codec.key.encode(inputs[-1]))
        expected = tile_rotation(rope.inv_freq)
        place = start[0] % ROPE_TILE
        within = Rotation(expected.cos[:, :, place].float(), expected.sin[:, :, place].float())
        assert codec.key_offset is not None
        assert torch.allclose(inputs[-1], within.apply(k) - block_offsets(codec, expected)[:, place], atol=1e-3)
    for other in codes[1:]:  # a number on the border of two codes may be rounded the other way
        assert (other.packed == codes[0].packed).float().mean() > 0.99
        assert (other.gain == codes[0].gain).float().mean() > 0.99


@pytest.mark.parametrize("method", ["klt", "klt-tcq"])
@pytest.mark.parametrize("name", ROPES)
def test_scores_are_products_with_decoded_keys(name: str, method: str) -> None:
    rope = ROPES[name]
    data = samples(rotary_dim=2 * len(rope.inv_freq))
    codec, _ = fitted(data, method, bits=4)
    k = data.k[None, :, :300]
    rotation = rope.rotation(torch.arange(100, 400)[None], torch.float32)
    rotated = rotation.apply(k)
    codes = codec.key.encode(codec.encoder_input(rotated, rotation, unrotate))
    keys = codec.decode_keys(codes, None, rotation, torch.float32)
    less = k - k.mean(2, keepdim=True)
    assert (keys - rotated).norm() < 0.25 * less.norm()
    query = torch.randn(1, 2, 3, WIDTH)
    scores = codec.scores(query, codes, None, rotation)
    assert torch.allclose(scores, query @ keys.mT, rtol=1e-4, atol=1e-3)
    half = codec.decode_keys(codes, None, rotation, torch.float16)
    assert torch.allclose(half.float(), keys, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("fisher", [False, True])
@pytest.mark.parametrize(("width", "rotary_dim"), [(16, 16), (32, 8), (80, 80)])
def test_a_fit_takes_means_and_principal_axes(width: int, rotary_dim: int, fisher: bool) -> None:
    data = samples(width, rotary_dim)
    data = with_fisher(data) if fisher else data
    codec, metrics = fitted(data)
    assert codec.key_offset is not None
    tile = tile_rotation(Rotary(rotary_dim).inv_freq)
    offsets = block_offsets(codec, tile)
    rotated = Rotation(tile.cos.float(), tile.sin.float()).at_each_position(data.k.mean(1)[None, :, None])[0]
    rest = (rotated - offsets).unflatten(1, (-1, OFFSET_BLOCK))  # of the mean of a block nothing is left
    assert rest.mean(2).abs().max() < 1e-4
    assert torch.allclose(codec.value.mean, data.v.mean(1), atol=1e-4)
    assert not codec.key.mean.any()
    q = data.q.unflatten(0, (2, 2)).flatten(1, 2)
    of_keys = q.mT @ q if data.fisher is None else data.fisher.key_unweighted
    of_values = torch.eye(width).expand(2, -1, -1) if data.fisher is None else data.fisher.value_unweighted
    place = data.positions % ROPE_TILE
    at = Rotation(tile.cos[:, :, place].float(), tile.sin[:, :, place].float())
    keys = at.apply(data.k[None]) - offsets[:, place]
    for name, coder, x, weight in (
        ("key_error", codec.key, keys, in_tiles(of_keys, tile)),
        ("value_error", codec.value, data.v[None], of_values),
    ):
        error, less = coder.decode(coder.encode(x)) - x, x - coder.mean.unsqueeze(1)
        lost, all_of_it = mean_cost(weight, error[0]), mean_cost(weight, less[0])
        assert metrics[name] == pytest.approx((lost / all_of_it).tolist(), rel=1e-3), name
        assert lost.sum() < 0.25 * all_of_it.sum(), name
    for name, coder in (("key_bits", codec.key), ("value_bits", codec.value)):
        assert metrics[name] == [sum(fields) / BANDS for fields in coder.fields]
        assert sum(metrics[name]) == 4


@pytest.mark.parametrize("name", ["klt", "klt-tcq"])
def test_heads_that_are_correlated_lose_less_with_one_transform(name: str) -> None:
    """What a head says of another is not coded twice: at equal bits half of the error at most."""
    data = samples()
    both = [x + 0.02 * x.flip(0) for x in (data.k[:1].expand(2, -1, -1), data.v[:1].expand(2, -1, -1))]
    for x in both:
        x[1] += 0.02 * torch.randn(x[1].shape, generator=torch.Generator().manual_seed(7))
    data = LayerSamples(data.q, *both, data.positions, data.query_rotation)
    alone, together = (fitted(data, name, joint_heads=joint)[1] for joint in (1, 2))
    for error in ("key_error", "value_error"):
        assert sum(together[error]) < 0.5 * sum(alone[error])


@pytest.mark.parametrize(
    ("name", "used"), [("key", False), ("value", False), *((f"{x}_unweighted", True) for x in ("key", "value"))]
)
def test_a_fit_takes_fisher_information_without_weights(name: str, used: bool) -> None:
    data = with_fisher(samples())
    assert data.fisher is not None
    assert data.query_rotation is not None
    changed = dataclasses.replace(data.fisher, **{name: matrices(WIDTH, seed=9).float()})
    other = LayerSamples(data.q, data.keys, data.values, data.positions, data.query_rotation, fisher=changed)
    codecs = [fitted(x)[0] for x in (data, other)]
    side = [getattr(codec, name.partition("_")[0]).basis for codec in codecs]
    assert torch.equal(*side) != used


def test_heads_and_layers_whose_errors_cost_more_get_more_bits() -> None:
    fisher = with_fisher(samples()).fisher
    assert fisher is not None
    costs = {name: getattr(fisher, name) / 1e3 for name in ("key_unweighted", "value_unweighted")}
    cheap = dataclasses.replace(fisher, **costs)
    spec = dataclasses.replace(make_spec(), num_layers=2)
    config = allocate(spec, KLTConfig(bits=2.5, joint_heads=1), [cheap, fisher])
    for of_layers, total in ((config.key_fields, 9), (config.value_fields, 11)):  # values have a quarter of a bit more
        counts = [[sum(fields) for fields in layer] for layer in of_layers]
        assert sum(map(sum, counts)) == 8 * total
        assert sum(counts[0]) < sum(counts[1])
        assert counts[1][0] <= counts[1][1]  # 30 times the cost
    assert allocate(spec, config, [fisher, cheap]) == config
    joint = allocate(spec, KLTConfig(bits=2.5), [cheap, fisher])  # heads with one transform have the same fields
    assert [len({*layer}) for fields in (joint.key_fields, joint.value_fields) for layer in fields] == [1] * 4
    assert sum(map(sum, joint.key_fields[0])) < sum(map(sum, joint.key_fields[1]))
    other = allocate(dataclasses.replace(spec, value_head_dim=2 * WIDTH), KLTConfig(bits=2.5), [cheap, fisher])
    assert {sum(sum(map(sum, x)) for x in fields) for fields in (other.key_fields, other.value_fields)} == {8 * 10}


def test_without_fisher_information_all_heads_have_the_same_bits() -> None:
    config = allocate(make_spec(), KLTConfig(bits=2), None)
    assert config.key_fields == config.value_fields
    assert len({*config.key_fields[0]}) == 1


def test_a_layer_without_rope_is_not_averaged_over_positions() -> None:
    """Its keys have the same covariance at every position, so its error is less than if they were rotated."""
    fisher = with_fisher(samples()).fisher
    assert fisher is not None
    spec = dataclasses.replace(make_spec(), num_layers=2, unrotated=(1,))
    turned, still = (
        in_tiles(fisher.key_covariance, tile_rotation(x)) for x in (Rotary(WIDTH).inv_freq, torch.zeros(8))
    )
    assert torch.allclose(still, fisher.key_covariance.double())
    assert not torch.allclose(turned, still, atol=1e-3)
    both = allocate(spec, KLTConfig(bits=2), [fisher, fisher]).key_fields
    rotated = allocate(dataclasses.replace(spec, unrotated=()), KLTConfig(bits=2), [fisher, fisher]).key_fields
    assert both != rotated


def test_what_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="head_dim 20 is no multiple of 8"):
        get_method("klt").build(make_spec(20), KLTConfig(), 0)
    with pytest.raises(ValueError, match="key_fields and value_fields are given together"):
        KLTConfig(key_fields=(((8,),),))
    fields = (((8,), (8,), (8,)),)
    with pytest.raises(ValueError, match="2 kv heads for each of 1 layers"):
        KLTConfig(key_fields=fields, value_fields=fields).resolve(make_spec())
    with pytest.raises(ValueError, match="heads that share a transform, 2 each, have different fields"):
        KLTKey(make_spec(), [(8,), (4, 4)], joint=2)
    with pytest.raises(ConfigError, match="--query-tokens above 0"):
        fitted(samples(queries=0))


@pytest.mark.parametrize("method", ["klt", "klt-tcq"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("recorded", [True, False])
def test_a_rank_has_the_codes_of_its_heads(rank: int, recorded: bool, method: str) -> None:
    data = with_fisher(samples()) if recorded else samples()
    codec, _ = fitted(data, method, bits=1.5, head_groups=2)
    part, x = codec.of_rank(rank, 2), data.k[:, :50].unsqueeze(0)
    assert codec.key_offset is not None
    assert part.key_offset is not None
    assert torch.equal(part.key_offset, codec.key_offset[[rank]])
    for whole, alone in ((codec.key, part.key), (codec.value, part.value)):
        codes, of_head = whole.encode(x), alone.encode(x[:, [rank]])
        assert torch.equal(codes.packed.chunk(2, -1)[rank], of_head.packed)
        assert torch.equal(codes.gain[:, [rank]], of_head.gain)
        torch.testing.assert_close(whole.decode(codes)[:, [rank]], alone.decode(of_head))
        assert 2 * alone.bits_per_token() == whole.bits_per_token()


def test_ranks_whose_codes_have_other_sizes_are_refused() -> None:
    codec, _ = fitted(with_fisher(samples()), bits=1.5, joint_heads=1)
    with pytest.raises(UsageError, match=r"heads of 2 ranks have different bytes \(2, 4\)"):
        codec.of_rank(0, 2)
    with pytest.raises(UsageError, match="3 ranks cannot divide codes of 2 kv heads"):
        codec.of_rank(0, 3)
    with pytest.raises(UsageError, match="2 ranks cannot divide codes of 2 kv heads"):  # which share a transform
        fitted(samples())[0].of_rank(0, 2)
    with pytest.raises(ValueError, match="joint_heads 2 does not divide the 1 kv heads of a group"):
        KLTConfig(head_groups=2, joint_heads=2).resolve(make_spec())
    with pytest.raises(ValueError, match="joint_heads 2 makes transforms of 528 channels; 512 is the most"):
        KLTConfig(joint_heads=2).resolve(make_spec(264))
    with pytest.raises(ValueError, match="head_groups 3 does not divide the 2 kv heads"):
        get_method("klt").build(make_spec(), KLTConfig(head_groups=3), 0)
