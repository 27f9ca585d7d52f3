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

from kvcli.kernels.launch import refuse, splits
from kvcli.kernels.values import LOG2E, value_sum
from kvcli.kernels.words import masked, power_above
from kvcli.methods.base import EncodedPart, LayerCodec, PartialAttention
from kvcli.methods.pertoken import PerTokenCodec
from kvcli.methods.qjl.codec import QJLKey, QJLState

_TOKENS = 64
_WARPS = 1
_STAGES = 1


@triton.jit
def _scores_kernel(
    sketched,
    packed,
    norm,
    scores,
    k_head,
    k_row,
    p_batch,
    p_head,
    p_time,
    n_batch,
    n_head,
    n_time,
    s_head,
    s_row,
    num_kv_heads,
    length,
    rows,
    per_program,
    factor,
    W: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EXACT: tl.constexpr,
    ADD: tl.constexpr,
):
    i_bh = tl.program_id(1).to(tl.int64)
    i_b = i_bh // num_kv_heads
    i_h = i_bh % num_kv_heads
    o_m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_w = tl.arange(0, BLOCK_W)
    o_n = tl.arange(0, BLOCK_N)
    m_m = o_m < rows
    m_w = o_w < W
    packed += i_b * p_batch + i_h * p_head
    norm += i_b * n_batch + i_h * n_head
    p_scores = scores + i_bh * s_head + o_m.to(tl.int64)[None, :] * s_row
    p_sketched = sketched + i_bh * k_head + o_m[None, :] * k_row

    b_qs = ()
    b_top = tl.zeros([BLOCK_W, BLOCK_M], tl.float32)
    b_sum = tl.zeros([BLOCK_W, BLOCK_M], tl.float32)
    for f in tl.static_range(16):
        b_q = tl.load(p_sketched + (o_w * 16 + f)[:, None], mask=m_w[:, None] & m_m[None, :], other=0.0)
        b_top = tl.maximum(b_top, tl.abs(b_q))
        b_sum += b_q
        b_qs = b_qs + (b_q,)
    unit = power_above(tl.maximum(tl.max(b_top, 0), 1e-30))
    if EXACT:
        unit = tl.full([BLOCK_M], 1.0, tl.float32)
    b_units = ()
    for f in tl.static_range(16):
        if EXACT:
            b_units = b_units + (b_qs[f],)
        else:
            # bits are masked, not shifted: bit f of a byte reads 2^f times too large
            b_units = b_units + ((b_qs[f] / (unit * (1 << (f % 8)))[None, :]).to(tl.float16),)
    total = tl.sum(b_sum, 0)

    first = tl.program_id(0) * per_program
    for start in range(first, tl.minimum(first + per_program, length), BLOCK_N):
        n = start + o_n
        m_n = n < length
        at = n.to(tl.int64)
        words = tl.load(packed + at[:, None] * p_time + o_w[None, :], mask=m_n[:, None] & m_w[None, :], other=0)
        high = words >> 8
        # [N, M]
        b_s = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for f in tl.static_range(16):
            if EXACT:
                b_s = tl.dot(((words >> f) & 1).to(tl.float32), b_units[f], b_s, input_precision="ieee")
            else:
                b_s = tl.dot(masked(words if f < 8 else high, 1 << (f % 8)), b_units[f], b_s)
        if not EXACT:
            b_s = b_s * 16777216.0
        b_n = tl.load(norm + at * n_time, mask=m_n, other=0.0).to(tl.float32) * factor
        b_s = (b_s * (2.0 * unit)[None, :] - total[None, :]) * b_n[:, None]
        m_s = m_n[:, None] & m_m[None, :]
        if ADD:
            b_s += tl.load(p_scores + n[:, None], mask=m_s, other=0.0)
        tl.store(p_scores + n[:, None], b_s, mask=m_s)


def fused_attend(codec: LayerCodec, query: Tensor, part: EncodedPart, scaling: float) -> PartialAttention:
    """Attention over QJL's codes; see `kvcli.methods.base.PartialAttend`.

    Raises:
        UsageError: a shape the kernels do not support.
    """
    key, value, state, codes = codec.key, codec.value, part.key_state, part.key_codes
    assert isinstance(key, QJLKey)
    assert isinstance(value, PerTokenCodec)
    assert isinstance(state, QJLState)
    exact = query.dtype == torch.float32
    batch, heads, query_len, head_dim = query.shape
    rows = query.float().reshape(batch, key.spec.num_kv_heads, -1, head_dim)
    outlier = state.channels.unsqueeze(2)
    scores = torch.empty(*rows.shape[:3], part.length, device=query.device)
    inliers = rows * (1 - outlier) if key.config.num_outliers else rows
    _add_scores(scores, inliers, key.sketch, codes.signs, codes.norm, scaling / key.bias, exact, add=False)
    if key.config.num_outliers:
        sketch, signs, norm = key.outlier_sketch, codes.outlier_signs, codes.outlier_norm
        _add_scores(scores, rows * outlier, sketch, signs, norm, scaling / key.bias, exact, add=True)
    found = part.value_codes
    out, lse = value_sum(
        scores,
        found.packed,
        found.scale,
        found.zero,
        part.lengths,
        part.length,
        value.n_bits,
        head_dim,
        exact,
    )
    return out.view(query.shape), lse.view(query.shape[:3])


def _add_scores(
    scores: Tensor, rows: Tensor, sketch: Tensor, signs: Tensor, norm: Tensor, scaling: float, exact: bool, add: bool
) -> None:
    """Writes, or adds, sqrt(pi/2)/m |k| <S q, sign(S k)> * scaling in units of log 2 to scores [batch, heads, rows, T]."""
    size = len(sketch)
    if size % 16:
        raise refuse(f"a sketch of {size} rows; choose a multiple of 16")
    sketched = rows @ sketch.T
    words = signs.view(torch.int16)
    batch, kv_heads, count, _ = rows.shape
    block_m, block_n = 16 if exact else 8, _TOKENS
    blocks = triton.cdiv(count, block_m)
    length = scores.shape[-1]
    per_program = splits(length, batch * kv_heads * blocks, block_n)
    _scores_kernel[(triton.cdiv(length, per_program), batch * kv_heads, blocks)](
        sketched,
        words,
        norm,
        scores,
        sketched.stride(1),
        sketched.stride(2),
        *words.stride()[:3],
        *norm.stride()[:3],
        scores.stride(1),
        scores.stride(2),
        kv_heads,
        length,
        count,
        per_program,
        scaling * LOG2E * math.sqrt(math.pi / 2) / size,
        W=words.shape[-1],
        BLOCK_W=max(16, triton.next_power_of_2(words.shape[-1])),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        EXACT=exact,
        ADD=add,
        num_warps=4 if exact else _WARPS,
        num_stages=_STAGES,
    )
