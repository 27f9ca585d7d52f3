"""QJL's laws: unbiased scores with the derived variance, for both sketches; norms, outliers, seeds."""

import math

import pytest
import torch
from factories import make_spec

from kvcli.kernels.launch import norm_unit
from kvcli.methods.config import QJLConfig
from kvcli.methods.qjl.codec import QJLKey, QJLState, random_sketch, sketch_bias


def make(config: QJLConfig, outliers: torch.Tensor | None = None, head_dim: int = 16) -> tuple[QJLKey, QJLState]:
    codec = QJLKey(make_spec(head_dim), config, 0)
    mask = torch.zeros(1, 2, head_dim) if outliers is None else outliers
    return codec, QJLState(mask)


def scores(sketch: str, m: int, trials: int, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Scores of one pair under many independent sketches."""
    d = q.shape[-1]
    generator = torch.Generator().manual_seed(0)
    bias = sketch_bias(d) if sketch == "orthogonal" else 1.0
    estimates = []
    for _ in range(trials):
        s = random_sketch(m, d, sketch == "orthogonal", generator)
        estimates.append(math.sqrt(math.pi / 2) / m / bias * k.norm() * ((s @ q) * (s @ k).sign()).sum())
    return torch.stack(estimates)


@pytest.mark.parametrize("sketch", ["gaussian", "orthogonal"])
def test_scores_are_unbiased_with_the_derived_variance(sketch: str) -> None:
    torch.manual_seed(0)
    d, m, trials = 16, 32, 6000
    q, k = torch.randn(d), torch.randn(d)
    estimates = scores(sketch, m, trials, q, k)
    variance = float((math.pi / 2 * q.norm() ** 2 * k.norm() ** 2 - (q @ k) ** 2) / m)
    assert abs(estimates.mean() - q @ k) < 4 * math.sqrt(variance / trials)
    ratio = float(estimates.var()) / variance
    if sketch == "gaussian":
        assert 0.9 < ratio < 1.1
    else:
        assert 0.2 < ratio < 0.55  # about a third


@pytest.mark.parametrize(("d", "bias"), [(64, 1.0039137), (128, 1.0019550), (256, 1.0009770)])
def test_bias_of_the_orthogonal_sketch(d: int, bias: float) -> None:
    assert sketch_bias(d) == pytest.approx(bias, abs=1e-6)


def test_orthogonal_rows() -> None:
    s = random_sketch(40, 16, True, torch.Generator().manual_seed(0))
    assert torch.allclose(s[:16] @ s[:16].T, 16 * torch.eye(16), atol=1e-4)
    assert torch.allclose(s.norm(dim=1), torch.full((40,), 4.0), atol=1e-4)
    assert s.shape == (40, 16)


@pytest.mark.parametrize("num_outliers", [0, 2])
def test_decode_agrees_with_the_score_from_signs_and_norm(num_outliers: int) -> None:
    outliers = torch.zeros(1, 2, 16)
    outliers[..., :num_outliers] = 1
    codec, state = make(QJLConfig(sketch_dim=64, initial_layers=0, num_outliers=num_outliers), outliers)
    k, q = torch.randn(1, 2, 20, 16), torch.randn(1, 2, 5, 16)
    k[..., :num_outliers] *= 20
    codes = codec.encode(k, state)
    expected = torch.zeros(1, 2, 5, 20)
    for part, sketch in ((1 - outliers, codec.sketch), (outliers, codec.outlier_sketch)):
        if not len(sketch):
            continue
        kp, qp = k * part.unsqueeze(2), q * part.unsqueeze(2)
        norm = kp.norm(dim=-1).half().float()
        signs = torch.where(kp @ sketch.T > 0, 1.0, -1.0)
        factor = math.sqrt(math.pi / 2) / len(sketch) / codec.bias
        expected += factor * norm.unsqueeze(2) * (qp @ sketch.T @ signs.transpose(-1, -2))
    estimates = q @ codec.decode(codes, state).transpose(-1, -2)
    assert torch.allclose(estimates, expected, rtol=1e-3, atol=1e-3)
    norm = codes.norm.float().squeeze(-1) * norm_unit(16)
    assert torch.allclose(norm, (k * (1 - outliers.unsqueeze(2))).norm(dim=-1), rtol=1e-3)


def test_outlier_channels_are_those_of_largest_energy_and_lower_the_error() -> None:
    torch.manual_seed(0)
    k = torch.randn(1, 2, 300, 16)
    k[:, 0, :, 5] *= 30
    k[:, 1, :, 9] *= 30
    q = torch.randn(1, 2, 50, 16)
    errors = []
    for num_outliers in (0, 1):
        codec = QJLKey(make_spec(), QJLConfig(sketch_dim=64, initial_layers=0, num_outliers=num_outliers), 0)
        state = codec.new_state(1, torch.device("cpu"))
        codec.observe(state, q, k, torch.tensor([300.0]))
        codec.finalize_state(state, [0])
        if num_outliers:
            assert state.channels[0].argmax(-1).tolist() == [5, 9]
        estimates = q @ codec.decode(codec.encode(k, state), state).transpose(-1, -2)
        errors.append((estimates - q @ k.transpose(-1, -2)).square().mean())
    assert errors[1] < 0.2 * errors[0]


def test_zero_keys_score_zero_and_seeds_matter() -> None:
    codec, state = make(QJLConfig(num_outliers=0))
    assert not codec.decode(codec.encode(torch.zeros(1, 2, 3, 16), state), state).any()
    x = torch.randn(1, 2, 30, 16)
    again, _ = make(QJLConfig(num_outliers=0))
    other, _ = make(QJLConfig(num_outliers=0, sketch_seed=1))
    assert torch.equal(codec.encode(x, state).signs, again.encode(x, state).signs)
    assert not torch.equal(codec.encode(x, state).signs, other.encode(x, state).signs)


def test_error_falls_with_the_sketch() -> None:
    torch.manual_seed(0)
    x, errors = torch.randn(1, 2, 200, 16), []
    for m in (16, 64, 256):
        codec, state = make(QJLConfig(sketch_dim=m, initial_layers=0, num_outliers=0))
        errors.append((codec.decode(codec.encode(x, state), state) - x).square().mean())
    assert errors[0] > 2 * errors[1] > 4 * errors[2]


def test_first_layers_have_larger_sketches() -> None:
    spec = make_spec()
    config = QJLConfig(initial_layers=2, num_outliers=0)
    assert [len(QJLKey(spec, config, layer).sketch) for layer in range(3)] == [64, 64, 32]
    assert not torch.equal(QJLKey(spec, config, 0).sketch, QJLKey(spec, config, 1).sketch)
