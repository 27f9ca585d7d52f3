"""Attention over QJL's codes: <S q, sign(S k)> from packed signs, per-token values.

With bits b in {0, 1} for the signs, <S q, 2 b - 1> = 2 <S q, b> - sum(S q): a product of masked words with the query's
sketch, and one number a query. Inlier and outlier channels have a sketch each; their scores add up.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.launch import cdiv, power_of_two, row_major, unsupported_shape
from kvcli.kernels.pdl import pdl_launch_dependents, pdl_launch_options, pdl_wait
from kvcli.kernels.splits import LOG2E, SplitScores
from kvcli.kernels.words import EVICT_FIRST, fields_as_fp16, pow2_above
from kvcli.methods.base import LayerCodec
from kvcli.methods.encoded import EncodedTokens, PartialAttention
from kvcli.methods.qjl.codec import QJLKey, QJLState
from kvcli.methods.scalar.per_token import PerTokenCodec
from kvcli.methods.scalar.value_kernels import value_sum

_TOKENS = 128
_REGISTERS: int | None = None
_WARPS = 1
_STAGES = 1


@triton.jit
def _sketch_kernel(
    query,
    channels,
    sketch,
    outlier_sketch,
    sketched,
    q_batch,
    q_head,
    q_time,
    num_kv_heads,
    query_len,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    M_OUT: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """S q of the inlier channels, then of the outlier channels: [rows, M + M_OUT] for each kv head."""
    pdl_launch_dependents()
    i_bh = tl.program_id(0).to(tl.int64)
    i_b = i_bh // num_kv_heads
    o_m = tl.program_id(2) * 16 + tl.arange(0, 16)
    o_d = tl.arange(0, BLOCK_D)
    o_k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    m_m = o_m < HEADS * query_len
    m_d = o_d < D
    head = (i_bh % num_kv_heads) * HEADS + o_m // query_len
    at = i_b * q_batch + head * q_head + (o_m % query_len).to(tl.int64) * q_time
    b_q = tl.load(query + at[:, None] + o_d[None, :], mask=m_m[:, None] & m_d[None, :], other=0.0).to(tl.float32)
    b_out = tl.load(channels + i_bh * D + o_d, mask=m_d, other=0.0)
    inlier = o_k < M
    b_s = tl.load(sketch + o_k[:, None] * D + o_d[None, :], mask=inlier[:, None] & m_d[None, :], other=0.0)
    b_s = b_s * (1.0 - b_out)[None, :]
    if M_OUT > 0:
        outlier = (o_k >= M) & (o_k < M + M_OUT)
        p_outlier = outlier_sketch + (o_k - M)[:, None] * D + o_d[None, :]
        b_s += tl.load(p_outlier, mask=outlier[:, None] & m_d[None, :], other=0.0) * b_out[None, :]
    b_sq = tl.dot(b_q, tl.trans(b_s), input_precision="ieee")
    row = i_bh * HEADS * query_len + o_m
    p_sketched = sketched + row[:, None] * (M + M_OUT) + o_k[None, :]
    tl.store(p_sketched, b_sq, mask=m_m[:, None] & (o_k < M + M_OUT)[None, :])


@triton.jit
def _sketch_fields(
    p_sketched, m_m, W: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_M: tl.constexpr, FP32_DOT: tl.constexpr
):
    """A query sketch by bits of a word: 16 tensors [W, M], the unit of each row, and the row's sum."""
    o_w = tl.arange(0, BLOCK_W)
    b_qs = ()
    b_top = tl.zeros([BLOCK_W, BLOCK_M], tl.float32)
    b_sum = tl.zeros([BLOCK_W, BLOCK_M], tl.float32)
    for f in tl.static_range(16):
        b_q = tl.load(p_sketched + (o_w * 16 + f)[:, None], mask=(o_w < W)[:, None] & m_m[None, :], other=0.0)
        b_top = tl.maximum(b_top, tl.abs(b_q))
        b_sum += b_q
        b_qs = b_qs + (b_q,)
    unit = pow2_above(tl.maximum(tl.max(b_top, 0), 1e-30))
    if FP32_DOT:
        unit = tl.full([BLOCK_M], 1.0, tl.float32)
    b_units = ()
    for f in tl.static_range(16):
        if FP32_DOT:
            b_units = b_units + (b_qs[f],)
        else:
            # bits are masked, not shifted: bit f of a byte reads 2^f times too large
            b_units = b_units + ((b_qs[f] / (unit * (1 << (f % 8)))[None, :]).to(tl.float16),)
    return b_units, unit, tl.sum(b_sum, 0)


