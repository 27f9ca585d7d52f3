"""The quantization error of a block of channels, by which SQuat moves the channels after it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.launch import cdiv, power_of_two, row_major, shared_memory_limit
from kvcli.kernels.words import INTERPRETED
from kvcli.methods.config import ScalarBits
from kvcli.methods.scalar.encode_kernels import affine_codes, affine_scale, clamp_to_fp16, tile_warps


@triton.jit(do_not_specialize=["groups"])
def _error_kernel(
    x, error, stride_b, stride_h, stride_t, heads, groups,
    BITS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """decode(encode(x)) - x of one group of G tokens of one head, quantized per channel; grid (groups, batch * heads).

    x [batch, heads, groups * G, D] float, strides stride_*; error float32 [batch, heads, groups * G, D], written. BITS
    per code; BLOCK_G and BLOCK_D are G and D padded.
    """
    LEVELS: tl.constexpr = (1 << BITS) - 1
    i_group, i_row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    o_t, o_c = tl.arange(0, BLOCK_G)[:, None], tl.arange(0, BLOCK_D)[None, :]
    m_x = (o_t < G) & (o_c < D)
    base = x + (i_row // heads) * stride_b + (i_row % heads) * stride_h + i_group * G * stride_t
    b_x = clamp_to_fp16(tl.load(base + o_t.to(tl.int64) * stride_t + o_c, mask=m_x, other=0.0))
    low = tl.min(tl.where(o_t < G, b_x, float("inf")), axis=0, keep_dims=True)
    high = tl.max(tl.where(o_t < G, b_x, float("-inf")), axis=0, keep_dims=True)
    scale, zero = affine_scale(low, high, LEVELS)
    # a code times a float16 scale is exact in float32: contraction to a fused multiply-add changes nothing
    decoded = affine_codes(b_x, scale, zero, LEVELS) * scale.to(tl.float32) + zero.to(tl.float32)
    tl.store(error + (i_row * groups + i_group) * G * D + o_t * D + o_c, decoded - b_x, mask=m_x)


def per_channel_error(x: Tensor, n_bits: ScalarBits, group_size: int) -> Tensor:
    """decode(encode(x)) - x of what `quantize_per_channel` stores of x [batch, heads, time, channels], float32."""
    x = row_major(x)
    batch, heads, time, channels = x.shape
    error = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if x.numel():
        block, width = power_of_two(group_size), power_of_two(channels)
        _error_kernel[(time // group_size, batch * heads)](
            x, error, *x.stride()[:3], heads, time // group_size, BITS=n_bits, G=group_size, D=channels,
            BLOCK_G=block, BLOCK_D=width, num_warps=tile_warps(block * width),
        )  # fmt: skip
    return error


_ITERATIONS = 24
_SWEEPS = 4
_OVERSAMPLING = 3
_MAX_COLUMNS = 32
_MAX_SPLITS = 32
_MAX_CHANNELS = 128  # a matrix, or half of it, has to fit into shared memory twice: the two parts of a float32 product


@triton.jit(do_not_specialize=["tokens", "chunk"])
def _gram_kernel(
    queries, partial, stride_b, stride_h, stride_t, tokens, chunk, heads,
    GROUPS: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """partial[split, b, h] = sum over `chunk` tokens and the GROUPS query heads of kv head h of q q^T.

    Grid (num_splits, batch * heads); `heads` are kv heads.
    queries float16 or bfloat16 [batch, heads * GROUPS, tokens, D], strides of all but the last axis;
    partial float32 [num_splits, batch * heads, D, D]. BLOCK_T tokens per tile, BLOCK_D = D as a power of two.
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
            if INTERPRETED:  # the interpreter multiplies the bit patterns of bfloat16
                b_q = b_q.to(tl.float32)
            gram = tl.dot(tl.trans(b_q), b_q, gram)
    i_m = i_split * tl.num_programs(1) + i_row
    p_p = partial + i_m * D * D + o_d[:, None] * D + o_d[None, :]
    tl.store(p_p, gram, mask=(o_d < D)[:, None] & (o_d < D)[None, :])


