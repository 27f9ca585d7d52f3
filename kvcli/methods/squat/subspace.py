"""The query subspace of SQuat (arXiv 2503.24358) and what follows from it, in PyTorch; `kernels.py` has the same."""

from __future__ import annotations

import torch
from torch import Tensor

_ITERATIONS = 24
_OVERSAMPLING = 11


def query_gram(queries: Tensor, num_kv_heads: int) -> Tensor:
    """Q^T Q of queries [batch, num_heads, time, head_dim]: float32 [batch, num_kv_heads, head_dim, head_dim].

    The query heads of a kv head are concatenated along the tokens.
    """
    rows = queries.float().unflatten(1, (num_kv_heads, -1)).flatten(2, 3)
    return rows.transpose(-1, -2) @ rows


def leading_factor(gram: Tensor, rank: int, solver: str) -> Tensor:
    """Q_hat = diag(S[:r]) Vh[:r] of the SVD of Q (section 3.2), from the Gram matrix Q^T Q.

    The right singular vectors of Q are the eigenvectors of Q^T Q, and its eigenvalues S^2. Solved in float64, because
    squaring squares the condition number.

    Args:
        gram: [..., d, d].
        rank: directions r.
        solver: `svd` for a full eigendecomposition; `power` for block power iteration with more columns than
            directions, then Rayleigh-Ritz: Q_hat^T Q_hat agrees with `svd` to 1e-6 of its norm on the spectra tested.

    Returns:
        float64 [..., min(r, d), d].
    """
    matrix = gram.double()
    width = matrix.shape[-1]
    rank = min(rank, width)
    if solver == "svd":
        values, vectors = torch.linalg.eigh(matrix)
    else:
        # random: a start that is orthogonal to a leading eigenvector would not converge to it
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(width, min(width, rank + _OVERSAMPLING), generator=generator, dtype=matrix.dtype)
        basis = start.to(matrix.device).expand(*matrix.shape[:-2], -1, -1)
        for _ in range(_ITERATIONS):
            basis = torch.linalg.qr(matrix @ basis)[0]
        values, eigvec = torch.linalg.eigh(basis.transpose(-1, -2) @ matrix @ basis)
        vectors = basis @ eigvec
    values, vectors = values[..., -rank:], vectors[..., -rank:]
    return (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)).transpose(-1, -2)


def corrections(q_hat: Tensor, block_size: int) -> Tensor:
    """Corrections of the channels after each block, per unit of the block's error, for P = I + Q_hat^T Q_hat.

    From q_hat float64 [..., r, d]; float32 [..., d, d]: rows of block b, columns of the channels r after it, hold
    (P_rr^-1 P_rb)^T; 0 elsewhere.
    """
    width = q_hat.shape[-1]
    matrix = q_hat.new_zeros(*q_hat.shape[:-2], width, width, dtype=torch.float32)
    for start in range(0, width - block_size, block_size):
        stop = start + block_size
        matrix[..., start:stop, stop:] = correction(q_hat, start, stop)
    return matrix


def correction(q_hat: Tensor, start: int, stop: int) -> Tensor:
    """(P_rr^-1 P_rb)^T for the block [start, stop) and the channels after it: float32 [..., stop - start, d - stop].

    With A = Q_hat[:, rest]^T and B = Q_hat[:, block]^T, P_rr^-1 P_rb = (I + A A^T)^-1 A B^T = A (I + A^T A)^-1 B^T: a
    system of r equations.
    """
    block, rest = q_hat[..., start:stop], q_hat[..., stop:]
    small = torch.eye(q_hat.shape[-2], dtype=q_hat.dtype, device=q_hat.device) + rest @ rest.transpose(-1, -2)
    # positive definite, so no failure to check for: solve_ex does not wait for the device
    return (block.transpose(-1, -2) @ torch.linalg.solve_ex(small, rest)[0]).float()
