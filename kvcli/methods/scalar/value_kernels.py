"""Softmax of given scores, and the weighted sum of values quantized per token: the second half of attention over codes.

The tokens are split over programs: each takes one kv head and a range of tokens and writes its normalized sum with the
log-sum-exp of its scores; a second kernel merges the splits. A program is given the maximum of its scores, so nothing
is rescaled on the way. Scores are base-2 (scaled by log2(e)), so kernels use exp2.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.grid import batch_and_head, split_range
from kvcli.kernels.launch import cdiv, power_of_two
from kvcli.kernels.pdl import pdl_launch_dependents, pdl_launch_options, pdl_wait
from kvcli.kernels.splits import SplitScores, merge_splits
from kvcli.kernels.words import EVICT_FIRST, FIELD_SCALE, TINY, field_dot, field_fp32, layout_barrier, pow2_above
from kvcli.methods.encoded import EncodedTokens
from kvcli.methods.scalar.per_token import PerTokenCodec

# tuned on one H200, torch 2.11, triton 3.6
_BLOCK_N = 64
_SCAN = 1024
_WARPS = 1
_WARPS_FP32 = 4
_STAGES = 1
_MAX_REGISTERS = 128

_MAX_GROUPS = 15
"""Groups of channels: their zeros and a row of ones fill the 16 rows of one product."""


@triton.jit(do_not_specialize=["length"])
def _value_kernel(
    scores, packed, scale, zero, lengths, split_max, split_out, split_lse,
    s_head, s_row, p_batch, p_head, c_batch, c_head, num_kv_heads, length, per_split, rows, lse_unit,
    B: tl.constexpr, W: tl.constexpr, D: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SCAN: tl.constexpr,
    FP32_DOT: tl.constexpr, HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    """out[m, d] = sum_n p_mn (code_nd scale_ng + zero_ng) / sum_n p_mn with p = exp2(scores - max), d in group g.

    Per field of the packed words, sum_n (p_mn scale_ng) code_nd is a product on tensor cores; the zeros and the sum of
    the weights are one more. Grid (num_splits, batch * num_kv_heads, ceil(rows / BLOCK_M)). One program: BLOCK_M query
    rows of one kv head and per_split tokens, BLOCK_N at a time.

    Args:
        scores: float32 [batch, num_kv_heads, rows, tokens], strides s_*, in units of log 2.
        packed: int16 [batch, num_kv_heads, tokens, W], strides p_*, B-bit codes by `pack_planes`.
        scale, zero: float16 [batch, num_kv_heads, tokens, GROUPS], strides c_*.
        lengths: int32 [batch], tokens of each sequence; read if HAS_LENGTHS.
        split_max: float32 [batch, num_kv_heads, num_splits, rows], largest score of each split.
        split_out: float32 [batch, num_kv_heads, num_splits, rows, D], written.
        split_lse: float32 [batch, num_kv_heads, num_splits, rows], written, in units of log 2 / lse_unit.

    Constexprs: BLOCK_W words, W padded; SCAN scales read at a time for their maximum; FP32_DOT: float32 products. Tuned
    on one H200, torch 2.11, triton 3.6.
    """
    pdl_launch_dependents()
    i_bh, i_b, i_h = batch_and_head(1, num_kv_heads)
    o_m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_w = tl.arange(0, BLOCK_W)
    o_n = tl.arange(0, BLOCK_N)
    o_z = tl.arange(0, 16)
    FIELDS: tl.constexpr = 16 // B
    LOW: tl.constexpr = FIELDS // 2
    GROUP: tl.constexpr = D // GROUPS
    m_m = o_m < rows
    m_w = o_w < W
    if HAS_LENGTHS:
        length = tl.load(lengths + i_b)
    first, count = split_range(length, per_split)
    p_scores = scores + i_bh * s_head + o_m.to(tl.int64)[None, :] * s_row + first
    packed += i_b * p_batch + i_h * p_head + first * W
    scale += i_b * c_batch + i_h * c_head + first * GROUPS
    zero += i_b * c_batch + i_h * c_head + first * GROUPS

    # the largest scale, so that weights times scales stay in the range of float16
    b_unit = tl.zeros([SCAN], tl.float16)
    for start in range(0, count * GROUPS, SCAN):
        at = tl.minimum(start + tl.arange(0, SCAN), count * GROUPS - 1)
        b_unit = tl.maximum(b_unit, tl.load(scale + at))
    unit = pow2_above(tl.maximum(tl.max(b_unit.to(tl.float32), 0), TINY))
    per_unit = 1.0 / unit

    pdl_wait()
    row = (i_bh * tl.num_programs(0) + tl.program_id(0)) * rows + o_m
    highest = tl.load(split_max + row, mask=m_m, other=0.0)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    # weights up to 2^10, so that small ones survive in float16
    shift = 10.0 - highest

    b_sums = ()
    for f in tl.static_range(FIELDS):
        b_sums = b_sums + (tl.zeros([BLOCK_W, BLOCK_M], tl.float32),)
    b_zero = tl.zeros([16, BLOCK_M], tl.float32)
    for start in range(0, count, BLOCK_N):
        n = start + o_n
        at = tl.minimum(n, count - 1)
        b_s = tl.load(p_scores + n[:, None], mask=(n < count)[:, None] & m_m[None, :], other=float("-inf"))
        # [N, M]
        b_p = tl.exp2(layout_barrier(b_s) + shift[None, :])
        if W == BLOCK_W:
            words = tl.load(packed + at[:, None] * W + o_w[None, :], eviction_policy=EVICT_FIRST)
        else:
            words = tl.load(packed + at[:, None] * W + o_w[None, :], mask=m_w[None, :], other=0)
        words = tl.trans(words)
        # zeros as rows [16, N]: those of the groups, then ones, which sum the weights
        p_z = zero + at[:, None] * GROUPS + o_z[None, :]
        b_z = tl.load(p_z, mask=(o_z < GROUPS)[None, :], other=1.0, eviction_policy=EVICT_FIRST)
        b_z = tl.trans(b_z)
        new_sums = ()
        if FP32_DOT:
            b_zero = tl.dot(b_z.to(tl.float32), b_p, b_zero, input_precision="ieee")
            for f in tl.static_range(FIELDS):
                group = tl.minimum((f * W + o_w) // GROUP, GROUPS - 1)
                b_c = tl.load(scale + at[None, :] * GROUPS + group[:, None]).to(tl.float32)
                b_v = field_fp32(words, f, B) * b_c
                new_sums = new_sums + (tl.dot(b_v, b_p, b_sums[f], input_precision="ieee"),)
        else:
            b_zero = tl.dot(b_z, b_p.to(tl.float16), b_zero)
            b_ps = tl.zeros([BLOCK_N, BLOCK_M], tl.float16)
            for f in tl.static_range(FIELDS):
                if (f * W) % GROUP == 0:
                    b_c = tl.load(scale + at * GROUPS + (f * W) // GROUP).to(tl.float32) * per_unit
                    b_ps = (b_p * b_c[:, None]).to(tl.float16)
                new_sums = new_sums + (field_dot(words, b_ps, b_sums[f], f, B, FP32_DOT),)
        b_sums = new_sums

    total = tl.sum(tl.where((o_z == GROUPS)[:, None], b_zero, 0.0), 0)
    safe_total = tl.where(total > 0, total, 1.0)
    b_lse = tl.where(total > 0, highest + tl.log2(safe_total) - 10.0, float("-inf"))
    tl.store(split_lse + row, b_lse * lse_unit, mask=m_m)
    for f in tl.static_range(FIELDS):
        if FP32_DOT:
            b_out = b_sums[f]
        else:
            b_out = b_sums[f] * (unit * (FIELD_SCALE / (1 << (B * (f % LOW)))))
        channel = f * W + o_w
        group = channel // GROUP
        for g in tl.static_range(GROUPS):
            b_g = tl.sum(tl.where((o_z == g)[:, None], b_zero, 0.0), 0)
            b_out += tl.where((group == g)[:, None], b_g[None, :], 0.0)
        m_out = m_w[:, None] & (channel < D)[:, None] & m_m[None, :]
        tl.store(split_out + row[None, :] * D + channel[:, None], b_out / safe_total[None, :], mask=m_out)


def unsupported_values(value: PerTokenCodec) -> str | None:
    """Why this kernel cannot read a layer's value codes; None if it can."""
    groups = value.spec.head_dim // value.group_size
    return f"{groups} groups of channels per head; at most {_MAX_GROUPS}" if groups > _MAX_GROUPS else None