@triton.jit
def _sign_products(words, b_units, unit, total, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, FP32_DOT: tl.constexpr):
    """<S q, sign> of words [N, W] for each row: [N, M]."""
    high = words >> 8
    b_s = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for f in tl.static_range(16):
        if FP32_DOT:
            b_s = tl.dot(((words >> f) & 1).to(tl.float32), b_units[f], b_s, input_precision="ieee")
        else:
            b_s = tl.dot(fields_as_fp16(words if f < 8 else high, 1 << (f % 8)), b_units[f], b_s)
    if not FP32_DOT:
        b_s = b_s * 16777216.0
    return b_s * (2.0 * unit)[None, :] - total[None, :]


@triton.jit(do_not_specialize=["length"])
def _scores_kernel(
    sketched,
    signs,
    norm,
    outlier_signs,
    outlier_norm,
    lengths,
    scores,
    tops,
    p_batch,
    p_head,
    n_batch,
    n_head,
    o_batch,
    o_head,
    s_head,
    s_row,
    num_kv_heads,
    length,
    rows,
    per_program,
    factor,
    outlier_factor,
    W: tl.constexpr,
    W_OUT: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FP32_DOT: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
):
    pdl_launch_dependents()
    i_bh = tl.program_id(1).to(tl.int64)
    i_b = i_bh // num_kv_heads
    i_h = i_bh % num_kv_heads
    o_m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_w = tl.arange(0, BLOCK_W)
    o_o = tl.arange(0, BLOCK_OUT)
    o_n = tl.arange(0, BLOCK_N)
    m_m = o_m < rows
    if HAS_LENGTHS:
        length = tl.load(lengths + i_b)
    first = tl.program_id(0).to(tl.int64) * per_program
    count = tl.minimum(length - tl.program_id(0) * per_program, per_program)
    signs += i_b * p_batch + i_h * p_head + first * W
    norm += i_b * n_batch + i_h * n_head + first
    outlier_signs += i_b * o_batch + i_h * o_head + first * W_OUT
    outlier_norm += i_b * n_batch + i_h * n_head + first
    p_scores = scores + i_bh * s_head + o_m.to(tl.int64)[None, :] * s_row + first
    p_sketched = sketched + (i_bh * rows + o_m)[None, :] * ((W + W_OUT) * 16)
    pdl_wait()
    b_units, unit, total = _sketch_fields(p_sketched, m_m, W, BLOCK_W, BLOCK_M, FP32_DOT)
    if W_OUT > 0:
        b_outs, out_unit, out_total = _sketch_fields(p_sketched + W * 16, m_m, W_OUT, BLOCK_OUT, BLOCK_M, FP32_DOT)
    b_best = tl.full([BLOCK_N, BLOCK_M], float("-inf"), tl.float32)
    for start in range(0, count, BLOCK_N):
        n = start + o_n
        at = tl.minimum(n, count - 1)
        p_w = signs + at[:, None] * W + o_w[None, :]
        words = tl.load(p_w, mask=(o_w < W)[None, :], other=0, eviction_policy=EVICT_FIRST)
        b_n = tl.load(norm + at).to(tl.float32) * factor
        b_s = _sign_products(words, b_units, unit, total, BLOCK_N, BLOCK_M, FP32_DOT) * b_n[:, None]
        if W_OUT > 0:
            p_w = outlier_signs + at[:, None] * W_OUT + o_o[None, :]
            words = tl.load(p_w, mask=(o_o < W_OUT)[None, :], other=0, eviction_policy=EVICT_FIRST)
            b_n = tl.load(outlier_norm + at).to(tl.float32) * outlier_factor
            b_s += _sign_products(words, b_outs, out_unit, out_total, BLOCK_N, BLOCK_M, FP32_DOT) * b_n[:, None]
        b_best = tl.maximum(b_best, b_s)
        tl.store(p_scores + n[:, None], b_s, mask=(n < count)[:, None] & m_m[None, :])
    row = (i_bh * tl.num_programs(0) + tl.program_id(0)) * rows + o_m
    tl.store(tops + row, tl.max(b_best, 0), mask=m_m)


