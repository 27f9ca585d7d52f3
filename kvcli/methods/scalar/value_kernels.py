"""The second half of attention over codes: softmax of given scores, and the weighted sum of per-token quantized values.

Split over tokens: a program takes one kv head and a range of tokens and leaves its normalised sum with the log-sum-exp
of its scores; a second kernel joins the ranges. A program knows the maximum of its scores before it sums, so nothing is
rescaled on the way.

Scores arrive in units of log 2, so that exp2 serves.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.launch import cdiv, power_of_two, unsupported_shape
from kvcli.kernels.pdl import pdl_launch_dependents, pdl_launch_options, pdl_wait
from kvcli.kernels.splits import SplitScores, merge_splits
from kvcli.kernels.words import EVICT_FIRST, fields_as_fp16, layout_barrier, pow2_above

_BLOCK_N = 64
_SCAN = 1024
_WARPS = 1
_STAGES = 1
_REGISTERS: int | None = 128


@triton.jit(do_not_specialize=["length"])
def _value_kernel(
    scores,
    packed,
    scale,
    zero,
    lengths,
    part_top,
    part_out,
    part_lse,
    s_head,
    s_row,
    p_batch,
    p_head,
    c_batch,
    c_head,
    num_kv_heads,
    length,
    per_split,
    rows,
    lse_unit,
    B: tl.constexpr,
    W: tl.constexpr,
    D: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCAN: tl.constexpr,
    FP32_DOT: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
):
    pdl_launch_dependents()
    i_bh = tl.program_id(1).to(tl.int64)
    i_b = i_bh // num_kv_heads
    i_h = i_bh % num_kv_heads
    o_m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_w = tl.arange(0, BLOCK_W)
    o_n = tl.arange(0, BLOCK_N)
    o_z = tl.arange(0, 16)
    FIELDS: tl.constexpr = 16 // B
    LOW: tl.constexpr = FIELDS // 2
    GROUP: tl.constexpr = D // GROUPS
    MASK: tl.constexpr = (1 << B) - 1
    m_m = o_m < rows
    m_w = o_w < W
    limit = length
    if HAS_LENGTHS:
        limit = tl.load(lengths + i_b)
    first = tl.program_id(0).to(tl.int64) * per_split
    count = tl.minimum(limit - tl.program_id(0) * per_split, per_split)
    p_scores = scores + i_bh * s_head + o_m.to(tl.int64)[None, :] * s_row + first
    packed += i_b * p_batch + i_h * p_head + first * W
    scale += i_b * c_batch + i_h * c_head + first * GROUPS
    zero += i_b * c_batch + i_h * c_head + first * GROUPS

    # the largest scale, so that weights times scales stay in the range of float16
    b_unit = tl.zeros([SCAN], tl.float16)
    for start in range(0, count * GROUPS, SCAN):
        at = tl.minimum(start + tl.arange(0, SCAN), count * GROUPS - 1)
        b_unit = tl.maximum(b_unit, tl.load(scale + at))
    unit = pow2_above(tl.maximum(tl.max(b_unit.to(tl.float32), 0), 1e-30))
    per_unit = 1.0 / unit

    pdl_wait()
    row = (i_bh * tl.num_programs(0) + tl.program_id(0)) * rows + o_m
    top = tl.load(part_top + row, mask=m_m, other=0.0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    shift = 10.0 - safe

    b_sums = ()
    for f in tl.static_range(FIELDS):
        b_sums = b_sums + (tl.zeros([BLOCK_W, BLOCK_M], tl.float32),)
    b_zero = tl.zeros([16, BLOCK_M], tl.float32)
    for start in range(0, count, BLOCK_N):
        n = start + o_n
        at = tl.minimum(n, count - 1)
        b_s = tl.load(p_scores + n[:, None], mask=(n < count)[:, None] & m_m[None, :], other=float("-inf"))
        # [N, M], up to 2^10 so that small weights survive in float16
        b_p = tl.exp2(layout_barrier(b_s) + shift[None, :])
        if W == BLOCK_W:
            words = tl.load(packed + at[:, None] * W + o_w[None, :], eviction_policy=EVICT_FIRST)
        else:
            words = tl.load(packed + at[:, None] * W + o_w[None, :], mask=m_w[None, :], other=0)
        words = tl.trans(words)
        high = words >> 8
        # rows of zeros [16, N]: those of the groups, then ones, which sum the weights
        p_z = zero + at[:, None] * GROUPS + o_z[None, :]
        b_z = tl.load(p_z, mask=(o_z < GROUPS)[None, :], other=1.0, eviction_policy=EVICT_FIRST)
        b_z = tl.trans(b_z)
        new = ()
        if FP32_DOT:
            b_zero = tl.dot(b_z.to(tl.float32), b_p, b_zero, input_precision="ieee")
            for f in tl.static_range(FIELDS):
                group = tl.minimum((f * W + o_w) // GROUP, GROUPS - 1)
                b_c = tl.load(scale + at[None, :] * GROUPS + group[:, None]).to(tl.float32)
                b_v = ((words >> (B * f)) & MASK).to(tl.float32) * b_c
                new = new + (tl.dot(b_v, b_p, b_sums[f], input_precision="ieee"),)
        else:
            b_zero = tl.dot(b_z, b_p.to(tl.float16), b_zero)
            b_ps = tl.zeros([BLOCK_N, BLOCK_M], tl.float16)
            for f in tl.static_range(FIELDS):
                if (f * W) % GROUP == 0:
                    b_c = tl.load(scale + at * GROUPS + (f * W) // GROUP).to(tl.float32) * per_unit
                    b_ps = (b_p * b_c[:, None]).to(tl.float16)
                b_v = fields_as_fp16(words if f < LOW else high, MASK << (B * (f % LOW)))
                new = new + (tl.dot(b_v, b_ps, b_sums[f]),)
        b_sums = new

    total = tl.sum(tl.where((o_z == GROUPS)[:, None], b_zero, 0.0), 0)
    safe_total = tl.where(total > 0, total, 1.0)
    b_lse = tl.where(total > 0, safe + tl.log2(safe_total) - 10.0, float("-inf"))
    tl.store(part_lse + row, b_lse * lse_unit, mask=m_m)
    for f in tl.static_range(FIELDS):
        if FP32_DOT:
            b_out = b_sums[f]
        else:
            b_out = b_sums[f] * (unit * (16777216.0 / (1 << (B * (f % LOW)))))
        channel = f * W + o_w
        group = channel // GROUP
        for g in tl.static_range(GROUPS):
            b_g = tl.sum(tl.where((o_z == g)[:, None], b_zero, 0.0), 0)
            b_out += tl.where((group == g)[:, None], b_g[None, :], 0.0)
        m_out = m_w[:, None] & (channel < D)[:, None] & m_m[None, :]
        tl.store(part_out + row[None, :] * D + channel[:, None], b_out / safe_total[None, :], mask=m_out)


def value_sum(
    scores: SplitScores,
    codes: Any,
    lengths: Tensor | None,
    n_bits: int,
    head_dim: int,
    exact: bool,
) -> tuple[Tensor, Tensor]:
    """softmax(scores) V for values stored by `kvcli.methods.scalar.per_token`.

    Per field f of the packed words, sum_n p_n scale_n code_n is a product on tensor cores; the zeros and the sum of the
    weights are one more.

    Args:
        scores: of all rows and tokens.
        codes: packed uint8 [batch, num_kv_heads, length, words * 2], scale and zero float16 [.., groups].
        lengths: int32 [batch], or None.
        n_bits: bits a code.
        head_dim: channels.
        exact: multiply in float32.

    Returns:
        out float32 [batch, num_kv_heads, rows, head_dim] and lse float32 [batch, num_kv_heads, rows], natural.
    """
    batch, kv_heads, rows, _ = scores.values.shape
    words, scale, zero = codes.packed.view(torch.int16), codes.scale, codes.zero
    groups = scale.shape[-1]
    if groups > 15:
        raise unsupported_shape(f"{groups} groups of channels a head")
    exact = exact or head_dim // groups % words.shape[-1] != 0
    block_m = 16 if exact else 8
    blocks = cdiv(rows, block_m)
    device = scale.device
    part_out = torch.empty(batch * kv_heads, scores.num_splits, rows, head_dim, device=device)
    part_lse = torch.empty(batch * kv_heads, scores.num_splits, rows, device=device)
    _value_kernel[(scores.num_splits, batch * kv_heads, blocks)](
        scores.values,
        words,
        scale,
        zero,
        scores.values if lengths is None else lengths,
        scores.split_max,
        part_out,
        part_lse,
        scores.values.stride(1),
        scores.values.stride(2),
        *words.stride()[:2],
        *scale.stride()[:2],
        kv_heads,
        scores.length,
        scores.tokens_per_split,
        rows,
        math.log(2) if scores.num_splits == 1 else 1.0,
        B=n_bits,
        W=words.shape[-1],
        D=head_dim,
        GROUPS=groups,
        BLOCK_W=max(16, power_of_two(words.shape[-1])),
        BLOCK_M=block_m,
        BLOCK_N=_BLOCK_N,
        SCAN=_SCAN,
        FP32_DOT=exact,
        HAS_LENGTHS=lengths is not None,
        num_warps=4 if exact else _WARPS,
        num_stages=_STAGES,
        maxnreg=None if exact else _REGISTERS,
        **pdl_launch_options(),
    )
    if scores.num_splits == 1:
        return part_out, part_lse
    out = torch.empty(batch, kv_heads, rows, head_dim, device=device)
    lse = torch.empty(batch, kv_heads, rows, device=device)
    merge_splits(part_out, part_lse, out, lse)
    return out, lse
