"""Scores of keys that were quantized before RoPE.

Rotation mixes channels, so these keys are dequantized: in float16, two channels an instruction. They are rotated by the
product of two small tables: the position of a group of tokens goes into the query, the offset in the group is the same
for all groups (`TokenRotations.tiles`, `TokenRotations.offsets`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvcli.kernels.pdl import pdl_launch_dependents
from kvcli.kernels.words import EVICT_FIRST, fields_as_fp16, fma2, pow2_above


@triton.jit(do_not_specialize=["groups"])
def rotated_scores_kernel(
    query,
    packed,
    scale,
    zero,
    tile_cos,
    tile_sin,
    offset_cos,
    offset_sin,
    lengths,
    scores,
    tops,
    q_batch,
    q_head,
    q_time,
    p_batch,
    p_head,
    c_batch,
    c_head,
    c_time,
    t_batch,
    s_head,
    s_row,
    num_kv_heads,
    query_len,
    groups,
    per_program,
    scaling,
    HEADS: tl.constexpr,
    B: tl.constexpr,
    W: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_M: tl.constexpr,
    FP32_DOT: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
):
    """As the kernel of keys after RoPE, for groups of GROUP tokens whose first positions are in the tile tables."""
    pdl_launch_dependents()
    i_bh = tl.program_id(1).to(tl.int64)
    i_b = i_bh // num_kv_heads
    i_h = i_bh % num_kv_heads
    o_m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_w = tl.arange(0, BLOCK_W)
    o_n = tl.arange(0, GROUP)
    FIELDS: tl.constexpr = 16 // B
    LOW: tl.constexpr = FIELDS // 2
    HALF: tl.constexpr = D // 2
    MASK: tl.constexpr = (1 << B) - 1
    m_m = o_m < HEADS * query_len
    m_w = o_w < W
    head = i_h * HEADS + o_m // query_len
    p_query = query + i_b * q_batch + head * q_head + (o_m % query_len).to(tl.int64) * q_time
    packed += i_b * p_batch + i_h * p_head
    scale += i_b * c_batch + i_h * c_head
    zero += i_b * c_batch + i_h * c_head
    p_scores = scores + i_bh * s_head + o_m.to(tl.int64)[None, :] * s_row

    b_qs = ()
    b_cos = ()
    b_sin = ()
    b_top = tl.zeros([BLOCK_W, BLOCK_M], tl.float32)
    for f in tl.static_range(FIELDS):
        m_q = m_m[None, :] & m_w[:, None]
        b_q = tl.load(p_query[None, :] + (f * W + o_w)[:, None], mask=m_q, other=0.0).to(tl.float32)
        b_top = tl.maximum(b_top, tl.abs(b_q))
        b_qs = b_qs + (b_q,)
        if f < LOW:
            # rotation by the offset in a tile, [N, W]
            at = o_n[:, None] * HALF + (f * W + o_w)[None, :]
            b_c = tl.load(offset_cos + at, mask=m_w[None, :], other=0.0)
            b_s = tl.load(offset_sin + at, mask=m_w[None, :], other=0.0)
            if not FP32_DOT:
                b_c, b_s = b_c.to(tl.float16), b_s.to(tl.float16)
            b_cos = b_cos + (b_c,)
            b_sin = b_sin + (b_s,)
    unit = pow2_above(tl.maximum(tl.max(b_top, 0), 1e-30))
    if FP32_DOT:
        unit = tl.full([BLOCK_M], 1.0, tl.float32)
    back = unit * scaling

    if HAS_LENGTHS:
        groups = tl.load(lengths + i_b) // GROUP
    first = tl.program_id(0).to(tl.int64) * per_program
    count = tl.minimum(groups - tl.program_id(0) * per_program, per_program)
    packed += first * GROUP * W
    scale += first * c_time
    zero += first * c_time
    tile_cos += i_b * t_batch + first * HALF
    tile_sin += i_b * t_batch + first * HALF
    p_scores += first * GROUP
    b_best = tl.full([GROUP, BLOCK_M], float("-inf"), tl.float32)
    for g in range(0, count):
        n = g * GROUP + o_n
        words = tl.load(packed + n[:, None] * W + o_w[None, :], mask=m_w[None, :], other=0, eviction_policy=EVICT_FIRST)
        high = words >> 8
        # [N, M]
        b_scores = tl.zeros([GROUP, BLOCK_M], tl.float32)
        for f in tl.static_range(LOW):
            # the pair (x, y) of channels f W + w and D/2 + f W + w lies in fields f and f + LOW
            b_tc = tl.load(tile_cos + f * W + o_w, mask=m_w, other=0.0)
            b_ts = tl.load(tile_sin + f * W + o_w, mask=m_w, other=0.0)
            b_x = b_qs[f] / unit[None, :]
            b_y = b_qs[f + LOW] / unit[None, :]
            b_qx = b_x * b_tc[:, None] + b_y * b_ts[:, None]
            b_qy = b_y * b_tc[:, None] - b_x * b_ts[:, None]
            low_at = f * W + o_w
            b_cx = tl.load(scale + low_at, mask=m_w, other=0.0, eviction_policy=EVICT_FIRST)
            b_cy = tl.load(scale + low_at + HALF, mask=m_w, other=0.0, eviction_policy=EVICT_FIRST)
            b_zx = tl.load(zero + low_at, mask=m_w, other=0.0, eviction_policy=EVICT_FIRST)
            b_zy = tl.load(zero + low_at + HALF, mask=m_w, other=0.0, eviction_policy=EVICT_FIRST)
            if FP32_DOT:
                b_kx = ((words >> (B * f)) & MASK).to(tl.float32) * b_cx.to(tl.float32)[None, :]
                b_ky = ((words >> (B * (f + LOW))) & MASK).to(tl.float32) * b_cy.to(tl.float32)[None, :]
                b_kx += b_zx.to(tl.float32)[None, :]
                b_ky += b_zy.to(tl.float32)[None, :]
                b_rx = b_kx * b_cos[f] - b_ky * b_sin[f]
                b_ry = b_ky * b_cos[f] + b_kx * b_sin[f]
                b_scores = tl.dot(b_rx, b_qx, b_scores, input_precision="ieee")
                b_scores = tl.dot(b_ry, b_qy, b_scores, input_precision="ieee")
            else:
                # subnormal codes times 2^14 are normal numbers; the rest of the power goes into the scale
                lift = tl.full([GROUP, BLOCK_W], 16384.0, tl.float16)
                none = tl.zeros([GROUP, BLOCK_W], tl.float16)
                b_kx = fma2(fields_as_fp16(words, MASK << (B * f)), lift, none)
                b_ky = fma2(fields_as_fp16(high, MASK << (B * f)), lift, none)
                wide_cx = tl.broadcast_to(
                    (b_cx.to(tl.float32) * (1024.0 / (1 << (B * f)))).to(tl.float16)[None, :], [GROUP, BLOCK_W]
                )
                wide_cy = tl.broadcast_to(
                    (b_cy.to(tl.float32) * (1024.0 / (1 << (B * f)))).to(tl.float16)[None, :], [GROUP, BLOCK_W]
                )
                b_kx = fma2(b_kx, wide_cx, tl.broadcast_to(b_zx[None, :], [GROUP, BLOCK_W]))
                b_ky = fma2(b_ky, wide_cy, tl.broadcast_to(b_zy[None, :], [GROUP, BLOCK_W]))
                b_rx = fma2(b_kx, b_cos[f], fma2(b_ky, -b_sin[f], none))
                b_ry = fma2(b_ky, b_cos[f], fma2(b_kx, b_sin[f], none))
                b_scores = tl.dot(b_rx, b_qx.to(tl.float16), b_scores)
                b_scores = tl.dot(b_ry, b_qy.to(tl.float16), b_scores)
        b_scores = b_scores * back[None, :]
        b_best = tl.maximum(b_best, b_scores)
        tl.store(p_scores + n[:, None], b_scores, mask=m_m[None, :])
        scale += c_time
        zero += c_time
        tile_cos += HALF
        tile_sin += HALF
    rows = HEADS * query_len
    row = (i_bh * tl.num_programs(0) + tl.program_id(0)) * rows + o_m
    tl.store(tops + row, tl.max(b_best, 0), mask=m_m)