@triton.jit
def _orthonormal(v, o_k, LIMIT: tl.constexpr, K: tl.constexpr):
    """Modified Gram-Schmidt on the columns of v [D, K].

    A column of which less than sqrt(LIMIT) remains after the projections becomes 0. o_k = arange(K).
    """
    norms, scale = tl.sum(v * v, axis=0), tl.zeros((K,), tl.float32)
    for j in range(K):
        is_j = o_k == j
        column = tl.sum(tl.where(is_j[None, :], v, 0.0), axis=1)
        dots = tl.sum(v * column[:, None], axis=0)
        square = tl.sum(tl.where(is_j, dots, 0.0), axis=0)
        threshold = tl.maximum(LIMIT * tl.sum(tl.where(is_j, norms, 0.0), axis=0), 1e-36)
        inverse = tl.where(square > threshold, 1.0 / tl.maximum(square, 1e-36), 0.0)
        v -= column[:, None] * tl.where(o_k > j, dots * inverse, 0.0)[None, :]
        scale = tl.where(is_j, tl.sqrt(inverse), scale)
    return v * scale[None, :]


@triton.jit
def _jacobi_rotation(b, i_round, K: tl.constexpr):
    """Jacobi rotations [K, K] of K / 2 disjoint pairs (i, j), each zeroing b_ij of the symmetric b [K, K].

    The K - 1 rounds of a round-robin schedule meet every pair once.
    """
    o_i, o_j = tl.arange(0, K)[:, None], tl.arange(0, K)[None, :]
    partner = (i_round + K - 1 - o_i) % (K - 1)
    unpaired = (i_round * (K // 2)) % (K - 1)
    partner = tl.where(o_i == K - 1, unpaired, tl.where(o_i == unpaired, K - 1, partner))
    is_pair = o_j == partner
    b_ij = tl.sum(tl.where(is_pair, b, 0.0), axis=1)[:, None]
    diagonal = tl.sum(tl.where(o_i == o_j, b, 0.0), axis=0)[None, :]
    b_ii = tl.sum(tl.where(o_i == o_j, b, 0.0), axis=1)[:, None]
    gap = tl.sum(tl.where(is_pair, diagonal, 0.0), axis=1)[:, None] - b_ii
    # row j computes the same sine with the opposite sign
    sign = tl.where((gap > 0) | ((gap == 0) & (o_i < partner)), 1.0, -1.0)
    denominator = tl.abs(gap) + tl.sqrt(gap * gap + 4 * b_ij * b_ij)
    tangent = tl.where(denominator > 0, sign * 2 * b_ij / tl.maximum(denominator, 1e-36), 0.0)
    cosine = 1.0 / tl.sqrt(1 + tangent * tangent)
    return tl.where(o_i == o_j, cosine, tl.where(is_pair, tangent * cosine, 0.0))


@triton.jit
def _gram_product(b_g, gram, scale, v, D: tl.constexpr, BLOCK_D: tl.constexpr, K: tl.constexpr, HALVES: tl.constexpr):
    """b_g v for b_g [D, D], v [D, K]; if HALVES, gram * scale is read for it, half of the columns at once."""
    if HALVES:
        HALF: tl.constexpr = BLOCK_D // 2
        o_d, o_h = tl.arange(0, BLOCK_D)[:, None], tl.arange(0, HALF)[None, :]
        top, bottom = tl.split(tl.permute(tl.reshape(v, (2, HALF, K)), (1, 2, 0)))
        p_g, m_d = gram + o_d * D + o_h, o_d < D
        # volatile: a load that leaves the loop keeps both halves in shared memory
        left = tl.load(p_g, mask=m_d & (o_h < D), other=0.0, volatile=True) * scale
        product = tl.dot(left, top, input_precision="tf32x3")
        right = tl.load(p_g + HALF, mask=m_d & (o_h + HALF < D), other=0.0, volatile=True) * scale
        product = tl.dot(right, bottom, product, input_precision="tf32x3")
    else:
        product = tl.dot(b_g, v, input_precision="tf32x3")
    return product


@triton.jit
def _leading_kernel(
    gram, factor,
    D: tl.constexpr, RANK: tl.constexpr, BLOCK_D: tl.constexpr, K: tl.constexpr,
    ITERATIONS: tl.constexpr, SWEEPS: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """factor = diag(S[:RANK]) Vh[:RANK], the strongest direction first, with gram = V S^2 V^T; grid (matrices,).

    gram float32 [matrices, D, D]; factor float32 [matrices, RANK, D]. K >= RANK columns are iterated, ITERATIONS
    times, then SWEEPS Jacobi sweeps; BLOCK_D = D as a power of two. HALVES: see `_gram_product`.
    """
    i_m = tl.program_id(0).to(tl.int64)
    o_d, o_k = tl.arange(0, BLOCK_D), tl.arange(0, K)
    m_d = o_d < D
    gram += i_m * D * D
    if HALVES:
        b_g = tl.load(gram + o_d * (D + 1), mask=m_d, other=0.0)
        trace = tl.sum(b_g, axis=0)
    else:
        b_g = tl.load(gram + o_d[:, None] * D + o_d[None, :], mask=m_d[:, None] & m_d[None, :], other=0.0)
        trace = tl.sum(tl.sum(tl.where(o_d[:, None] == o_d[None, :], b_g, 0.0), axis=1), axis=0)
    scale = tl.where(trace > 0, 1.0 / tl.maximum(trace, 1e-36), 0.0)
    b_g = b_g * scale
    # random columns are not orthogonal to any eigenvector
    b_v = tl.rand(0, o_d[:, None] * K + o_k[None, :]) - 0.5
    for _ in range(ITERATIONS):
        b_v = _orthonormal(_gram_product(b_g, gram, scale, b_v, D, BLOCK_D, K, HALVES), o_k, 4e-12, K)
    # columns that hold only rounding errors are not orthogonal yet: set them to 0
    b_v = _orthonormal(b_v, o_k, 0.25, K)
    b_small = _gram_product(b_g, gram, scale, b_v, D, BLOCK_D, K, HALVES)
    b_small = tl.dot(tl.trans(b_v), b_small, input_precision="tf32x3")
    eigvec = tl.where(o_k[:, None] == o_k[None, :], 1.0, 0.0)
    for step in range(SWEEPS * (K - 1)):
        b_small = 0.5 * (b_small + tl.trans(b_small))
        rotation = _jacobi_rotation(b_small, step % (K - 1), K)
        b_small = tl.dot(b_small, rotation, input_precision="tf32x3")
        b_small = tl.dot(tl.trans(rotation), b_small, input_precision="tf32x3")
        eigvec = tl.dot(eigvec, rotation, input_precision="tf32x3")
    eye = o_k[:, None] == o_k[None, :]
    eigval, other = tl.sum(tl.where(eye, b_small, 0.0), axis=0), tl.sum(tl.where(eye, b_small, 0.0), axis=1)
    larger = (other[:, None] > eigval[None, :]) | ((other[:, None] == eigval[None, :]) & (o_k[:, None] < o_k[None, :]))
    order = tl.sum(larger.to(tl.int32), axis=0)
    b_v = tl.dot(b_v, eigvec, input_precision="tf32x3") * tl.sqrt(tl.maximum(eigval, 0.0) * trace)[None, :]
    p_f = factor + i_m * RANK * D + order[None, :] * D + o_d[:, None]
    tl.store(p_f, b_v, mask=m_d[:, None] & (order < RANK)[None, :])


@triton.jit
def _corrections_kernel(
    factor, weights, matrix, heads,
    D: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Rows [start, start + SIZE) of the corrections: B (I + A^T A)^-1 A^T, A and B of `subspace.correction`.

    Grid (matrices, ceil(D / SIZE)). factor float32 [matrices, RANK, D]; weights float32 [matrices / heads], factors of
    Q_hat^T Q_hat; matrix float32 [matrices, D, D]. SIZE channels per block; BLOCK_D, BLOCK_S and K are D, SIZE and RANK
    as powers of two.
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
        # the sweep operator: minus the inverse after all k; a positive definite matrix needs no pivoting
        is_column, is_row = o_k[None, :] == k, o_k[:, None] == k
        row = tl.sum(tl.where(is_row, small, 0.0), axis=0)[None, :]
        column = tl.sum(tl.where(is_column, small, 0.0), axis=1)[:, None]
        pivot = tl.sum(tl.sum(tl.where(is_column & is_row, small, 0.0), axis=1), axis=0)
        swept = tl.where(is_column | is_row, (column * is_column + row * is_row) / pivot, small - column * row / pivot)
        small = tl.where(is_column & is_row, -1.0 / pivot, swept)
    solved = tl.dot(block, -small, input_precision="tf32x3")
    correction = tl.dot(solved, tl.trans(rest), input_precision="tf32x3")
    p_m = matrix + i_m * D * D + o_s[:, None] * D + o_d[None, :]
    tl.store(p_m, correction, mask=m_s[:, None] & (o_d < D)[None, :])


def _warps(block: int) -> int:
    """A warp multiplies 16 rows on Hopper; 8 warps on 64 rows failed there (illegal memory access, triton 3.6)."""
    return 8 if block >= 128 else 4


def subspace_note(width: int, rank: int) -> str | None:
    """Why `leading_factor` cannot take matrices of this width and this many directions; None if it can."""
    most = _MAX_COLUMNS - _OVERSAMPLING
    if width <= _MAX_CHANNELS and rank <= most:
        return None
    taken = f"the kernel takes at most {_MAX_CHANNELS} channels and {most} directions"
    return f"the subspace is computed in PyTorch: {taken}, not {width} and {rank}"


def supports_gram(queries: Tensor) -> bool:
    """Whether `query_gram` supports these queries: 16-bit floats, whose products are exact in float32."""
    return queries.dtype in (torch.float16, torch.bfloat16) and queries.shape[-1] <= _MAX_CHANNELS


def query_gram(queries: Tensor, num_kv_heads: int) -> Tensor:
    """`subspace.query_gram` on tensor cores, without copies in float32."""
    queries = row_major(queries)
    batch, heads, time, width = queries.shape
    tile = 64
    chunk = tile * max(1, cdiv(cdiv(time, tile), _MAX_SPLITS))
    num_splits, block = cdiv(time, chunk), max(16, power_of_two(width))
    partial = torch.empty(num_splits, batch, num_kv_heads, width, width, dtype=torch.float32, device=queries.device)
    if queries.numel():
        _gram_kernel[(num_splits, batch * num_kv_heads)](
            queries, partial, *queries.stride()[:3], time, chunk, num_kv_heads,
            GROUPS=heads // num_kv_heads, D=width, BLOCK_T=tile, BLOCK_D=block, num_warps=_warps(block),
        )  # fmt: skip
    return partial.sum(0)


def leading_factor(gram: Tensor, rank: int) -> Tensor:
    """`subspace.leading_factor` without waiting for the device: float32 [..., min(rank, d), d] of gram [..., d, d].

    The strongest direction is the first; those beyond the rank of Q are 0.
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
            ITERATIONS=_ITERATIONS, SWEEPS=_SWEEPS, HALVES=8 * block**2 > shared_memory_limit(gram.device),
            num_warps=_warps(block),
        )  # fmt: skip
    return factor


def corrections(factor: Tensor, weight: Tensor, block_size: int) -> Tensor:
    """`subspace.corrections` of P = I + weight Q_hat^T Q_hat: float32 [batch, num_kv_heads, d, d].

    factor: Q_hat, float32 [batch, num_kv_heads, r, d]; weight float32 [batch].
    """
    batch, heads, rank, width = factor.shape
    size = min(block_size, width)
    matrix = torch.empty(batch, heads, width, width, dtype=torch.float32, device=factor.device)
    if factor.numel():
        _corrections_kernel[(batch * heads, cdiv(width, size))](
            factor.contiguous(), weight.contiguous(), matrix, heads, D=width, RANK=rank, SIZE=size,
            BLOCK_D=max(16, power_of_two(width)), BLOCK_S=max(16, power_of_two(size)),
            K=max(16, power_of_two(rank)), num_warps=4,
        )  # fmt: skip
    return matrix
