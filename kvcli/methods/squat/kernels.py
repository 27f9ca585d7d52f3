"""Triton kernels of SQuat's subspace: Gram matrices of the queries, their leading eigenvectors, and the corrections.

Block orthogonal iteration V <- orth(G V) with more columns than are wanted, then Rayleigh-Ritz: the eigenvectors of the
small matrix V^T G V, by Jacobi rotations, turn V into the eigenvectors of G. Directions of nearly the same eigenvalue
are told apart by the rotations, so that the iteration only has to shrink what lies beyond all columns. Errors are those
of float32 next to the largest eigenvalue; `codec.leading_factor` in float64 is the reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.launch import cdiv, power_of_two, row_major
from kvcli.kernels.words import INTERPRETED

_ITERATIONS = 24
_SWEEPS = 4
_OVERSAMPLING = 3
_MOST_COLUMNS = 32
_MOST_SPLITS = 32
_MOST_CHANNELS = 128  # a matrix has to fit into shared memory twice, as the two parts of a float32 product


@triton.jit(do_not_specialize=["tokens", "chunk"])
def _gram_kernel(
    queries, partial, stride_b, stride_h, stride_t, tokens, chunk, heads,
    GROUPS: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Gram matrix of `chunk` tokens of the query heads of a kv head; grid (num_splits, batch * heads).

    queries [batch, heads * GROUPS, tokens, D] 16 bits, strided; partial float32 [num_splits, batch * heads, D, D].
    """
    i_split, i_row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    o_t, o_d = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    gram = tl.zeros((BLOCK_D, BLOCK_D), tl.float32)
    for group in range(GROUPS):
        base = queries + (i_row // heads) * stride_b + ((i_row % heads) * GROUPS + group) * stride_h
        for start in range(0, chunk, BLOCK_T):
            i_t = i_split * chunk + start + o_t
            mask = (i_t < tokens)[:, None] & (o_d < D)[None, :]
            b_q = tl.load(base + i_t[:, None] * stride_t + o_d[None, :], mask=mask, other=0.0)
            if INTERPRETED:  # which multiplies the bits of bfloat16
                b_q = b_q.to(tl.float32)
            gram = tl.dot(tl.trans(b_q), b_q, gram)
    i_m = i_split * tl.num_programs(1) + i_row
    p_p = partial + i_m * D * D + o_d[:, None] * D + o_d[None, :]
    tl.store(p_p, gram, mask=(o_d < D)[:, None] & (o_d < D)[None, :])


@triton.jit
def _orthonormal(v, o_k, LIMIT: tl.constexpr, K: tl.constexpr):
    """Columns of v [D, K] made orthonormal in order; 0 where less than sqrt(LIMIT) of a column is left."""
    before, scale = tl.sum(v * v, axis=0), tl.zeros((K,), tl.float32)
    for j in range(K):
        here = o_k == j
        column = tl.sum(tl.where(here[None, :], v, 0.0), axis=1)
        along = tl.sum(v * column[:, None], axis=0)
        square = tl.sum(tl.where(here, along, 0.0), axis=0)
        least = tl.maximum(LIMIT * tl.sum(tl.where(here, before, 0.0), axis=0), 1e-36)
        inverse = tl.where(square > least, 1.0 / tl.maximum(square, 1e-36), 0.0)
        v -= column[:, None] * tl.where(o_k > j, along * inverse, 0.0)[None, :]
        scale = tl.where(here, tl.sqrt(inverse), scale)
    return v * scale[None, :]


@triton.jit
def _rotation(b, i_round, K: tl.constexpr):
    """Jacobi rotations [K, K] of K / 2 disjoint pairs of the symmetric b [K, K]; K - 1 rounds meet every pair once."""
    o_i, o_j = tl.arange(0, K)[:, None], tl.arange(0, K)[None, :]
    partner = (i_round + K - 1 - o_i) % (K - 1)
    alone = (i_round * (K // 2)) % (K - 1)
    partner = tl.where(o_i == K - 1, alone, tl.where(o_i == alone, K - 1, partner))
    meets = o_j == partner
    across = tl.sum(tl.where(meets, b, 0.0), axis=1)[:, None]
    diagonal = tl.sum(tl.where(o_i == o_j, b, 0.0), axis=0)[None, :]
    own = tl.sum(tl.where(o_i == o_j, b, 0.0), axis=1)[:, None]
    gap = tl.sum(tl.where(meets, diagonal, 0.0), axis=1)[:, None] - own
    # computed from the other of the two, the sine is the same with the other sign
    sign = tl.where((gap > 0) | ((gap == 0) & (o_i < partner)), 1.0, -1.0)
    below = tl.abs(gap) + tl.sqrt(gap * gap + 4 * across * across)
    tangent = tl.where(below > 0, sign * 2 * across / tl.maximum(below, 1e-36), 0.0)
    cosine = 1.0 / tl.sqrt(1 + tangent * tangent)
    return tl.where(o_i == o_j, cosine, tl.where(meets, tangent * cosine, 0.0))


@triton.jit
def _leading_kernel(
    gram, factor,
    D: tl.constexpr, RANK: tl.constexpr, BLOCK_D: tl.constexpr, K: tl.constexpr,
    ITERATIONS: tl.constexpr, SWEEPS: tl.constexpr,
):  # fmt: skip
    """One matrix; grid (matrices,). gram float32 [matrices, D, D]; factor float32 [matrices, RANK, D]."""
    i_m = tl.program_id(0).to(tl.int64)
    o_d, o_k = tl.arange(0, BLOCK_D), tl.arange(0, K)
    m_d = o_d < D
    p_g = gram + i_m * D * D + o_d[:, None] * D + o_d[None, :]
    b_g = tl.load(p_g, mask=m_d[:, None] & m_d[None, :], other=0.0)
    trace = tl.sum(tl.sum(tl.where(o_d[:, None] == o_d[None, :], b_g, 0.0), axis=1), axis=0)
    b_g = b_g * tl.where(trace > 0, 1.0 / tl.maximum(trace, 1e-36), 0.0)
    # no direction that a Gram matrix may have is likely to be orthogonal to random columns
    b_v = tl.rand(0, o_d[:, None] * K + o_k[None, :]) - 0.5
    for _ in range(ITERATIONS):
        b_v = _orthonormal(tl.dot(b_g, b_v, input_precision="tf32x3"), o_k, 4e-12, K)
    # columns of rounding errors are not orthogonal yet: what is left of them vanishes here
    b_v = _orthonormal(b_v, o_k, 0.25, K)
    b_b = tl.dot(tl.trans(b_v), tl.dot(b_g, b_v, input_precision="tf32x3"), input_precision="tf32x3")
    turn = tl.where(o_k[:, None] == o_k[None, :], 1.0, 0.0)
    for step in range(SWEEPS * (K - 1)):
        b_b = 0.5 * (b_b + tl.trans(b_b))
        rotation = _rotation(b_b, step % (K - 1), K)
        b_b = tl.dot(b_b, rotation, input_precision="tf32x3")
        b_b = tl.dot(tl.trans(rotation), b_b, input_precision="tf32x3")
        turn = tl.dot(turn, rotation, input_precision="tf32x3")
    eye = o_k[:, None] == o_k[None, :]
    value, other = tl.sum(tl.where(eye, b_b, 0.0), axis=0), tl.sum(tl.where(eye, b_b, 0.0), axis=1)
    ahead = (other[:, None] > value[None, :]) | ((other[:, None] == value[None, :]) & (o_k[:, None] < o_k[None, :]))
    place = tl.sum(ahead.to(tl.int32), axis=0)
    b_v = tl.dot(b_v, turn, input_precision="tf32x3") * tl.sqrt(tl.maximum(value, 0.0) * trace)[None, :]
    p_f = factor + i_m * RANK * D + place[None, :] * D + o_d[:, None]
    tl.store(p_f, b_v, mask=m_d[:, None] & (place < RANK)[None, :])


@triton.jit
def _corrections_kernel(
    factor, weights, found, heads,
    D: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """One block of channels of one matrix; grid (matrices, blocks).

    factor float32 [matrices, RANK, D], weights float32 [matrices / heads], found float32 [matrices, D, D].
    """
    i_m, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * SIZE
    o_d, o_s, o_k = tl.arange(0, BLOCK_D), start + tl.arange(0, BLOCK_S), tl.arange(0, K)
    m_s, m_k = (o_s < start + SIZE) & (o_s < D), o_k < RANK
    base = factor + i_m * RANK * D + o_k * D
    m_rest = ((o_d >= start + SIZE) & (o_d < D))[:, None] & m_k[None, :]
    root = tl.sqrt(tl.load(weights + i_m // heads))
    rest = tl.load(base[None, :] + o_d[:, None], mask=m_rest, other=0.0) * root
    block = tl.load(base[None, :] + o_s[:, None], mask=m_s[:, None] & m_k[None, :], other=0.0) * root
    eye = tl.where(o_k[:, None] == o_k[None, :], 1.0, 0.0)
    small = tl.dot(tl.trans(rest), rest, eye, input_precision="tf32x3")
    for k in range(K):
        # the sweep operator: after all k, minus the inverse; a positive definite matrix needs no pivots
        across, down = o_k[None, :] == k, o_k[:, None] == k
        row = tl.sum(tl.where(down, small, 0.0), axis=0)[None, :]
        column = tl.sum(tl.where(across, small, 0.0), axis=1)[:, None]
        pivot = tl.sum(tl.sum(tl.where(across & down, small, 0.0), axis=1), axis=0)
        moved = tl.where(across | down, (column * across + row * down) / pivot, small - column * row / pivot)
        small = tl.where(across & down, -1.0 / pivot, moved)
    solved = tl.dot(block, -small, input_precision="tf32x3")
    move = tl.dot(solved, tl.trans(rest), input_precision="tf32x3")
    p_f = found + i_m * D * D + o_s[:, None] * D + o_d[None, :]
    tl.store(p_f, move, mask=m_s[:, None] & (o_d < D)[None, :])


def _warps(block: int) -> int:
    """On Hopper a warp multiplies 16 rows; 8 warps on 64 rows have failed there."""
    return 8 if block >= 128 else 4


def can_lead(width: int, rank: int) -> bool:
    """Whether `leading_factor` takes matrices so wide and so many directions."""
    return width <= _MOST_CHANNELS and rank + _OVERSAMPLING <= _MOST_COLUMNS


def can_square(queries: Tensor) -> bool:
    """Whether `query_gram` takes these queries: products of 16-bit floats are exact in float32."""
    return queries.dtype in (torch.float16, torch.bfloat16) and queries.shape[-1] <= _MOST_CHANNELS


def query_gram(queries: Tensor, num_kv_heads: int) -> Tensor:
    """`codec.query_gram` on tensor cores, without copies in float32.

    Args:
        queries: [batch, num_heads, time, head_dim] float16 or bfloat16.
        num_kv_heads: kv heads.

    Returns:
        float32 [batch, num_kv_heads, head_dim, head_dim].
    """
    queries = row_major(queries)
    batch, heads, time, width = queries.shape
    tile = 64
    chunk = tile * max(1, cdiv(cdiv(time, tile), _MOST_SPLITS))
    num_splits, block = cdiv(time, chunk), max(16, power_of_two(width))
    partial = torch.empty(num_splits, batch, num_kv_heads, width, width, dtype=torch.float32, device=queries.device)
    if queries.numel():
        _gram_kernel[(num_splits, batch * num_kv_heads)](
            queries, partial, *queries.stride()[:3], time, chunk, num_kv_heads,
            GROUPS=heads // num_kv_heads, D=width, BLOCK_T=tile, BLOCK_D=block, num_warps=_warps(block),
        )  # fmt: skip
    return partial.sum(0)


def leading_factor(gram: Tensor, rank: int) -> Tensor:
    """Q_hat = diag(S[:r]) Vh[:r] of the SVD of Q, from the Gram matrices Q^T Q, without waiting for the device.

    Args:
        gram: float32 [..., d, d].
        rank: directions r.

    Returns:
        float32 [..., min(r, d), d]; the strongest direction first, 0 for those beyond the rank of Q.
    """
    width = gram.shape[-1]
    rank = min(rank, width)
    gram = gram.contiguous()
    factor = torch.empty(*gram.shape[:-2], rank, width, dtype=torch.float32, device=gram.device)
    block = max(16, power_of_two(width))
    if gram.numel():
        _leading_kernel[(gram.numel() // width**2,)](
            gram, factor, D=width, RANK=rank, BLOCK_D=block,
            K=max(16, power_of_two(rank + _OVERSAMPLING)),
            ITERATIONS=_ITERATIONS, SWEEPS=_SWEEPS, num_warps=_warps(block),
        )  # fmt: skip
    return factor


def corrections(factor: Tensor, weight: Tensor, block_size: int) -> Tensor:
    """`codec.corrections` of P = I + weight Q_hat^T Q_hat, in float32.

    Args:
        factor: Q_hat, float32 [batch, num_kv_heads, r, d].
        weight: float32 [batch].
        block_size: channels a block.

    Returns:
        float32 [batch, num_kv_heads, d, d].
    """
    batch, heads, rank, width = factor.shape
    size = min(block_size, width)
    found = torch.empty(batch, heads, width, width, dtype=torch.float32, device=factor.device)
    if factor.numel():
        _corrections_kernel[(batch * heads, cdiv(width, size))](
            factor.contiguous(), weight.contiguous(), found, heads, D=width, RANK=rank, SIZE=size,
            BLOCK_D=max(16, power_of_two(width)), BLOCK_S=max(16, power_of_two(size)),
            K=max(16, power_of_two(rank)), num_warps=4,
        )  # fmt: skip
    return found
