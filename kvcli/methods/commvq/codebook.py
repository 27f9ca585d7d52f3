"""The RoPE-commutative codebook (arXiv 2506.18879): nearest centres, centre values and their least-squares update.

A centre is c_ab = u_a + i*u_b with one complex codebook u of N rows (Eq. 13-18: [[x, y], [-y, x]] is the complex number
x + i*y), so that N rows stand for N^2 centres, and a rotation e^{i*m*theta} commutes with decoding.
Complex vectors of g pairs are stored as 2g reals, (re, im) interleaved. A leading axis P runs over independent
problems (kv heads times groups).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_SUM_ROWS = 8192
_BLOCK_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}


def by_group(x: Tensor, num_groups: int, dim: int) -> Tensor:
    """Splits axis `dim`, not negative, of channel pairs into two, [groups, g]: pair j is in group j % groups.

    So every group has pairs of all frequencies of RoPE: low and high ones differ much in what their errors cost, and
    groups of neighbours would get the same bits for very different shares.
    """
    return x.unflatten(dim, (-1, num_groups)).transpose(dim, dim + 1)


def times_i(x: Tensor) -> Tensor:
    """Multiplies interleaved complex vectors [..., 2g] by the imaginary unit."""
    re, im = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((-im, re), dim=-1).flatten(-2)


def pair_table(codebook: Tensor) -> Tensor:
    """Squared norms of all centres, |u_a + i*u_b|^2: [P, N, 2g] to [P, N, N]."""
    norms = codebook.square().sum(-1)
    cross = codebook @ times_i(codebook).transpose(-1, -2)
    return norms.unsqueeze(-1) + norms.unsqueeze(-2) + 2 * cross


class Search(NamedTuple):
    """Terms of the search for nearest centres, derived once from codebooks [..., N, 2g].

    Attributes:
        directions: [..., 2g, 2N], -2 u_a and -2 i*u_b.
        table: [..., N, N], squared norms of the centres (a, b).
        by_second: [..., N, N], the same with b before a.
    """

    codebook: Tensor
    codebook_i: Tensor
    directions: Tensor
    table: Tensor
    by_second: Tensor

    @classmethod
    def of(cls, codebook: Tensor) -> Search:
        """Derives the terms of codebooks [..., N, 2g]."""
        codebook_i, table = times_i(codebook), pair_table(codebook)
        directions = torch.cat((codebook, codebook_i), dim=-2).transpose(-1, -2) * -2
        return cls(codebook, codebook_i, directions, table, table.transpose(-1, -2).contiguous())

    def unbind(self, dim: int) -> list[Search]:
        """The searches along a leading axis."""
        return [Search(*terms) for terms in zip(*(x.unbind(dim) for x in self), strict=True)]

    def nearest(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Indices a and b, int64 [P, T] each, of the centre nearest to each vector of x [P, T, 2g], exactly.

        2N dot products and N^2 additions per vector, with codebooks [P, N, 2g], in blocks of vectors:
        |x - u_a - i*u_b|^2 = |x|^2 - 2 Re<x, u_a> - 2 Re<x, i*u_b> + |u_a + i*u_b|^2.
        """
        size = self.table.shape[-1]
        along_a, along_b = (x @ self.directions).split(size, dim=-1)
        # amin over b is several times faster than argmin, whose result is needed for one a only; and over another axis
        # than the last, whose elements are next to each other
        best_over_b = torch.empty_like(along_a)
        block = max(1, _BLOCK_ELEMENTS.get(x.device.type, 2**20) // (x.shape[0] * size * size))
        sums = x.new_empty(x.shape[0], min(block, x.shape[1]), size, size)
        for part, best in zip(along_b.split(block, dim=1), best_over_b.split(block, dim=1), strict=True):
            of_part = torch.add(self.by_second.unsqueeze(1), part.unsqueeze(-1), out=sums[:, : part.shape[1]])
            torch.amin(of_part, dim=-2, out=best)
        first = best_over_b.add_(along_a).argmin(-1)
        return first, (_rows(self.table, first) + along_b).argmin(-1)

    def centres(self, first: Tensor, second: Tensor) -> Tensor:
        """The centres u_a + i*u_b of indices a and b [P, T] each: [P, T, 2g]."""
        return _rows(self.codebook, first) + _rows(self.codebook_i, second)


def greedy_codes(x: Tensor, codebooks: Tensor) -> Tensor:
    """Codes a N + b, int64 [P, T, R], of x [P, T, 2g] with codebooks [P, R, N, 2g].

    Each stage takes the centre nearest to what those before it leave.
    """
    codes = []
    for stage in Search.of(codebooks).unbind(1):
        first, second = stage.nearest(x)
        x = x - stage.centres(first, second)
        codes.append(first * codebooks.shape[2] + second)
    return torch.stack(codes, dim=-1)


def update(x: Tensor, first: Tensor, second: Tensor, codebook: Tensor) -> tuple[Tensor, Tensor]:
    """The codebook that minimises the squared error for given hard assignments (CommVQ Eq. 32-33); as `Sums.solve`.

    Vectors x [P, T, 2g], indices a `first` and b `second` [P, T], present codebook [P, N, 2g].
    """
    sums = Sums(codebook)
    sums.add(x, first, second)
    return sums.solve(codebook)


class Sums:
    """The sufficient statistics of `update` for a codebook shaped like the one that is given.

    Attributes:
        counts: float64 [P, N * N], (soft) numbers of vectors assigned to (a, b).
        first: float64 [P, N, 2g], sums of the vectors whose first index is a. Rounded to float32, they would have a
            part in directions that the data do not determine, and the ridge would magnify it.
        second: the same by second index.
    """

    def __init__(self, codebook: Tensor) -> None:
        problems, self.size, width = codebook.shape
        self.counts = codebook.new_zeros(problems, self.size * self.size, dtype=torch.float64)
        self.first = codebook.new_zeros(problems, self.size, width, dtype=torch.float64)
        self.second = torch.zeros_like(self.first)

    def add(self, x: Tensor, first: Tensor, second: Tensor) -> None:
        """Adds vectors x [P, T, 2g] that are assigned to the centres of indices [P, T]."""
        self.counts.scatter_add_(1, first * self.size + second, torch.ones_like(first, dtype=torch.float64))
        parts = (y.split(_SUM_ROWS, dim=1) for y in (x, first, second))
        for part, *indices in zip(*parts, strict=True):
            rows = part.double()
            for sums, index in zip((self.first, self.second), indices, strict=True):
                sums.scatter_add_(1, index.unsqueeze(-1).expand_as(rows), rows)

    def solve(self, codebook: Tensor) -> tuple[Tensor, Tensor]:
        """The best codebook for what was added.

        With Z the T x N matrix of rows e_a + i*e_b the normal equations Z^H Z U = Z^H X read, in the counts n_ab of
        joint assignments, (diag(n_a. + n_.b) + i*(n - n^T)) U = S_a - i*S_b.

        Rows of the present codebook [P, N, 2g] that no vector uses keep their value. Returns the updated codebook
        [P, N, 2g], and a mask [P, N] of dead rows.
        """
        counts = self.counts.unflatten(1, (self.size, self.size))
        used = counts.sum(-1) + counts.sum(-2)
        dead = used <= 1e-6
        # float64: with few vectors the system is close to singular, and the ridge must not be lost in rounding
        ridge = 1e-8 * used.mean(-1, keepdim=True).clamp_min(1e-12)
        diagonal = torch.where(dead, 1.0, used + ridge)
        matrix = torch.complex(torch.diag_embed(diagonal), counts - counts.transpose(-1, -2))
        right = torch.view_as_complex((self.first - times_i(self.second)).unflatten(-1, (-1, 2)).contiguous())
        # solve for the change from the present codebook: directions the data do not determine stay where they are
        present = torch.view_as_complex(codebook.double().unflatten(-1, (-1, 2)).contiguous())
        data = torch.complex(torch.diag_embed(used), matrix.imag)
        change = torch.linalg.solve(matrix, right - data @ present)
        updated = torch.view_as_real(present + change).flatten(-2).to(codebook.dtype)
        return torch.where(dead.unsqueeze(-1), codebook, updated), dead


def _rows(table: Tensor, index: Tensor) -> Tensor:
    """Rows table[p, index[p, t]]: [P, N, C] and [P, T] to [P, T, C]."""
    starts = torch.arange(0, table.shape[0] * table.shape[1], table.shape[1], device=table.device)
    rows: Tensor = table.reshape(-1, table.shape[-1]).index_select(0, (index + starts.unsqueeze(1)).flatten())
    return rows.view(*index.shape, table.shape[-1])