def fused_attend(codec: LayerCodec, query: Tensor, part: EncodedTokens, scaling: float) -> PartialAttention:
    """Attention over QJL's codes; see `kvcli.methods.encoded.AttendCodes`.

    Raises:
        UsageError: a shape the kernels do not support.
    """
    key, value, state, codes = codec.key, codec.value, part.key_state, part.value_codes
    assert isinstance(key, QJLKey)
    assert isinstance(value, PerTokenCodec)
    assert isinstance(state, QJLState)
    exact = query.dtype == torch.float32
    sizes = len(key.sketch), len(key.outlier_sketch) if key.config.num_outliers else 0
    for size in sizes:
        if size % 16:
            raise unsupported_shape(f"a sketch of {size} rows; choose a multiple of 16")
    scores = _scores(key, _sketch(key, query, state), part, sizes, scaling / key.bias, exact)
    out, lse = value_sum(scores, codes, part.lengths, value.n_bits, query.shape[-1], exact)
    return out.view(query.shape), lse.view(query.shape[:3])


def _sketch(key: QJLKey, query: Tensor, state: QJLState) -> Tensor:
    """Projections of the query's inlier and outlier channels: float32 [batch, num_kv_heads, rows, m + m_out]."""
    batch, heads, query_len, head_dim = query.shape
    kv_heads = key.spec.num_kv_heads
    rows = heads // kv_heads * query_len
    inliers, outliers = len(key.sketch), len(key.outlier_sketch) if key.config.num_outliers else 0
    query = row_major(query)
    sketched = torch.empty(batch, kv_heads, rows, inliers + outliers, device=query.device)
    _sketch_kernel[(batch * kv_heads, cdiv(inliers + outliers, 64), cdiv(rows, 16))](
        query,
        state.channels if outliers else torch.zeros_like(state.channels),
        key.sketch,
        key.outlier_sketch,
        sketched,
        *query.stride()[:3],
        kv_heads,
        query_len,
        HEADS=heads // kv_heads,
        D=head_dim,
        M=inliers,
        M_OUT=outliers,
        BLOCK_D=max(16, power_of_two(head_dim)),
        BLOCK_K=64,
        num_warps=4,
    )
    return sketched


def _scores(
    key: QJLKey, sketched: Tensor, part: EncodedTokens, sizes: tuple[int, int], scaling: float, exact: bool
) -> SplitScores:
    """sqrt(pi/2)/m |k| <S q, sign(S k)> * scaling of all rows and tokens."""
    codes = part.key_codes
    batch, kv_heads, rows, _ = sketched.shape
    signs = codes.signs.view(torch.int16)
    outlier_signs = codes.outlier_signs.view(torch.int16) if sizes[1] else signs
    block_m = 16 if exact else 8
    blocks = cdiv(rows, block_m)
    scores = SplitScores(batch, kv_heads, rows, part.length, _TOKENS, blocks, sketched.device)
    inlier_words, outlier_words = (size // 16 for size in sizes)
    weight = scaling * LOG2E * math.sqrt(math.pi / 2)
    _scores_kernel[(scores.num_splits, batch * kv_heads, blocks)](
        sketched,
        signs,
        codes.norm,
        outlier_signs,
        codes.outlier_norm,
        scores.values if part.lengths is None else part.lengths,
        scores.values,
        scores.split_max,
        *signs.stride()[:2],
        *codes.norm.stride()[:2],
        *outlier_signs.stride()[:2],
        scores.values.stride(1),
        scores.values.stride(2),
        kv_heads,
        part.length,
        rows,
        scores.tokens_per_split,
        weight / sizes[0],
        weight / max(1, sizes[1]),
        W=inlier_words,
        W_OUT=outlier_words,
        BLOCK_W=max(16, power_of_two(inlier_words)),
        BLOCK_OUT=max(16, power_of_two(max(1, outlier_words))),
        BLOCK_M=block_m,
        BLOCK_N=_TOKENS,
        FP32_DOT=exact,
        HAS_LENGTHS=part.lengths is not None,
        num_warps=4 if exact else _WARPS,
        num_stages=_STAGES,
        maxnreg=None if exact else _REGISTERS,
        **pdl_launch_options(),
    )
    return scores