def value_sum(
    value: PerTokenCodec, scores: SplitScores, encoded: EncodedTokens, fp32_dot: bool
) -> tuple[Tensor, Tensor]:
    """softmax(scores) V for value codes.

    Args:
        value: a codec that `unsupported_values` accepts.
        scores: of all query rows and encoded tokens.
        encoded: the layer's encoded tokens.
        fp32_dot: multiply in float32.

    Returns:
        out float32 [batch, num_kv_heads, rows, head_dim] and lse float32 [batch, num_kv_heads, rows], natural.
    """
    codes, head_dim = encoded.value_codes, value.spec.head_dim
    batch, kv_heads, rows, _ = scores.values.shape
    words, scale, zero = codes.packed.view(torch.int16), codes.scale, codes.zero
    # a field whose words lie in several groups has no one scale to put into the weights
    fp32_dot = fp32_dot or value.group_size % words.shape[-1] != 0
    block_m = 16 if fp32_dot else 8
    blocks = cdiv(rows, block_m)
    device = scale.device
    split_out = torch.empty(batch * kv_heads, scores.num_splits, rows, head_dim, device=device)
    split_lse = torch.empty(batch * kv_heads, scores.num_splits, rows, device=device)
    _value_kernel[(scores.num_splits, batch * kv_heads, blocks)](
        scores.values, words, scale, zero, scores.values if encoded.lengths is None else encoded.lengths,
        scores.split_max, split_out, split_lse,
        *scores.values.stride()[1:3], *words.stride()[:2], *scale.stride()[:2],
        kv_heads, scores.length, scores.tokens_per_split, rows, math.log(2) if scores.num_splits == 1 else 1.0,
        B=value.n_bits, W=words.shape[-1], D=head_dim, GROUPS=scale.shape[-1],
        BLOCK_W=max(16, power_of_two(words.shape[-1])), BLOCK_M=block_m, BLOCK_N=_BLOCK_N, SCAN=_SCAN,
        FP32_DOT=fp32_dot, HAS_LENGTHS=encoded.lengths is not None,
        num_warps=_WARPS_FP32 if fp32_dot else _WARPS, num_stages=_STAGES,
        maxnreg=None if fp32_dot else _MAX_REGISTERS, **pdl_launch_options(),
    )  # fmt: skip
    if scores.num_splits == 1:
        return split_out, split_lse
    out = torch.empty(batch, kv_heads, rows, head_dim, device=device)
    lse = torch.empty(batch, kv_heads, rows, device=device)
    merge_splits(split_out, split_lse, out, lse)
    return out, lse
