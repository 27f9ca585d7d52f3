"""The transform of a head: principal axes of its vectors in a metric of what errors cost, and bands of axes.

In coordinates in which an error costs the same along every axis, the principal axes of a Gaussian vector are optimal
for scalar codes (the Karhunen-Loeve transform; Goyal, "Theoretical foundations of transform coding", 2001). Fisher
information tells the cost of small errors that are independent from token to token. Those of coarse codes are neither,
so the metric is a power of it between 0 and 1, chosen by KL divergence (notes/quality_log.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcli.methods.klt.fields import BANDS
from kvcli.methods.oscar import hadamard
from kvcli.rope import ROPE_TILE, Rotation

_FLOOR = 1e-4
"""Least eigenvalue of a metric, as a share of their mean."""


@dataclass(frozen=True)
class Transform:
    """x = B z for vectors x of each head; components z are uncorrelated between bands, largest cost first.

    Attributes:
        basis: float64 [heads, head_dim, head_dim], B; components z have unit variance.
        costs: float64 [heads, BANDS], the sum over a band of what its errors cost if it is not coded.
        level: float64 [heads, 1], the geometric mean of a component's cost.
    """

    basis: Tensor
    costs: Tensor
    level: Tensor


def transform(fisher: Tensor, covariance: Tensor, power: float, *, cost_of_fisher: bool) -> Transform:
    """The transform of vectors with a Fisher information and covariance, both [heads, head_dim, head_dim].

    Args:
        power: of the Fisher information that is the metric in which axes are principal.
        cost_of_fisher: whether errors along the axes cost what the Fisher information says, or the metric.
    """
    fisher, covariance = fisher.double(), covariance.double()
    mean = fisher.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None].clamp_min(1e-30)
    metric = _power(fisher / mean, power) * mean
    root, inverse_root = _power(metric, 0.5), _power(metric, -0.5)
    variances, axes = torch.linalg.eigh(root @ covariance @ root)
    basis = inverse_root @ axes
    cost = (basis.mT @ fisher @ basis).diagonal(dim1=-2, dim2=-1) if cost_of_fisher else torch.ones_like(variances)
    cost, variances = cost.clamp_min(1e-30), variances.clamp_min(1e-30)
    order = (cost * variances).argsort(-1, descending=True)
    basis = (basis / cost.sqrt().unsqueeze(-2)).gather(-1, order.unsqueeze(-2).expand_as(basis))
    sizes = (cost * variances).gather(-1, order)
    # inside a band all components are of one size, so that one field suits all of them
    width = basis.shape[-1] // BANDS
    part = hadamard(width & -width).to(basis)
    mixing = torch.block_diag(*[part] * (basis.shape[-1] // len(part)))
    mixed = (mixing.square() @ sizes.unsqueeze(-1)).squeeze(-1)
    costs = mixed.unflatten(-1, (BANDS, width)).sum(-1)
    return Transform(basis @ mixing.mT * mixed.sqrt().unsqueeze(-2), costs, sizes.log().mean(-1, keepdim=True).exp())


def in_tiles(matrix: Tensor, rotation: Rotation) -> Tensor:
    """The mean of R_t M R_t^T over the positions t of a tile, of matrices M [heads, head_dim, head_dim], float64.

    `rotation` is that of the positions from 0 on, [1, 1, positions, pairs], ROPE_TILE of them.
    """
    turn = Rotation(rotation.cos[0, 0, :, None, None].double(), rotation.sin[0, 0, :, None, None].double())
    rows = turn.apply(matrix.double().mT.expand(ROPE_TILE, *matrix.shape)).mT
    return turn.apply(rows).mean(0)


def tile_rotation(angles: Tensor) -> Rotation:
    """The rotation of a tile's positions, [1, 1, ROPE_TILE, pairs], from radians per position [pairs]."""
    angle = torch.arange(ROPE_TILE, device=angles.device).unsqueeze(1) * angles.double()
    return Rotation(angle.cos()[None, None], angle.sin()[None, None])


def _power(matrix: Tensor, power: float) -> Tensor:
    """A power of symmetric matrices [..., d, d] with positive eigenvalues, at least _FLOOR of their mean."""
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    values = values.maximum(_FLOOR * values.mean(-1, keepdim=True)).clamp_min(1e-30)
    return (vectors * (values**power).unsqueeze(-2)) @ vectors.mT
