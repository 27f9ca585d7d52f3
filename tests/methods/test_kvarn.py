"""KVarN (arXiv 2606.03458): rotation, variance normalization, rounding of tiles."""

import math

import pytest
import torch
from factories import make_spec
from pydantic import ValidationError

from kvcli.methods.kvarn import KVarNConfig, imbalance, normalizing_scales
from kvcli.methods.layer_codec import LayerCodec
from kvcli.methods.oscar import hadamard
from kvcli.methods.packing import unpack_planes
from kvcli.registry import get_method

WIDTH, GROUP = 64, 32


def build(width: int = WIDTH, **settings: object) -> LayerCodec:
    method = get_method("kvarn")
    config = KVarNConfig(**{"group_size": GROUP, "residual_length": GROUP, **settings})
    return method.build(make_spec(width, rotary_dim=width - width % 2), config, 0)


def tokens(count: int = 4 * GROUP, width: int = WIDTH, seed: int = 0) -> torch.Tensor:
    return torch.randn(1, 2, count, width, generator=torch.Generator().manual_seed(seed))


def error(coder: object, x: torch.Tensor) -> float:
    return float((coder.decode(coder.encode(x)) - x).norm() / x.norm())  # type: ignore[attr-defined]


def scaled(seed: int = 0) -> torch.Tensor:
    """A tile of unit variances times scales of its tokens and channels that differ by factors of 8 and 6."""
    generator = torch.Generator().manual_seed(seed)
    x = tokens(GROUP, seed=seed)[0, 0]
    token, channel = (torch.rand(n, generator=generator) for n in (GROUP, WIDTH))
    return x * 8 ** token[:, None] * 6**channel


def test_normalized_tiles_have_variance_1_along_both_axes() -> None:
    """Means along the two axes vary differently, so that both variances are exactly 1 up to one factor near 1."""
    tile = scaled()
    t, c = normalizing_scales(tile, 50)
    normal = tile / tile.std(correction=0) / t / c
    for along in (0, 1):
        std = normal.std(along, correction=0)
        assert torch.allclose(std, std.mean().expand_as(std), rtol=1e-5)
        assert std.mean() == pytest.approx(1, abs=0.02)
    again = [x.flatten() for x in normalizing_scales(normal, 50)]
    assert all(torch.allclose(x, x[0].expand_as(x), rtol=1e-5) for x in again), "a fixed point"


def test_the_scales_are_those_of_a_loop_in_plain_python() -> None:
    """Divide by the deviations of the tokens, then of the channels; the round with the least imbalance counts."""
    tile = scaled(1)[:4, :8].double() / scaled(1)[:4, :8].double().std(correction=0)

    def std(values: list[float]) -> float:
        mean = sum(values) / len(values)
        return math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))

    t, c = [1.0] * 4, [1.0] * 8

    def rows() -> list[list[float]]:
        return [[float(tile[i, j]) / t[i] / c[j] for j in range(8)] for i in range(4)]

    def worst() -> float:
        deviations = [std(row) for row in rows()], [std(list(column)) for column in zip(*rows(), strict=True)]
        return sum(max(x) / min(x) for x in deviations)

    found = [(worst(), t[:], c[:])]
    for _ in range(3):
        t = [x * std(row) for x, row in zip(t, rows(), strict=True)]
        c = [x * std(list(column)) for x, column in zip(c, zip(*rows(), strict=True), strict=True)]
        found.append((worst(), t[:], c[:]))
    _, t, c = min(found, key=lambda x: x[0])
    ours = normalizing_scales(tile.float(), 3)
    assert ours[0].flatten().tolist() == pytest.approx(t, rel=1e-4)
    assert ours[1].flatten().tolist() == pytest.approx(c, rel=1e-4)


def test_no_round_counts_that_makes_a_tile_less_even() -> None:
    tile = scaled(2)
    values = [float(imbalance(tile / t / c)) for t, c in (normalizing_scales(tile, n) for n in range(6))]
    assert values == sorted(values, reverse=True)
    assert values[-1] < 2.1 < values[0]


