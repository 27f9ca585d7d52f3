"""SQuat's subspace kernels against float64: on a GPU if there is one, else in Triton's interpreter.

The interpreter takes its time per operation and program, whatever the width: there, fewer matrices are solved.
"""

from typing import Any

import pytest
import torch
from factories import make_spec
from torch import Tensor

from kvcli.errors import ConfigError
from kvcli.methods.config import SQuatConfig
from kvcli.methods.squat import kernels
from kvcli.methods.squat.codec import SQuatKey, SQuatState, corrections, leading_factor, query_gram

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")


def with_spectrum(values: Tensor, seed: int = 0) -> Tensor:
    """A Gram matrix float32 [d, d] with these eigenvalues, in random directions."""
    generator = torch.Generator().manual_seed(seed)
    eigvec = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator, dtype=torch.float64))[0]
    return ((eigvec * values.double()) @ eigvec.T).float()


def spectra(width: int) -> Tensor:
    """Gram matrices [n, d, d] with five well-defined leading directions."""
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


def leading_gram(q_hat: Tensor) -> Tensor:
    """Q_hat^T Q_hat, float64."""
    return q_hat.double().transpose(-1, -2) @ q_hat.double()


def relative_error(q_hat: Tensor, expected: Tensor) -> Tensor:
    """Of Q_hat^T Q_hat, for each matrix."""
    exact = leading_gram(expected)
    return (leading_gram(q_hat) - exact).norm(dim=(-2, -1)) / exact.norm(dim=(-2, -1))


ALL = list(range(10))
SIZES = [(128, 5, ALL), (64, 5, [4, 5]), (80, 8, [0, 9]), (32, 20, [0]), (16, 5, [0])]
FEW_SIZES = [(32, 5, [1, 2, 3, 4, 6, 8, 9]), (128, 5, [4]), (24, 8, [0]), (32, 20, [0])]
"""Width, rank and spectra. The second list covers the same branches and, in each spectrum, what is special in it."""


@pytest.mark.parametrize(("width", "rank", "some"), SIZES if GPU else FEW_SIZES)
def test_leading_factor(width: int, rank: int, some: list[int]) -> None:
    gram = spectra(width)[some]
    q_hat, expected = kernels.leading_factor(gram, rank), leading_factor(gram, rank, "svd")
    assert q_hat.shape == expected.shape
    assert relative_error(q_hat, expected).max() < 1e-4
    norms = q_hat.norm(dim=-1)
    assert (norms[:, :-1] >= norms[:, 1:]).all()


