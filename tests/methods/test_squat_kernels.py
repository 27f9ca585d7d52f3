"""SQuat's subspace found in a kernel against float64: on a GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from factories import make_spec
from torch import Tensor

from kvcli.errors import ConfigError
from kvcli.methods.squat.codec import SQuatKey, SQuatState, corrections, leading_factor, query_gram
from kvcli.methods.squat.config import SQuatConfig

pytest.importorskip("triton")

from kvcli.methods.squat import kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def with_spectrum(values: Tensor, seed: int = 0) -> Tensor:
    """A Gram matrix float32 [d, d] with these eigenvalues, in random directions."""
    generator = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator, dtype=torch.float64))[0]
    return ((turn * values.double()) @ turn.T).float()


def spectra(width: int) -> Tensor:
    """Gram matrices [n, d, d] whose five leading directions are theirs alone."""
    order = torch.arange(width).double()
    close = 0.7**order
    close[5] = close[4] * 0.99
    queries = torch.randn(2000, width, generator=torch.Generator().manual_seed(1)) * torch.logspace(-1, 1, width)
    return torch.stack([
        with_spectrum(0.8**order),
        with_spectrum(0.8**order) * 1e6,
        with_spectrum(1 / (1 + order)),
        with_spectrum(0.1**order),
        with_spectrum(close),
        with_spectrum((order < 1).double()),
        with_spectrum((order < 3) * (3 - order)),
        torch.diag(0.8 ** order.flip(0)).float(),
        torch.diag((order == width - 1).float()),
        queries.T @ queries,
    ]).to(DEVICE)  # fmt: skip


def share(q_hat: Tensor) -> Tensor:
    """Q_hat^T Q_hat, float64."""
    return q_hat.double().transpose(-1, -2) @ q_hat.double()


@pytest.mark.parametrize(
    ("width", "rank", "some"),
    [(128, 5, slice(None)), (64, 5, slice(4, 6)), (80, 8, slice(0, 10, 9)), (32, 20, slice(1)), (16, 5, slice(1))],
)
def test_leading_factor(width: int, rank: int, some: slice) -> None:
    gram = spectra(width)[some]
    found, expected = kernels.leading_factor(gram, rank), leading_factor(gram, rank, "svd")
    assert found.shape == expected.shape
    error = (share(found) - share(expected)).norm(dim=(-2, -1)) / share(expected).norm(dim=(-2, -1))
    assert error.max() < 1e-4
    norms = found.norm(dim=-1)
    assert (norms[:, :-1] >= norms[:, 1:]).all()


def test_directions_that_are_nearly_alike() -> None:
    """Which of two directions leads is open; that the leading ones hold as much energy is not."""
    order = torch.arange(128)
    alike = 0.7**order
    alike[5] = alike[4] * (1 - 1e-6)
    white = torch.randn(2000, 128, generator=torch.Generator().manual_seed(0))
    gram = torch.stack((with_spectrum(alike), with_spectrum(torch.ones(128)), white.T @ white)).to(DEVICE)
    found, expected = kernels.leading_factor(gram, 5), leading_factor(gram, 5, "svd")
    energy = found.double().square().sum((-2, -1)) / expected.square().sum((-2, -1))
    assert (energy - 1).abs().max() < 2e-3
    unit = torch.nn.functional.normalize(found, dim=-1)
    assert torch.allclose(unit @ unit.transpose(-1, -2), torch.eye(5, device=DEVICE), atol=1e-4)


@pytest.mark.parametrize(
    ("width", "time", "dtype"),
    [(80, 1, torch.float16), (128, 130, torch.bfloat16), (16, 64 * 33, torch.bfloat16), (64, 0, torch.float16)],
)
def test_gram_matrices(width: int, time: int, dtype: torch.dtype) -> None:
    """Queries laid out token by token, in one part or several."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(3, time, 6, width, generator=generator).to(DEVICE, dtype).transpose(1, 2)
    found, expected = kernels.query_gram(queries, 2), query_gram(queries, 2)
    assert found.shape == expected.shape
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5 * max(time, 1))


