"""KLT: the codes of tokens, their gains, and what they decode to."""

import math
from typing import Any

import pytest
import torch
from factories import make_spec
from test_klt import WIDTH, matrices, normal
from torch import Tensor

from kvcli.methods.klt import trellis
from kvcli.methods.klt.codec import KLTCodes, KLTKey, KLTValue
from kvcli.methods.klt.fields import BANDS, MAX_SHIFT, SCALAR, TRELLIS, TRIED_GAINS, Code, share
from kvcli.methods.klt.method import KLTConfig, transform
from kvcli.methods.turboquant import TurboQuantConfig
from kvcli.registry import get_method

CODES = pytest.mark.parametrize("code", [SCALAR, TRELLIS], ids=["scalar", "trellis"])


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
    fields = [[*f, *[0] * (BANDS - len(f))] for f in codec.fields]
    steps = torch.tensor([[(1.0, *code.steps[1:])[b] for b in f for _ in range(2)] for f in fields])
    z = (x - codec.mean.unsqueeze(1)) @ torch.linalg.inv(basis / steps.unsqueeze(1)).mT
    for head, fields in enumerate(codec.fields):
        coded = z[head, :, : 2 * len(fields)]
        stored = codec.encode(x[None]).gain[0, head, :, 0].int()
        size = codec.widening * coded.square().mean(-1).sqrt()
        away = {*(stored - (128 + 16 * size.log2()).round().int()).tolist()}
        if kind is KLTKey:
            assert away == ({0} if code.trellis else {*TRIED_GAINS})
        else:
            assert max(map(abs, away)) <= MAX_SHIFT
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
    within = away.abs() < MAX_SHIFT
    assert within.float().mean() > (0.5 if bits == 1 else 0.99)
    decoded = codec.analyse(codec.decode(codes))[0]
    off = 16 * ((y * decoded).sum(-1) / y.square().sum(-1)).log2()
    assert off[within].abs().max() < 0.501
    assert (off[away == MAX_SHIFT] < 0.501).all()


@pytest.mark.parametrize("kind", [KLTKey, KLTValue])
def test_a_token_of_one_large_channel_does_not_blow_up_the_others(kind: type[Any]) -> None:
    """Its gain stays near the root mean square, however far that is from what the channel needs."""
    codec, _ = value_codec(torch.eye(128, dtype=torch.float64).repeat(2, 1, 1), 1, SCALAR, kind)
    x = torch.zeros(1, 2, 1, 128)
    x[..., 5] = 1000.0
    assert (codec.decode(codec.encode(x)) - x).norm() < 1.5 * x.norm()


@pytest.mark.parametrize("octaves", [0, -7.7, 7.7])
def test_the_gain_with_the_least_error_is_taken(octaves: float) -> None:
    """Of all that are tried, also where they would be stored as less than 1 or more than 255."""
    codec, _ = value_codec(matrices(64), 2.5, SCALAR, KLTKey)
    x = 2.0**octaves * normal(matrices(64), 300)[None]
    y, size = codec.analyse(x)
    half = codec.tables.levels.unsqueeze(1).double() / 2
    middle = (128 + 16 * size.double().log2()).round().clamp(0, 255)
    errors = []
    for more in TRIED_GAINS:
        stored = (middle + more).clamp(1, 255).where(middle > 0, 0)
        gain = (2 ** ((stored - 128) / 16)).where(stored > 0, 0)
        levels = (y.double() / gain.clamp_min(1e-30) + half).round().clamp_min(0).minimum(2 * half)
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
    for joint in (1, 2):
        config = KLTConfig(joint_heads=joint)
        codec = get_method("klt").build(make_spec(), config, 0).key
        codes = codec.encode(torch.randn(1, 2, 5, WIDTH))
        assert 8 * codes.nbytes == 5 * codec.bits_per_token()
        assert not codec.decode(codes).any()
        unused = get_method("klt").build(make_spec(), config, 0).key
        fitted = 4 * (2 * 2 * joint * WIDTH * WIDTH + 2 * WIDTH)
        tables = 2 * (WIDTH * (8 + 8 + 5 * 4) + 4 * 4 + (BANDS + 1) * 6 * 4) + 4 * 8
        query = 2 * (2 * WIDTH * (joint * WIDTH + 2 * 16) + 4 * (2 * WIDTH + 1))
        assert unused.codebook_bytes() == codec.codebook_bytes() == fitted + tables + query
        assert get_method("klt").build(make_spec(), config, 0).value.codebook_bytes() == fitted + tables


def test_a_basis_of_very_unequal_columns_is_inverted_exactly() -> None:
    covariance = matrices(WIDTH, 1e-10)
    codec, _ = value_codec(covariance, 4)
    x = normal(covariance, 200)
    y, _ = codec.analyse(x[None])
    assert torch.allclose(y @ codec.basis.mT, x[None], atol=1e-5)