@pytest.mark.parametrize(("width", "rank", "some"), SIZES if GPU else [(32, 5, [1, 4, 8]), (24, 8, [0]), (128, 5, [4])])
def test_leading_factor_of_matrices_too_large_for_shared_memory(
    width: int, rank: int, some: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    gram = spectra(width)[some]
    monkeypatch.setattr(kernels, "shared_memory_limit", lambda device: 0)
    assert relative_error(kernels.leading_factor(gram, rank), leading_factor(gram, rank, "svd")).max() < 1e-4


@pytest.mark.parametrize(("width", "rank"), [(128, 5), (80, 8), (64, 1), (32, 20), (16, 5)])
def test_power_iteration_is_the_svd(width: int, rank: int) -> None:
    """For any spectrum, also where the start of the iteration could be orthogonal to what leads."""
    gram = spectra(width)
    assert relative_error(leading_factor(gram, rank, "power"), leading_factor(gram, rank, "svd")).max() < 1e-5
    assert not leading_factor(torch.zeros(2, width, width), rank, "power").any()


def test_directions_that_are_nearly_alike() -> None:
    """Which of two directions leads is open; that the leading ones hold as much energy is not."""
    order = torch.arange(128)
    alike = 0.7**order
    alike[5] = alike[4] * (1 - 1e-6)
    white = torch.randn(2000, 128, generator=torch.Generator().manual_seed(0))
    gram = torch.stack((with_spectrum(alike), with_spectrum(torch.ones(128)), white.T @ white)).to(DEVICE)
    q_hat, expected = kernels.leading_factor(gram, 5), leading_factor(gram, 5, "svd")
    energy = q_hat.double().square().sum((-2, -1)) / expected.square().sum((-2, -1))
    assert (energy - 1).abs().max() < 2e-3
    unit = torch.nn.functional.normalize(q_hat, dim=-1)
    assert torch.allclose(unit @ unit.transpose(-1, -2), torch.eye(5, device=DEVICE), atol=1e-4)


@pytest.mark.parametrize(
    ("width", "time", "dtype"),
    [(80, 1, torch.float16), (128, 130, torch.bfloat16), (16, 64 * 33, torch.bfloat16), (64, 0, torch.float16)],
)
def test_gram_matrices(width: int, time: int, dtype: torch.dtype) -> None:
    """Queries laid out token by token, in one part or several."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(3, time, 6, width, generator=generator).to(DEVICE, dtype).transpose(1, 2)
    gram, expected = kernels.query_gram(queries, 2), query_gram(queries, 2)
    assert gram.shape == expected.shape
    assert torch.allclose(gram, expected, rtol=1e-5, atol=1e-5 * max(time, 1))


def test_fewer_channels_than_directions() -> None:
    gram = spectra(16)[0, :4, :4].contiguous()
    q_hat = kernels.leading_factor(gram, 5)
    assert q_hat.shape == (4, 4)
    assert torch.allclose(leading_gram(q_hat), gram.double(), atol=1e-5)


def test_nothing_seen() -> None:
    assert not kernels.leading_factor(torch.zeros(1, 1, 32, 32, device=DEVICE), 5).any()
    assert kernels.leading_factor(torch.zeros(0, 2, 32, 32, device=DEVICE), 5).shape == (0, 2, 5, 32)


@pytest.mark.parametrize(
    ("width", "rank", "block_size"), [(128, 5, 64), (80, 5, 24), (96, 29, 48), (8, 5, 1), (64, 5, 200)]
)
def test_corrections(width: int, rank: int, block_size: int) -> None:
    """Directions of very different strength, weights from none to far above the identity."""
    generator = torch.Generator().manual_seed(0)
    q_hat = torch.randn(3, 2, rank, width, generator=generator) * torch.logspace(2, -1, rank).view(-1, 1)
    weight = torch.tensor([0, 1e-4, 1.0])
    scaled = q_hat.double() * weight.double().sqrt().view(-1, 1, 1, 1)
    matrix = kernels.corrections(q_hat.to(DEVICE), weight.to(DEVICE), block_size).cpu()
    assert not matrix[0].any()
    expected = corrections(scaled, block_size)
    assert (matrix - expected).norm() <= 1e-4 * expected.norm()


@pytest.mark.parametrize(
    ("changes", "rows", "batch"),
    [({}, [0, 1], 2), ({"lambda_scaling": "none", "squat_lambda": 1e-3, "block_size": 8}, [2, 0], 3)],
)
def test_finalized_state(changes: dict[str, Any], rows: list[int], batch: int) -> None:
    """Corrections of some rows or all; other rows keep their Gram matrix."""
    codec = SQuatKey(make_spec(24), SQuatConfig(**changes), "post_rope")
    queries = torch.randn(batch, 4, 500, 24, generator=torch.Generator().manual_seed(0)) * torch.logspace(-1, 1, 24)
    queries = queries.to(DEVICE, torch.bfloat16)
    states: list[SQuatState] = []
    for codec.fused in (False, True):
        states.append(codec.new_state(batch, DEVICE))
        codec.observe(states[-1], queries, queries[:, :2], torch.full((batch,), 500.0, device=DEVICE))
        gram = states[-1].matrix.clone()
        codec.finalize_state(states[-1], rows)
    expected, matrix = (state.matrix for state in states)
    assert (expected - matrix).norm() < 1e-3 * expected.norm()
    rest = [row for row in range(batch) if row not in rows]
    assert torch.equal(gram[rest], matrix[rest])


def test_finalized_from_calibration() -> None:
    codec = SQuatKey(make_spec(16, 1), SQuatConfig(subspace_source="calibration"), "post_rope").to(DEVICE)
    codec.fused = True
    with pytest.raises(ConfigError, match="needs an artifact with a fitted subspace"):
        codec.finalize_state(codec.new_state(2, DEVICE), [0, 1])
    codec.gram.copy_(spectra(16)[:1])
    codec.gram_count.fill_(10)
    states: list[SQuatState] = []
    for codec.fused in (False, True):
        states.append(codec.new_state(2, DEVICE))
        codec.finalize_state(states[-1], [0, 1])
    assert torch.allclose(states[0].matrix, states[1].matrix, rtol=1e-3, atol=1e-6)
    assert torch.equal(states[1].matrix[0], states[1].matrix[1])


def test_shapes_beyond_the_kernel_use_the_reference() -> None:
    for width, rank in ((256, 5), (128, 30)):
        note = "the kernel takes at most 128 channels and 29 directions"
        codec = SQuatKey(make_spec(width), SQuatConfig(subspace_dim=rank), "post_rope")
        assert codec.kernel_note(torch.device(DEVICE)) == (
            f"the subspace is computed in PyTorch: {note}, not {width} and {rank}"
        )
    codec = SQuatKey(make_spec(64), SQuatConfig(subspace_dim=40), "post_rope")
    codec.fused = True
    state = codec.new_state(1, DEVICE)
    queries = torch.randn(1, 4, 100, 64, device=DEVICE)
    codec.observe(state, queries, queries[:, :2], torch.full((1,), 100.0, device=DEVICE))
    codec.finalize_state(state, [0])
    assert state.matrix.any()
