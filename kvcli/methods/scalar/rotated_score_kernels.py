"""Scores of keys that were quantized before RoPE.

Rotation mixes channels, so these keys are dequantized: in float16, two channels per instruction. They are rotated by
the product of two small tables: the position of a group of tokens goes into the query, the offset in the group is the
same for all groups (`TokenRotations.tiles`, `TokenRotations.offsets`).

float16 keys are divided by a power of two, the unit of a program: 2 for scales below 128, so that a rotation cannot
overflow, and more for larger scales, which are multiplied by up to 2^10 on the way.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvcli.kernels.pages import origin, tile_start, token_offsets
from kvcli.kernels.pdl import pdl_begin
from kvcli.kernels.splits import batch_and_head, query_rows, split_range, split_size, without_first
from kvcli.kernels.words import EVICT_FIRST, TINY, field_fp16, field_fp32, fma2, pow2_above, query_fields

SCAN_GROUPS = tl.constexpr(4)
"""Groups of which the scales are read at a time for their maximum."""


@triton.jit(do_not_specialize=["groups", "table_row"])
def rotated_scores_kernel(
    query, packed, scale, zero, tile_cos, tile_sin, offset_cos, offset_sin, lengths, scores, split_max,
    q_batch, q_head, q_time, p_batch, p_head, c_batch, c_head, c_time, t_batch, s_head, s_row,
    num_kv_heads, query_len, groups, groups_per_split, scaling, table, table_row,
    HEADS: tl.constexpr, B: tl.constexpr, W: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr,
    SKIP: tl.constexpr, SPLIT: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_M: tl.constexpr, FP32_DOT: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    """scores[m, n] = scaling <q_m, RoPE(k_n)> for k_nc = code_nc scale_gc + zero_gc, tokens n of group g.

    RoPE(k_n) = R_tile R_offset k_n, so the score is <R_tile^T q_m, R_offset k_n>. Grid and arguments are those of
    `attend_kernels._scores_kernel`, one group at a time, with W * 16 = D * B and W a divisor of D / 2; and tile_cos,
    tile_sin float32 [batch or 1, groups, D / 2], of each group's first position, offset_cos, offset_sin float32 [GROUP,
    D / 2], of positions in a group. Tuned on one H200, torch 2.11, triton 3.6.
    """
    pdl_begin()
    i_bh, i_b, i_h = batch_and_head(1, num_kv_heads)
    o_m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_w = tl.arange(0, BLOCK_W)
    o_n = tl.arange(0, GROUP)
    LOW: tl.constexpr = 8 // B
    HALF: tl.constexpr = D // 2
    PAGE_GROUPS: tl.constexpr = PAGE // GROUP
    m_m = o_m < HEADS * query_len
    m_w = o_w < W
    p_query = query_rows(query, i_b, i_h, o_m, q_batch, q_head, q_time, query_len, HEADS)
    if PAGE > 0:
        table += i_b * table_row
    i_row, _, _ = origin(i_b, i_b, PAGE)
    packed += i_row * p_batch + i_h * p_head
    scale += i_row * c_batch + i_h * c_head
    zero += i_row * c_batch + i_h * c_head
    p_scores = scores + i_bh * s_head + o_m.to(tl.int64)[None, :] * s_row

    # [W, M] per field
    b_qs, unit = query_fields(p_query, m_m, o_w, W, 1, W, D, B, FP32_DOT)
    b_cos = ()
    b_sin = ()
    for f in tl.static_range(LOW):
        # rotation by the offset in a group, [N, W]
        at = o_n[:, None] * HALF + (f * W + o_w)[None, :]
        b_c = tl.load(offset_cos + at, mask=m_w[None, :], other=0.0)
        b_s = tl.load(offset_sin + at, mask=m_w[None, :], other=0.0)
        if not FP32_DOT:
            b_c, b_s = b_c.to(tl.float16), b_s.to(tl.float16)
        b_cos = b_cos + (b_c,)
        b_sin = b_sin + (b_s,)

    if HAS_LENGTHS:
        groups = tl.load(lengths + i_b) // GROUP
    groups_per_split = split_size(groups, groups_per_split, SPLIT // GROUP)
    first, count = split_range(groups, groups_per_split)
    _, group, begin = origin(i_b, first, PAGE)
    packed += group * GROUP * W
    scale += group * c_time
    zero += group * c_time
    tile_cos += i_b * t_batch + first * HALF
    tile_sin += i_b * t_batch + first * HALF
    p_scores += first * GROUP
    dot_factor = unit * scaling
    if not FP32_DOT:
        BLOCK_D: tl.constexpr = BLOCK_W * (16 // B)
        o_d = tl.minimum(tl.arange(0, BLOCK_D), D - 1) if BLOCK_D > D else tl.arange(0, BLOCK_D)
        b_top = tl.zeros([SCAN_GROUPS, BLOCK_D], tl.float16)
        for start in range(0, count, SCAN_GROUPS):
            o_g = tl.minimum(start + tl.arange(0, SCAN_GROUPS), count - 1)
            at_group = token_offsets(table, begin, o_g[:, None], begin + count, c_batch, c_time, PAGE_GROUPS)
            b_top = tl.maximum(b_top, tl.load(scale + at_group + o_d[None, :]))
        key_unit = tl.maximum(pow2_above(tl.maximum(tl.max(tl.max(b_top, 1).to(tl.float32), 0), TINY)) / 64.0, 2.0)
        per_unit = 1.0 / key_unit
        dot_factor = dot_factor * key_unit
    b_max = tl.full([GROUP, BLOCK_M], float("-inf"), tl.float32)
    for g in range(0, count):
        n = g * GROUP + o_n
        p_scale, p_zero = scale, zero
        if PAGE == 0:
            p_words = packed + n[:, None] * W
        else:
            p_words = tile_start(packed, table, (begin + g) * GROUP, o_n, 0, p_batch, W, PAGE, GROUP, GROUP)
            p_words = p_words + o_n[:, None] * W
            p_scale = tile_start(scale, table, begin + g, 0, 0, c_batch, c_time, PAGE_GROUPS, 1, 1)
            p_zero = tile_start(zero, table, begin + g, 0, 0, c_batch, c_time, PAGE_GROUPS, 1, 1)
        words = tl.load(p_words + o_w[None, :], mask=m_w[None, :], other=0, eviction_policy=EVICT_FIRST)
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
            at_x = f * W + o_w
            b_cx = tl.load(p_scale + at_x, mask=m_w, other=0.0, eviction_policy=EVICT_FIRST)
            b_cy = tl.load(p_scale + at_x + HALF, mask=m_w, other=0.0, eviction_policy=EVICT_FIRST)
            b_zx = tl.load(p_zero + at_x, mask=m_w, other=0.0, eviction_policy=EVICT_FIRST)
            b_zy = tl.load(p_zero + at_x + HALF, mask=m_w, other=0.0, eviction_policy=EVICT_FIRST)
            if FP32_DOT:
                b_kx = field_fp32(words, f, B) * b_cx.to(tl.float32)[None, :]
                b_ky = field_fp32(words, f + LOW, B) * b_cy.to(tl.float32)[None, :]
                b_kx += b_zx.to(tl.float32)[None, :]
                b_ky += b_zy.to(tl.float32)[None, :]
                b_rx = b_kx * b_cos[f] - b_ky * b_sin[f]
                b_ry = b_ky * b_cos[f] + b_kx * b_sin[f]
                b_scores = tl.dot(b_rx, b_qx, b_scores, input_precision="ieee")
                b_scores = tl.dot(b_ry, b_qy, b_scores, input_precision="ieee")
            else:
                # subnormal codes times 2^14 are normal numbers; the other 2^10 of FIELD_SCALE goes into the scale
                lift = (per_unit * (1024.0 / (1 << (B * f)))).to(tl.float16)
                pow2_14 = tl.full([GROUP, BLOCK_W], 16384.0, tl.float16)
                zeros = tl.zeros([GROUP, BLOCK_W], tl.float16)
                b_kx = fma2(field_fp16(words, f, B), pow2_14, zeros)
                b_ky = fma2(field_fp16(words, f + LOW, B), pow2_14, zeros)
                b_zx, b_zy = b_zx * per_unit.to(tl.float16), b_zy * per_unit.to(tl.float16)
                b_cx = tl.broadcast_to((b_cx * lift)[None, :], [GROUP, BLOCK_W])
                b_cy = tl.broadcast_to((b_cy * lift)[None, :], [GROUP, BLOCK_W])
                b_kx = fma2(b_kx, b_cx, tl.broadcast_to(b_zx[None, :], [GROUP, BLOCK_W]))
                b_ky = fma2(b_ky, b_cy, tl.broadcast_to(b_zy[None, :], [GROUP, BLOCK_W]))
                b_rx = fma2(b_kx, b_cos[f], fma2(b_ky, -b_sin[f], zeros))
                b_ry = fma2(b_ky, b_cos[f], fma2(b_kx, b_sin[f], zeros))
                b_scores = tl.dot(b_rx, b_qx.to(tl.float16), b_scores)
                b_scores = tl.dot(b_ry, b_qy.to(tl.float16), b_scores)
        b_scores = without_first(b_scores * dot_factor[None, :], first * GROUP + n, SKIP)
        b_max = tl.maximum(b_max, b_scores)
        tl.store(p_scores + n[:, None], b_scores, mask=m_m[None, :])
        if PAGE == 0:
            scale += c_time
            zero += c_time
        tile_cos += HALF
        tile_sin += HALF
    rows = HEADS * query_len
    row = (i_bh * tl.num_programs(0) + tl.program_id(0)) * rows + o_m
    tl.store(split_max + row, tl.max(b_max, 0), mask=m_m)
