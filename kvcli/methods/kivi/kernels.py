"""Attention over KIVI's codes, and SQuat's: keys per channel, before or after RoPE, values per token.

Scores: a group of tokens shares a scale and a zero a channel, so sum_c q_c (code_c scale_c + zero_c) is a product of
the codes with q_c scale_c, plus one number a group and query. No key is dequantized. Keys stored before RoPE are,
because rotation mixes channels: in float16, two channels an instruction, by the product of two small tables (a tile's
first position goes into the query, the offset in the tile is the same for all tiles).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.launch import refuse
from kvcli.kernels.values import LOG2E, Scores, value_sum
from kvcli.kernels.words import fma2, masked, power_above
from kvcli.methods.base import EncodedPart, LayerCodec, PartialAttention
from kvcli.methods.kivi.codec import PerChannelKey
from kvcli.methods.pertoken import PerTokenCodec

_WARPS = 1
_STAGES = 1
_REGISTERS: int | None = 128
_ROTATED_STAGES = 3
_ROTATED_REGISTERS: int | None = None


@triton.jit(do_not_specialize=["groups"])
def _scores_kernel(
    query,
    packed,
    scale,
    zero,
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
    BLOCK_N: tl.constexpr,
    PACK: tl.constexpr,
    EXACT: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
):
    i_bh = tl.program_id(1).to(tl.int64)
    i_b = i_bh // num_kv_heads
    i_h = i_bh % num_kv_heads
    # the columns of a product are PACK groups of tokens times the rows of queries: only some are of use to a token, but
    # tensor cores work on eight at once anyway
    o_c = tl.arange(0, BLOCK_M * PACK)
    o_m = tl.program_id(2) * BLOCK_M + o_c % BLOCK_M
    o_w = tl.arange(0, BLOCK_W)
    o_r = tl.arange(0, BLOCK_N * PACK)
    FIELDS: tl.constexpr = 16 // B
    LOW: tl.constexpr = FIELDS // 2
    MASK: tl.constexpr = (1 << B) - 1
    WHOLE: tl.constexpr = W == BLOCK_W and W * FIELDS == D
    m_m = o_m < HEADS * query_len
    m_w = o_w < W
    head = i_h * HEADS + o_m // query_len
    p_query = query + i_b * q_batch + head * q_head + (o_m % query_len).to(tl.int64) * q_time
    if HAS_LENGTHS:
        groups = tl.load(lengths + i_b) // GROUP
    first = tl.program_id(0).to(tl.int64) * per_program
    count = tl.minimum(groups - tl.program_id(0) * per_program, per_program)
    packed += i_b * p_batch + i_h * p_head + first * GROUP * W
    scale += i_b * c_batch + i_h * c_head + first * c_time
    zero += i_b * c_batch + i_h * c_head + first * c_time
    p_scores = scores + i_bh * s_head + o_m.to(tl.int64)[None, :] * s_row + first * GROUP

    # the query by fields of a word, [W, C] each, its largest entry near 1
    b_qs = ()
    b_top = tl.zeros([BLOCK_W, BLOCK_M * PACK], tl.float32)
    for f in tl.static_range(FIELDS):
        m_q = m_m[None, :] & (m_w & (f * W + o_w < D))[:, None]
        b_q = tl.load(p_query[None, :] + (f * W + o_w)[:, None], mask=m_q, other=0.0).to(tl.float32)
        b_top = tl.maximum(b_top, tl.abs(b_q))
        b_qs = b_qs + (b_q,)
    unit = power_above(tl.maximum(tl.max(b_top, 0), 1e-30))
    if EXACT:
        unit = tl.full([BLOCK_M * PACK], 1.0, tl.float32)
    b_units = ()
    for f in tl.static_range(FIELDS):
        # codes are masked, not shifted: field f of a byte reads 2^(B f) times too large
        b_units = b_units + (b_qs[f] / (unit * (1 << (B * (f % LOW))))[None, :],)
    back = unit * scaling

    lifted = back if EXACT else back * 16777216.0
    own = (o_r // BLOCK_N)[:, None] == (o_c // BLOCK_M)[None, :]
    b_own = tl.where(own, 0.0, float("-inf"))
    b_best = tl.full([BLOCK_N * PACK, BLOCK_M * PACK], float("-inf"), tl.float32)
    for g in range(0, count, PACK):
        of_column = tl.minimum(g + o_c // BLOCK_M, count - 1) * c_time
        b_zero = tl.zeros([BLOCK_W, BLOCK_M * PACK], tl.float32)
        b_scaled = ()
        for f in tl.static_range(FIELDS):
            at = of_column[None, :] + (f * W + o_w)[:, None]
            if WHOLE:
                b_c = tl.load(scale + at)
                b_z = tl.load(zero + at).to(tl.float32)
            else:
                m_c = (m_w & (f * W + o_w < D))[:, None]
                b_c = tl.load(scale + at, mask=m_c, other=0.0)
                b_z = tl.load(zero + at, mask=m_c, other=0.0).to(tl.float32)
            b_zero += b_units[f] * (b_z * (1 << (B * (f % LOW))))
            b_c = b_units[f] * b_c.to(tl.float32)
            b_scaled = b_scaled + (b_c if EXACT else b_c.to(tl.float16),)
        zeros = tl.sum(b_zero, 0) * back
        for part in tl.static_range(GROUP // BLOCK_N):
            of_row = tl.minimum(g + o_r // BLOCK_N, count - 1)
            n = of_row * GROUP + part * BLOCK_N + o_r % BLOCK_N
            if WHOLE:
                words = tl.load(packed + n[:, None] * W + o_w[None, :])
            else:
                words = tl.load(packed + n[:, None] * W + o_w[None, :], mask=m_w[None, :], other=0)
            high = words >> 8
            # [N, C]
            b_s = tl.zeros([BLOCK_N * PACK, BLOCK_M * PACK], tl.float32)
            for f in tl.static_range(FIELDS):
                if EXACT:
                    b_k = ((words >> (B * f)) & MASK).to(tl.float32) * (1 << (B * (f % LOW)))
                    b_s = tl.dot(b_k, b_scaled[f], b_s, input_precision="ieee")
                else:
                    b_k = masked(words if f < LOW else high, MASK << (B * (f % LOW)))
                    b_s = tl.dot(b_k, b_scaled[f], b_s)
            b_s = b_s * lifted[None, :] + zeros[None, :]
            b_best = tl.maximum(b_best, b_s + b_own)
            m_s = own & (g + o_r // BLOCK_N < count)[:, None] & m_m[None, :]
            tl.store(p_scores + n[:, None], b_s, mask=m_s)
    top = tl.max(tl.reshape(tl.max(b_best, 0), [PACK, BLOCK_M]), 0)
    o_m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = HEADS * query_len
    tl.store(tops + (i_bh * tl.num_programs(0) + tl.program_id(0)) * rows + o_m, top, mask=o_m < rows)


@triton.jit(do_not_specialize=["groups"])
def _rotated_scores_kernel(
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
    EXACT: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
):
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
            if not EXACT:
                b_c, b_s = b_c.to(tl.float16), b_s.to(tl.float16)
            b_cos = b_cos + (b_c,)
            b_sin = b_sin + (b_s,)
    unit = power_above(tl.maximum(tl.max(b_top, 0), 1e-30))
    if EXACT:
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
        words = tl.load(packed + n[:, None] * W + o_w[None, :], mask=m_w[None, :], other=0)
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
            b_cx = tl.load(scale + low_at, mask=m_w, other=0.0)
            b_cy = tl.load(scale + low_at + HALF, mask=m_w, other=0.0)
            b_zx = tl.load(zero + low_at, mask=m_w, other=0.0)
            b_zy = tl.load(zero + low_at + HALF, mask=m_w, other=0.0)
            if EXACT:
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
                b_kx = fma2(masked(words, MASK << (B * f)), lift, none)
                b_ky = fma2(masked(high, MASK << (B * f)), lift, none)
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


def fused_attend(codec: LayerCodec, query: Tensor, part: EncodedPart, scaling: float) -> PartialAttention:
    """Attention over codes of `PerChannelKey` and `PerTokenCodec`; see `kvcli.methods.base.PartialAttend`.

    Raises:
        UsageError: a shape the kernels do not support.
    """
    key, value = codec.key, codec.value
    assert isinstance(key, PerChannelKey)
    assert isinstance(value, PerTokenCodec)
    exact = query.dtype == torch.float32
    scores = _scores(key, query, part, scaling, exact)
    out, lse = value_sum(scores, part.value_codes, part.lengths, value.n_bits, value.spec.head_dim, exact)
    return out.view(query.shape), lse.view(query.shape[:3])


def _scores(key: PerChannelKey, query: Tensor, part: EncodedPart, scaling: float, exact: bool) -> Scores:
    """Scores of all rows and tokens."""
    spec, codes = key.spec, part.key_codes
    group, head_dim = key.tokens_per_group, spec.head_dim
    batch, heads, query_len, _ = query.shape
    heads_per_kv = heads // spec.num_kv_heads
    rows = heads_per_kv * query_len
    words = codes.packed.view(torch.int16)
    if group < 16 or group & (group - 1):
        raise refuse(f"groups of {group} tokens; they must be a power of two, 16 or more")
    columns = 16 if exact else 8
    pack = max(1, columns // triton.next_power_of_2(rows)) if part.rotations is None else 1
    block_m = columns // pack
    blocks = triton.cdiv(rows, block_m)
    scores = Scores(batch, spec.num_kv_heads, rows, part.length, 2 * group, blocks, query.device)
    grid = (scores.parts, batch * spec.num_kv_heads, blocks)
    query = query if query.stride(-1) == 1 else query.contiguous()
    shapes = {
        "HEADS": heads_per_kv,
        "B": key.n_bits,
        "W": words.shape[-1],
        "D": head_dim,
        "GROUP": group,
        "BLOCK_W": max(16, triton.next_power_of_2(words.shape[-1])),
        "BLOCK_M": block_m,
        "EXACT": exact,
        "HAS_LENGTHS": part.lengths is not None,
        "num_warps": 4 if exact else _WARPS,
        "num_stages": _STAGES if part.rotations is None else _ROTATED_STAGES,
        "maxnreg": None if exact else _REGISTERS if part.rotations is None else _ROTATED_REGISTERS,
    }
    strides = (*query.stride()[:3], *words.stride()[:2], *codes.scale.stride()[:3])
    sizes = (spec.num_kv_heads, query_len, part.length // group, scores.span // group, scaling * LOG2E)
    written = (scores.values if part.lengths is None else part.lengths, scores.values, scores.tops)
    if part.rotations is None:
        _scores_kernel[grid](
            query,
            words,
            codes.scale,
            codes.zero,
            *written,
            *strides,
            scores.values.stride(1),
            scores.values.stride(2),
            *sizes,
            BLOCK_N=min(group, 32),
            PACK=pack,
            **shapes,
        )
        return scores
    if spec.rope.rotary_dim != head_dim or words.shape[-1] * 16 != head_dim * key.n_bits:
        raise refuse("keys before RoPE that are rotated in part of their channels")
    if head_dim // 2 % words.shape[-1]:
        raise refuse(f"keys before RoPE of head_dim {head_dim} at {key.n_bits} bits")
    tiles, offsets = part.rotations.tiles(group), part.rotations.offsets(group)
    _rotated_scores_kernel[grid](
        query,
        words,
        codes.scale,
        codes.zero,
        tiles.cos,
        tiles.sin,
        offsets.cos,
        offsets.sin,
        *written,
        *strides,
        tiles.cos.stride(0) if tiles.cos.shape[0] > 1 else 0,
        scores.values.stride(1),
        scores.values.stride(2),
        *sizes,
        **shapes,
    )
    return scores