def test_fewer_channels_than_directions() -> None:
    gram = spectra(16)[0, :4, :4].contiguous()
    found = kernels.leading_factor(gram, 5)
    assert found.shape == (4, 4)
    assert torch.allclose(share(found), gram.double(), atol=1e-5)


def test_nothing_seen() -> None:
    assert not kernels.leading_factor(torch.zeros(1, 2, 64, 64, device=DEVICE), 5).any()
    assert kernels.leading_factor(torch.zeros(0, 2, 64, 64, device=DEVICE), 5).shape == (0, 2, 5, 64)


@pytest.mark.parametrize(
    ("width", "rank", "block_size"), [(128, 5, 64), (80, 5, 24), (96, 29, 48), (16, 5, 1), (64, 5, 200)]
)
def test_corrections(width: int, rank: int, block_size: int) -> None:
    """Directions of very different strength, weights from none to far above the identity."""
    generator = torch.Generator().manual_seed(0)
    q_hat = torch.randn(3, 2, rank, width, generator=generator) * torch.logspace(2, -1, rank).view(-1, 1)
    weight = torch.tensor([0, 1e-4, 1.0])
    scaled = q_hat.double() * weight.double().sqrt().view(-1, 1, 1, 1)
    found = kernels.corrections(q_hat.to(DEVICE), weight.to(DEVICE), block_size).cpu()
    assert not found[0].any()
    expected = corrections(scaled, block_size)
    assert (found - expected).norm() <= 1e-4 * expected.norm()


@pytest.mark.parametrize("changes", [{}, {"lambda_scaling": "none", "squat_lambda": 1e-3, "block_size": 24}])
def test_settled_state(changes: dict[str, Any]) -> None:
    """Corrections of some rows or all; rows that are not layout_barrier keep their Gram matrix."""
    codec = SQuatKey(make_spec(80), SQuatConfig(**changes), "post_rope")
    queries = torch.randn(3, 4, 500, 80, generator=torch.Generator().manual_seed(0)) * torch.logspace(-1, 1, 80)
    queries = queries.to(DEVICE, torch.bfloat16)
    for rows in ([0, 1, 2], [2, 0]):
        states: list[SQuatState] = []
        for codec.fused in (False, True):
            states.append(codec.new_state(3, DEVICE))
            codec.observe(states[-1], queries, queries[:, :2], torch.full((3,), 500.0, device=DEVICE))
            gram = states[-1].matrix.clone()
            codec.finalize_state(states[-1], rows)
        expected, found = (state.matrix for state in states)
        assert (expected - found).norm() < 1e-3 * expected.norm()
        rest = [row for row in range(3) if row not in rows]
        assert torch.equal(gram[rest], found[rest])


def test_settled_from_calibration() -> None:
    codec = SQuatKey(make_spec(16), SQuatConfig(subspace_source="calibration"), "post_rope").to(DEVICE)
    codec.fused = True
    with pytest.raises(ConfigError, match="fit-subspace"):
        codec.finalize_state(codec.new_state(2, DEVICE), [0, 1])
    codec.gram.copy_(spectra(16)[:2])
    codec.gram_count.fill_(10)
    states: list[SQuatState] = []
    for codec.fused in (False, True):
        states.append(codec.new_state(2, DEVICE))
        codec.finalize_state(states[-1], [0, 1])
    assert torch.allclose(states[0].matrix, states[1].matrix, rtol=1e-3, atol=1e-6)
    assert torch.equal(states[1].matrix[0], states[1].matrix[1])


def test_shapes_beyond_the_kernel_have_the_reference() -> None:
    assert not kernels.can_lead(256, 5)
    assert not kernels.can_lead(128, 30)
    codec = SQuatKey(make_spec(64), SQuatConfig(subspace_dim=40), "post_rope")
    codec.fused = True
    state = codec.new_state(1, DEVICE)
    queries = torch.randn(1, 4, 100, 64, device=DEVICE)
    codec.observe(state, queries, queries[:, :2], torch.full((1,), 100.0, device=DEVICE))
    codec.finalize_state(state, [0])
    assert state.matrix.any()
