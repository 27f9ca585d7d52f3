"""KLT: the transform of a head, its codes, keys in tiles of positions, and the fit."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from factories import make_spec
from torch import Tensor, nn

from kvcli.errors import ConfigError, UsageError
from kvcli.methods.klt import trellis
from kvcli.methods.klt.codec import KLTCodes, KLTKey, KLTValue
from kvcli.methods.klt.fields import BANDS, MOST_MORE, SCALAR, TRELLIS, TRIED_GAINS, Code, Fields, share
from kvcli.methods.klt.method import KLTConfig, allocate
from kvcli.methods.klt.transform import in_tiles, tile_rotation, transform
from kvcli.methods.layer_codec import LayerCodec
from kvcli.methods.samples import LayerFisher, LayerSamples
from kvcli.methods.turboquant import TurboQuantConfig
from kvcli.registry import get_method
from kvcli.rope import OFFSET_BLOCK, ROPE_TILE, NoRope, Rope, Rotation, unrotate

WIDTH, TOKENS = 16, 600

CODES = pytest.mark.parametrize("code", [SCALAR, TRELLIS], ids=["scalar", "trellis"])


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
    config = method.allocate(spec, KLTConfig(**settings), None if data.fisher is None else [data.fisher])
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


def value_codec(covariance: Tensor, bits: float, code: Code = SCALAR, kind: type[Any] = KLTValue) -> tuple[Any, Tensor]:
    """A codec of vectors of a covariance whose errors cost the same in every direction, and the predicted errors."""
    even = torch.eye(covariance.shape[-1], dtype=torch.float64).expand_as(covariance)
    found = transform(even, covariance, 1.0, cost_of_fisher=True)
    fields = share(code, [*found.costs], bits)
    codec = kind(make_spec(covariance.shape[-1], len(covariance)), fields, code)
    codec.set_basis(found.basis)
    table = torch.tensor(code.distortion, dtype=torch.float64)
    padded = torch.tensor([[*x, *[0] * (BANDS - len(x))] for x in fields])
    return codec, (table[padded] * found.costs).sum(-1)


def test_no_vectors_have_no_codes() -> None:
    codec, _ = value_codec(matrices(64), 2, TRELLIS)
    for shape in ((1, 2, 0, 64), (0, 2, 5, 64)):
        codes = codec.encode(torch.zeros(shape))
        assert codes.packed.shape[::2] == shape[::2]
        assert codec.decode(codes).shape == shape


@CODES
@pytest.mark.parametrize("width", [80, 96, 128])
@pytest.mark.parametrize("bits", [1, 2, 3])
def test_the_error_of_normal_vectors_is_below_the_predicted_one(code: Code, width: int, bits: int) -> None:
    """Of keys, by what the choice of each token's gain is worth: with root mean squares as gains it is about that.

    Gains of a trellis are those, rounded, and trellises of few channels are worse.
    """
    covariance = matrices(width)
    codec, predicted = value_codec(covariance, bits, code, KLTKey)
    x = normal(covariance, 2000)
    error = (codec.decode(codec.encode(x[None]))[0] - x).square().sum(-1).mean(-1)
    if code.trellis:
        assert error.tolist() == pytest.approx(predicted.tolist(), rel=0.15)
    else:
        assert (0.85 * predicted < error).all()
        assert (error < 0.96 * predicted).all()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_correlated_vectors_are_coded_better_than_by_bits_that_are_the_same_everywhere(bits: int) -> None:
    covariance = matrices(128)
    x = normal(covariance, 1000)[None]
    codec, _ = value_codec(covariance, bits)
    turboquant = get_method("turboquant").build(make_spec(128), TurboQuantConfig(v_bits=bits), 0).value
    assert codec.bits_per_token() < turboquant.bits_per_token()
    errors = [(coder.decode(coder.encode(x)) - x).square().sum() for coder in (codec, turboquant)]
    assert errors[0] < 0.5 * errors[1]


@CODES
@pytest.mark.parametrize("octaves", [-6, -1, 1, 5])
def test_a_factor_of_a_token_is_a_factor_of_what_is_decoded(code: Code, octaves: int) -> None:
    codec, _ = value_codec(matrices(WIDTH), 2, code)
    x = normal(matrices(WIDTH), 200)[None]
    codes, scaled = codec.encode(x), codec.encode(x * 2.0**octaves)
    assert (codes.packed == scaled.packed).float().mean() >= (0.98 if code.trellis else 1)
    assert torch.equal(codes.gain + 16 * octaves, scaled.gain.int())
    expected = codec.decode(codes) * 2.0**octaves
    decoded = codec.decode(KLTCodes(codes.packed, scaled.gain))
    assert (decoded - expected).abs().max() < 1e-5 * expected.abs().max()


@CODES
@pytest.mark.parametrize("kind", [KLTKey, KLTValue])
def test_gains_are_about_the_size_of_what_is_coded_of_a_token(code: Code, kind: type[Any]) -> None:
    """Components without a code do not count; a token that is the mean has a gain of 0 and is decoded as the mean."""
    codec, _ = value_codec(matrices(WIDTH), 2, code, kind)
    codec.mean.copy_(torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH))
    x = normal(matrices(WIDTH), 400) + codec.mean.unsqueeze(1)
    basis = torch.stack([value_codec(matrices(WIDTH), 2, code, kind)[0].basis[head] for head in range(2)])
    steps = torch.tensor([[(1.0, *code.steps[1:])[b] for b in _padded(f) for _ in range(2)] for f in codec.fields])
    z = (x - codec.mean.unsqueeze(1)) @ torch.linalg.inv(basis / steps.unsqueeze(1)).mT
    for head, fields in enumerate(codec.fields):
        coded = z[head, :, : 2 * len(fields)]
        stored = codec.encode(x[None]).gain[0, head, :, 0].int()
        size = codec.widening * coded.square().mean(-1).sqrt()
        away = {*(stored - (128 + 16 * size.log2()).round().int()).tolist()}
        if kind is KLTKey:
            assert away == ({0} if code.trellis else {*TRIED_GAINS})
        else:
            assert max(map(abs, away)) <= MOST_MORE
    still = codec.encode(codec.mean[None, :, None])
    assert not still.gain.any()
    assert torch.equal(codec.decode(still), codec.mean[None, :, None])


@CODES
@pytest.mark.parametrize("bits", [1, 2, 3])
def test_values_are_decoded_without_bias(code: Code, bits: int) -> None:
    """As far as gains are stored: in what is coded, what is decoded has the product with a token that it has itself."""
    codec, _ = value_codec(matrices(128), bits, code)
    x = normal(matrices(128), 400)[None]
    codes = codec.encode(x)
    y, size = codec.analyse(x)
    y = y * codec.tables.levels.sign().unsqueeze(1)
    away = codes.gain[..., 0] - (128 + 16 * size[..., 0].log2()).round()
    within = away.abs() < MOST_MORE
    assert within.float().mean() > (0.5 if bits == 1 else 0.99)
    decoded = codec.analyse(codec.decode(codes))[0]
    off = 16 * ((y * decoded).sum(-1) / y.square().sum(-1)).log2()
    assert off[within].abs().max() < 0.501
    assert (off[away == MOST_MORE] < 0.501).all()


@pytest.mark.parametrize("kind", [KLTKey, KLTValue])
def test_a_token_of_one_large_channel_does_not_blow_up_the_others(kind: type[Any]) -> None:
    """Its gain stays near the root mean square, however far that is from what the channel needs."""
    codec, _ = value_codec(torch.eye(128, dtype=torch.float64).repeat(2, 1, 1), 1, SCALAR, kind)
    x = torch.zeros(1, 2, 1, 128)
    x[..., 5] = 1000.0
    assert (codec.decode(codec.encode(x)) - x).norm() < 1.5 * x.norm()


@pytest.mark.parametrize("octaves", [0, -7.4, 7.7])
def test_the_gain_with_the_least_error_is_taken(octaves: float) -> None:
    """Of all that are tried, also where they would be stored as less than 1 or more than 255."""
    codec, _ = value_codec(matrices(64), 2.5, SCALAR, KLTKey)
    x = 2.0**octaves * normal(matrices(64), 300)[None]
    y, size = codec.analyse(x)
    half = codec.tables.levels.unsqueeze(1).double() / 2
    middle = (128 + 16 * size.double().log2()).round().clamp(0, 255)
    errors = []
    for more in TRIED_GAINS:
        stored = (middle + more).clamp(1, 255)
        gain = 2 ** ((stored - 128) / 16)
        levels = (y.double() / gain + half).round().clamp_min(0).minimum(2 * half)
        errors.append(((y - gain * (levels - half)).square().sum(-1), stored[..., 0]))
    least = torch.stack([error for error, _ in errors]).amin(0)
    gain = codec.encode(x).gain[..., 0]
    taken = torch.stack([error.where(stored == gain, math.inf) for error, stored in errors]).amin(0)
    assert (taken <= least * (1 + 1e-5)).all()


def test_channels_without_a_code_do_not_choose_the_gain() -> None:
    """However large they are."""
    codec, _ = value_codec(matrices(64), 1)
    x = normal(matrices(64), 300)[None]
    y, size = codec.analyse(x)
    uncoded = (codec.tables.levels == 0).unsqueeze(1)
    assert uncoded.any()
    middle, large, codes = (128 + 16 * size.log2()).round(), y.masked_fill(uncoded, 1e5), codec.encode(x)
    assert torch.equal(codec.best_gain(large, middle), codec.best_gain(y, middle))
    assert torch.equal(codec.unbiased_gain(large, codes), codec.unbiased_gain(y, codes))


def _padded(fields: Fields) -> list[int]:
    return [*fields, *[0] * (BANDS - len(fields))]


def test_steps_are_wider_than_those_of_normal_numbers() -> None:
    spec, fields = make_spec(), [(4, 4)] * 2
    codecs = [kind(spec, fields, code) for kind in (KLTKey, KLTValue) for code in (SCALAR, TRELLIS)]
    assert [codec.widening for codec in codecs] == [1.0, 1.08, 1.15, 1.15]


@CODES
@pytest.mark.parametrize("kind", [KLTKey, KLTValue])
def test_the_range_is_that_of_gains(code: Code, kind: type[Any]) -> None:
    """Whatever is within it has the gain that it needs."""
    codec, _ = value_codec(matrices(WIDTH), 2, code, kind)
    x = normal(matrices(WIDTH), 50)[None]
    most = x * (0.99 * codec.max_magnitude / codec.analyse(x)[1])
    same = codec.encode(most).gain - 64 == codec.encode(most / 16).gain
    assert same.float().mean() > (
        0.7 if kind is KLTKey else 0.99
    )  # some of those that are tried for keys are beyond it
    within = x * (0.9 * codec.max_magnitude / codec.peak(x, codec.encode(x)))
    assert codec.peak(within, codec.encode(within)) < codec.max_magnitude
    assert (codec.decode(codec.encode(within)) - within).norm() < 0.5 * within.norm()
    beyond = within * 2
    assert codec.peak(beyond, codec.encode(beyond)) > codec.max_magnitude
    assert codec.decode(codec.encode(beyond)).isfinite().all()


@CODES
@pytest.mark.parametrize(("width", "bits"), [(16, 2), (16, 1.5), (80, 3), (96, 2.5), (128, 1), (128, 4)])
def test_bits_are_counted_with_gains(code: Code, width: int, bits: float) -> None:
    codec, _ = value_codec(matrices(width), bits, code)
    assert codec.bits_per_token() == 2 * (bits * width + 8)
    codes = codec.encode(normal(matrices(width), 30)[None])
    assert 8 * codes.nbytes == 30 * codec.bits_per_token()


def test_codes_are_in_the_fields_of_their_bytes() -> None:
    """Byte j of a field's bytes holds channel j of its band, from the field's first bit on."""
    codec, _ = value_codec(matrices(32), 2.5, SCALAR, KLTKey)
    x = normal(matrices(32), 20)
    codes = codec.encode(x[None])
    y = (x - codec.mean.unsqueeze(1)) @ torch.linalg.inv(codec.basis).mT
    gain, first = codec.encode(x[None]).gain[0], 0
    for head, fields in enumerate(codec.fields):
        for band, (bits, (byte, start)) in enumerate(zip(fields, codec.code.places(fields), strict=True)):
            at = first + 4 * byte
            stored = codes.packed[0, 0, :, at : at + 4] >> start & 2**bits - 1
            exact = y[head, :, 4 * band : 4 * band + 4] / 2 ** ((gain[head].float() - 128) / 16)
            expected = (exact + (2**bits - 1) / 2).clamp(0, 2**bits - 1)
            assert (stored - expected).abs().max() < 0.501
        first += sum(fields) // 8 * 4
    assert codes.packed.shape[-1] == first


@pytest.mark.parametrize("width", [8, 16, 24, 32, 80])
def test_bits_of_a_trellis_are_in_the_first_bytes(width: int) -> None:
    """Bit f of a channel's first byte is that of band f; the channel before the first of a band is the last of one."""
    codec, _ = value_codec(matrices(width), 2.5, TRELLIS)
    x = normal(matrices(width), 20)
    codes, lanes, first = codec.encode(x[None]), width // BANDS, 0
    decoded = (codec.decode(codes)[0] - codec.mean.unsqueeze(1)) @ torch.linalg.inv(codec.basis).mT
    for head, fields in enumerate(codec.fields):
        stored = codes.packed[0, 0, :, first : first + sum(fields) // 8 * lanes].int().unflatten(-1, (-1, lanes))
        bits, levels = [], []
        for band, (count, (byte, start)) in enumerate(zip(fields, codec.code.places(fields), strict=True)):
            bits.append(stored[:, 0] >> band & 1)
            levels.append(stored[:, byte] >> start & 2 ** (count - 1) - 1)
        level = 4 * torch.cat(levels, 1) + trellis.subsets(torch.cat(bits, 1).T).T
        last = torch.tensor([2 ** (count + 1) - 1 for count in fields]).repeat_interleave(lanes)
        gain = 2 ** ((codes.gain[0, head].float() - 128) / 16)
        assert torch.allclose(decoded[head, :, : len(last)], (level - last / 2) * gain, rtol=1e-3, atol=1e-3)
        first += sum(fields) // 8 * lanes
    assert codes.packed.shape[-1] == first


def test_random_bases_can_be_inverted() -> None:
    """As `kvcli bench` makes them."""
    codec = get_method("klt").build(make_spec(), KLTConfig(bits=3), 0)
    for coder in (codec.key, codec.value):
        coder.randomize_(torch.Generator().manual_seed(0))
        x = torch.randn(1, 2, 100, WIDTH)
        assert (coder.decode(coder.encode(x)) - x).square().mean() < 0.2


def test_codecs_that_are_not_fitted_make_codes() -> None:
    """Plans of caches take their bytes from such codecs."""
    codec = get_method("klt").build(make_spec(), KLTConfig(), 0).key
    codes = codec.encode(torch.randn(1, 2, 5, WIDTH))
    assert 8 * codes.nbytes == 5 * codec.bits_per_token()
    assert not codec.decode(codes).any()
    unused = get_method("klt").build(make_spec(), KLTConfig(), 0).key
    fitted = 4 * (2 * 2 * WIDTH * WIDTH + 2 * WIDTH)
    tables = 2 * (WIDTH * (8 + 8 + 5 * 4) + 4 * 4 + (BANDS + 1) * 6 * 4) + 4 * 8
    query = 2 * (2 * WIDTH * (WIDTH + 2 * 16) + 4 * (2 * WIDTH + 1))
    assert unused.codebook_bytes() == codec.codebook_bytes() == fitted + tables + query
    assert get_method("klt").build(make_spec(), KLTConfig(), 0).value.codebook_bytes() == fitted + tables


def test_a_basis_of_very_unequal_columns_is_inverted_exactly() -> None:
    covariance = matrices(WIDTH, 1e-10)
    codec, _ = value_codec(covariance, 4)
    x = normal(covariance, 200)
    y, _ = codec.analyse(x[None])
    assert torch.allclose(y @ codec.basis.mT, x[None], atol=1e-5)


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
        expected = mean_cost(weight, error[0]) / mean_cost(weight, less[0])
        assert metrics[name] == pytest.approx(expected.tolist(), rel=1e-3), name
        assert max(metrics[name]) < 0.25, name
    for name, coder in (("key_bits", codec.key), ("value_bits", codec.value)):
        assert metrics[name] == [sum(fields) / BANDS for fields in coder.fields]
        assert sum(metrics[name]) == 4


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
    config = allocate(spec, KLTConfig(bits=2.5), [cheap, fisher])
    for of_layers, total in ((config.key_fields, 9), (config.value_fields, 11)):  # values have a quarter of a bit more
        counts = [[sum(fields) for fields in layer] for layer in of_layers]
        assert sum(map(sum, counts)) == 8 * total
        assert sum(counts[0]) < sum(counts[1])
        assert counts[1][0] <= counts[1][1]  # 30 times the cost
    assert allocate(spec, config, [fisher, cheap]) == config
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
    codec, _ = fitted(with_fisher(samples()), bits=1.5)
    with pytest.raises(UsageError, match=r"heads of 2 ranks have different bytes \(2, 4\)"):
        codec.of_rank(0, 2)
    with pytest.raises(UsageError, match="3 ranks cannot divide codes of 2 kv heads"):
        codec.of_rank(0, 3)
    with pytest.raises(ValueError, match="head_groups 3 does not divide the 2 kv heads"):
        get_method("klt").build(make_spec(), KLTConfig(head_groups=3), 0)
