"""TurboQuant against the numbers and theorems of arXiv 2504.19874."""

import math

import pytest
import torch
from factories import make_spec
from pydantic import ValidationError

from kvcli.methods.layer_codec import LayerCodec
from kvcli.methods.turboquant import TurboQuantConfig, lloyd_max, random_rotation
from kvcli.registry import get_method

WIDTH = 64
GAUSSIAN_DISTORTION = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497}
"""Least squared error of 2^b levels for N(0, 1) (Max 1960, Table I); 0.36, 0.117, 0.03, 0.009 in Theorem 1."""


def build(seed: int = 0, **settings: object) -> LayerCodec:
    config = TurboQuantConfig(rotation_seed=seed, **settings)
    return get_method("turboquant").build(make_spec(WIDTH), config, 0)


def unit_vectors(count: int, seed: int = 0) -> torch.Tensor:
    x = torch.randn(1, 2, count, WIDTH, generator=torch.Generator().manual_seed(seed))
    return x / x.norm(dim=-1, keepdim=True)


def test_centroids_of_many_dimensions_are_those_of_the_paper() -> None:
    scale = math.sqrt(2**20)
    assert [x * scale for x in lloyd_max(2**20, 1)] == pytest.approx([-math.sqrt(2 / math.pi), math.sqrt(2 / math.pi)])
    assert [x * scale for x in lloyd_max(2**20, 2)] == pytest.approx([-1.510, -0.453, 0.453, 1.510], abs=5e-4)


@pytest.mark.parametrize("width", [2, 3, 16, 64, 128])
def test_one_bit_is_the_mean_magnitude_of_a_coordinate(width: int) -> None:
    mean = math.exp(math.lgamma(width / 2) - math.lgamma((width + 1) / 2)) / math.sqrt(math.pi)
    assert lloyd_max(width, 1) == pytest.approx((-mean, mean), rel=1e-7)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_three_dimensions_have_uniform_coordinates_and_evenly_spaced_centroids(bits: int) -> None:
    """(1 - x^2)^((3 - 3) / 2) is constant."""
    expected = [-1 + (2 * i + 1) / 2**bits for i in range(2**bits)]
    assert lloyd_max(3, bits) == pytest.approx(expected, abs=1e-6)


def test_the_rotation_is_orthogonal_and_the_same_for_the_same_seed() -> None:
    a, b, c = (random_rotation(WIDTH, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert torch.allclose(a @ a.T, torch.eye(WIDTH), atol=1e-6)
    assert torch.equal(a, b)
    assert not torch.allclose(a, c)
    first, second = (get_method("turboquant").build(make_spec(WIDTH), TurboQuantConfig(), i) for i in (0, 1))
    assert not torch.equal(first.key.rotation, second.key.rotation)
    assert not torch.equal(first.key.rotation, first.value.rotation)


def test_rotations_are_distributed_uniformly() -> None:
    """A plain QR decomposition fixes the sign of the first entry, and with it a bias of what is decoded."""
    first = torch.stack([random_rotation(4, torch.Generator().manual_seed(seed))[0, 0] for seed in range(400)])
    assert abs(float((first > 0).float().mean()) - 0.5) < 0.1
    assert float(first.square().mean()) == pytest.approx(1 / 4, rel=0.15)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_squared_error_is_that_of_theorem_1(bits: int) -> None:
    codec, x = build(v_bits=bits).value, unit_vectors(4000)
    distortion = float((codec.decode(codec.encode(x)) - x).square().sum(-1).mean())
    assert distortion <= math.sqrt(3) * math.pi / 2 / 4**bits
    # coordinates on a sphere of finite dimension are a little less spread than Gaussian ones
    assert distortion == pytest.approx(GAUSSIAN_DISTORTION[bits], rel=0.06)
    assert distortion < GAUSSIAN_DISTORTION[bits] * 1.005


def test_the_error_does_not_depend_on_the_vector() -> None:
    """One large channel, the worst case of uniform quantization, costs what any vector does."""
    x = torch.zeros(1, 2, 1, WIDTH)
    x[..., 3] = 100.0
    errors = []
    for seed in range(60):
        codec = build(seed, v_bits=2).value
        errors.append(float((codec.decode(codec.encode(x)) - x).square().sum(-1).mean()) / 100.0**2)
    assert sum(errors) / len(errors) == pytest.approx(GAUSSIAN_DISTORTION[2], rel=0.1)


@pytest.mark.parametrize("bits", [2, 3])
def test_scores_of_the_prod_variant_are_unbiased_with_the_variance_of_theorem_2(bits: int) -> None:
    x = unit_vectors(200)
    y = x + 0.5 * unit_vectors(200, seed=1)
    expected, length = (y * x).sum(-1), y.square().sum(-1)
    means, errors = {}, {}
    for variant in ("mse", "prod"):
        scores = []
        for seed in range(60):
            codec = build(seed, k_bits=bits, key_variant=variant).key
            scores.append((y * codec.decode(codec.encode(x))).sum(-1))
        difference = torch.stack(scores) - expected
        means[variant], errors[variant] = float(difference.mean()), float((difference.square() / length).mean())
    assert abs(means["prod"]) < 0.004
    assert errors["prod"] < math.sqrt(3) * math.pi**2 / WIDTH / 4**bits
    assert means["mse"] < -0.8 * GAUSSIAN_DISTORTION[bits]  # centroids are shrunk: <x, x_hat> = 1 - distortion


@pytest.mark.parametrize(
    ("settings", "key", "value"),
    [
        ({"k_bits": 3, "v_bits": 2}, 3 * 64 + 16, 2 * 64 + 16),
        ({"k_bits": 3, "v_bits": 4, "key_variant": "prod"}, 3 * 64 + 32, 4 * 64 + 16),
    ],
)
def test_bits_are_codes_and_norms(settings: dict[str, object], key: int, value: int) -> None:
    codec = build(**settings)
    x = unit_vectors(10)
    for coder, head in ((codec.key, key), (codec.value, value)):
        assert coder.bits_per_token() == 2 * head == 8 * coder.encode(x).nbytes / 10


def test_lengths_are_kept_apart_from_directions() -> None:
    codec, x = build().value, 3 * unit_vectors(50)
    assert torch.allclose(codec.decode(codec.encode(2.0**10 * x)), 2.0**10 * codec.decode(codec.encode(x)), rtol=1e-3)
    assert not codec.decode(codec.encode(0 * x)).any()


def test_one_bit_leaves_none_for_the_residual() -> None:
    with pytest.raises(ValidationError, match="prod needs k_bits 2 or more"):
        TurboQuantConfig(k_bits=1, key_variant="prod")