def test_scales_do_not_depend_on_the_unit_of_the_values() -> None:
    for factor in (1e-4, 1e4):
        for ours, other in zip(normalizing_scales(scaled(), 8), normalizing_scales(factor * scaled(), 8), strict=True):
            assert torch.allclose(ours, other, rtol=1e-3)


@pytest.mark.parametrize("bits", [2, 4])
def test_codes_are_those_of_normalized_rotated_tiles(bits: int) -> None:
    """B = X H / (t c^T) is rounded in the range of a channel (keys) or token (values), and multiplied back."""
    codec, x = build(k_bits=bits, v_bits=bits), tokens() * torch.logspace(-1, 1, WIDTH)
    h = hadamard(WIDTH).float()
    tiles = (x @ h).unflatten(2, (-1, GROUP))
    t, c = normalizing_scales(tiles, 16)
    balanced = tiles / t / c
    for coder, along in ((codec.key, 3), (codec.value, 4)):
        low, high = balanced.amin(along, keepdim=True), balanced.amax(along, keepdim=True)
        step = (high - low) / (2**bits - 1)
        index = ((balanced - low) / step).round()
        expected = ((index * step + low) * t * c).flatten(2, 3) @ h
        codes = coder.encode(x)
        same = unpack_planes(codes.packed, bits, WIDTH) == index.flatten(2, 3)
        assert same.float().mean() > 0.995, "some codes at a rounding edge differ"
        assert (coder.decode(codes) - expected).norm() < 0.04 * x.norm()


@pytest.mark.parametrize("width", [WIDTH, 80])
def test_bits_are_counted_with_all_scales(width: int) -> None:
    codec, x = build(width, k_bits=2, v_bits=4), tokens(width=width)
    expected = (2 * width + 32 * width / GROUP + 16, 4 * width + 32 + 16 * width / GROUP)
    for coder, bits in zip((codec.key, codec.value), expected, strict=True):
        assert coder.bits_per_token() == 2 * bits
        assert 8 * coder.encode(x).nbytes == x.shape[2] * coder.bits_per_token()


def test_outlying_tokens_leave_the_others_as_they_are() -> None:
    """A token 100 times as large as the rest of its tile sets the range of every channel, but for normalization."""
    x = tokens()
    large = x.clone()
    large[:, :, ::GROUP] *= 100
    others = torch.arange(x.shape[2]) % GROUP > 0
    for normalized, plain in ((build().key, build(iterations=0).key), (build().value, build(iterations=0).value)):
        lost = [
            float((coder.decode(coder.encode(large)) - large)[:, :, others].norm() / large[:, :, others].norm())
            for coder in (normalized, plain)
        ]
        assert lost[0] < 1.15 * error(normalized, x)
        assert lost[0] < lost[1] / 5 or normalized.range_axis == -1
    assert error(build().key, large) < 0.45


@pytest.mark.parametrize("width", [2, 48, 80, 96])
def test_other_widths_are_rotated_in_blocks(width: int) -> None:
    key = build(width, k_bits=8).key
    assert width % len(key.rotation) == 0
    assert torch.allclose(key.rotation @ key.rotation, torch.eye(len(key.rotation)), atol=1e-6)
    assert error(key, tokens(width=width)) < 0.02


def test_what_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="even head_dim, not 15"):
        build(15)
    with pytest.raises(ValidationError, match="residual_length 100 must be a positive multiple of group_size 128"):
        KVarNConfig(residual_length=100)


def test_silent_tokens_and_the_largest_numbers_stay_finite_and_close() -> None:
    x = tokens()
    x[:, :, 3], x[:, :, 7] = 0.0, x[:, :, 7] * 1e-4
    for coder in (build(k_bits=4).key, build(v_bits=4).value):
        assert error(coder, x) < 0.2
        decoded = coder.decode(coder.encode(x))
        assert decoded[:, :, 3].abs().max() < 0.2
        assert error(coder, x * (6e4 / WIDTH**0.5 / float(x.abs().max()))) < 0.2


def test_keys_and_values_become_codes_a_tile_at_a_time() -> None:
    for schedule in get_method("kvarn").schedules(KVarNConfig()):
        assert [schedule.encoded_now(count) for count in (0, 127, 128, 255, 300)] == [0, 0, 128, 128, 256]
