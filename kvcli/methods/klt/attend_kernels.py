"""Attention over KLT's codes: one pass over the tokens of a split, and a merge of the splits.

A score is <q, R x> with R the rotation of the tile's first position and x = B y, so queries are transformed once per
tile, and kernels multiply them with codes; weighted sums of codes are transformed once per query.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.launch import cdiv, power_of_two, tokens_per_split
from kvcli.kernels.offset import offset_scores
from kvcli.kernels.splits import LOG2E, batch_and_head, merge_splits
from kvcli.kernels.words import FIELD_SCALE, TINY, pow2_above
from kvcli.methods.base import without_autocast
from kvcli.methods.klt.codec import KLTKey, KLTValue
from kvcli.methods.klt.fields import BANDS
from kvcli.methods.klt.kernels import band_bytes, band_codes, gains
from kvcli.methods.layer_codec import EncodedTokens, LayerCodec, PartialAttention
from kvcli.rope import ROPE_TILE, TokenRotations

# tuned on one H100, torch 2.11, triton 3.6
_BLOCK_N = 64
_BLOCK_R = 32
_BLOCK_K = 64
_PROGRAMS_PER_SM = 16
_WARPS = 1
_WARPS_FP32 = 4
_STAGES = 1

_BANDS = tl.constexpr(BANDS)


@triton.jit
def _band_operand(p_token, m_n, p_field, o_w, m_w, W: tl.constexpr, FP32_DOT: tl.constexpr):
    """A band as an operand: codes in float32, or c * 2^bit / FIELD_SCALE in float16, masked bytes read as such."""
    if FP32_DOT:
        b_c = band_codes(p_token, m_n, p_field, o_w, m_w, W).to(tl.float32)
    else:
        mask = (tl.load(p_field + 2) << tl.load(p_field + 1)).to(tl.int16)
        b_c = (band_bytes(p_token, m_n, p_field, o_w, m_w, W).to(tl.int16) & mask).to(tl.float16, bitcast=True)
    return b_c


@triton.jit(do_not_specialize=["num_tiles"])
def _tile_queries_kernel(
    query, basis, bits, levels, tile_cos, tile_sin, out, numbers, t_batch, num_kv_heads, rows, num_tiles, scaling,
    D: tl.constexpr, ROTARY: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    FP32_DOT: tl.constexpr,
):  # fmt: skip
    """out = B^T R^T q of each tile and query row, times scaling, as the other operand of `_band_operand`.

    Grid (ceil(num_tiles * rows / BLOCK_R), batch * num_kv_heads).

    Args:
        query: float [batch, num_kv_heads, rows, D], contiguous, after RoPE.
        basis: float32 [num_kv_heads, D, D], B.
        bits, levels: int32 [num_kv_heads, D], where codes begin in their bytes, and 2^b - 1.
        tile_cos, tile_sin: float32 [batch or 1, num_tiles, ROTARY / 2], of the first position, stride t_batch.
        out: [batch, num_kv_heads, num_tiles, rows, D], float32 if FP32_DOT, else float16 in units; written.
        numbers: float32 [batch, num_kv_heads, num_tiles, rows, 2], written: the factor of products, and the product
            with (2^b - 1) / 2.
    """
    i_bh, i_b, i_h = batch_and_head(1, num_kv_heads)
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    m_r, tile, row = r < num_tiles * rows, r // rows, r % rows
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    HALF: tl.constexpr = ROTARY // 2
    p_row = query + (i_bh * rows + row)[:, None] * D
    mask = m_r[:, None] & m_d[None, :]
    b_q = tl.load(p_row + o_d[None, :], mask=mask, other=0.0).to(tl.float32)
    rotated, second = o_d < ROTARY, o_d >= HALF
    partner = tl.where(second, o_d - HALF, o_d + HALF)
    b_partner = tl.load(p_row + partner[None, :], mask=mask & rotated[None, :], other=0.0).to(tl.float32)
    p_angle = i_b * t_batch + tile[:, None] * HALF + (o_d % HALF)[None, :]
    b_cos = tl.load(tile_cos + p_angle, mask=m_r[:, None] & rotated[None, :], other=1.0)
    b_sin = tl.load(tile_sin + p_angle, mask=m_r[:, None] & rotated[None, :], other=0.0)
    b_q = (b_q * b_cos + tl.where(second[None, :], -b_partner, b_partner) * b_sin) * scaling
    basis += i_h * (D * D)
    bits += i_h * D
    levels += i_h * D
    at = (i_bh * num_tiles * rows + r).to(tl.int64)
    b_zero = tl.zeros([BLOCK_R], tl.float32)
    b_top = tl.zeros([BLOCK_R], tl.float32)
    for start in tl.static_range(0, D, BLOCK_K):
        o_k = start + tl.arange(0, BLOCK_K)
        b_out, b_levels = _transformed(b_q, basis, levels, o_d, o_k, D)
        b_zero += tl.sum(b_out * b_levels[None, :], 1) * 0.5
        b_bits = tl.load(bits + o_k, mask=o_k < D, other=0).to(tl.float32)
        b_top = tl.maximum(b_top, tl.max(tl.abs(b_out * tl.exp2(-b_bits)[None, :]), 1))
    unit = pow2_above(tl.maximum(b_top, TINY))
    for start in tl.static_range(0, D, BLOCK_K):
        o_k = start + tl.arange(0, BLOCK_K)
        b_out, b_levels = _transformed(b_q, basis, levels, o_d, o_k, D)
        if not FP32_DOT:
            b_bits = tl.load(bits + o_k, mask=o_k < D, other=0).to(tl.float32)
            b_out = b_out * tl.exp2(-b_bits)[None, :] / unit[:, None]
        mask = m_r[:, None] & (o_k < D)[None, :]
        tl.store(out + at[:, None] * D + o_k[None, :], b_out.to(out.dtype.element_ty), mask=mask)
    factor = tl.full([BLOCK_R], 1.0, tl.float32) if FP32_DOT else unit * FIELD_SCALE
    tl.store(numbers + at * 2, factor, mask=m_r)
    tl.store(numbers + at * 2 + 1, b_zero, mask=m_r)


@triton.jit
def _transformed(b_q, basis, levels, o_d, o_k, D: tl.constexpr):
    """Products of b_q [R, BLOCK_D] with columns o_k of the basis, 0 where there is no code, and 2^b - 1 of each."""
    p_basis = basis + o_d[:, None] * D + o_k[None, :]
    b_basis = tl.load(p_basis, mask=(o_d < D)[:, None] & (o_k < D)[None, :], other=0.0)
    b_levels = tl.load(levels + o_k, mask=o_k < D, other=0).to(tl.float32)
    b_out = tl.dot(b_q, b_basis, input_precision="tf32x3")  # has the precision of float32
    return tl.where((b_levels > 0)[None, :], b_out, 0.0), b_levels


@triton.jit(do_not_specialize=["length", "num_tiles", "blocks_per_split"])
def _attend_kernel(
    query, numbers, positions, lengths, offsets, k_packed, k_gain, k_fields, v_packed, v_gain, v_fields,
    split_out, split_lse,
    t_batch, kp_batch, kp_time, kg_batch, kg_head, kg_time, vp_batch, vp_time, vg_batch, vg_head, vg_time,
    o_head, o_row, num_kv_heads, rows, length, num_tiles, blocks_per_split, lse_unit,
    W: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, FP32_DOT: tl.constexpr, HAS_OFFSET: tl.constexpr, HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    """out = sum_n 2^s_n y_n / sum_n 2^s_n, s_n = <q_tile(n), y_n> + offset_n, over a split of the tokens of a kv head.

    Grid (num_splits, batch * num_kv_heads, ceil(rows / BLOCK_M)). A split is blocks_per_split blocks of BLOCK_N tokens
    whose positions begin at a multiple of BLOCK_N, so that none crosses a tile.

    Args:
        query, numbers: as `_tile_queries_kernel` wrote them; its scaling includes log2(e).
        positions: int [batch or 1, >= 1], stride t_batch, of the first token.
        lengths: int32 [batch], tokens of each sequence, if HAS_LENGTHS.
        offsets: float32 [batch, num_kv_heads, rows, >= length], added to scores, strides o_*, if HAS_OFFSET.
        k_packed, v_packed: uint8 [batch, 1, length, bytes]; k_gain, v_gain: uint8 [batch, num_kv_heads, length, 1].
        k_fields, v_fields: int32 [num_kv_heads, BANDS, 3], byte, bit and 2^b - 1 of each band, 0 without code.
        split_out, split_lse: float32 [batch * num_kv_heads, num_splits, rows, D] and [..., rows], written.
    """
    i_bh, i_b, i_h = batch_and_head(1, num_kv_heads)
    o_m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_w, o_n = tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_N)
    m_m, m_w = o_m < rows, o_w < W
    dtype: tl.constexpr = tl.float32 if FP32_DOT else tl.float16
    scale: tl.constexpr = 1.0 if FP32_DOT else FIELD_SCALE
    if HAS_LENGTHS:
        length = tl.load(lengths + i_b)
    start = tl.load(positions + i_b * t_batch).to(tl.int32)
    before = start % BLOCK_N  # positions of the first block that come before the first token
    k_packed += i_b * kp_batch
    v_packed += i_b * vp_batch
    k_gain += i_b * kg_batch + i_h * kg_head
    v_gain += i_b * vg_batch + i_h * vg_head
    k_fields += i_h * (_BANDS * 3)
    v_fields += i_h * (_BANDS * 3)
    first_block = tl.program_id(0) * blocks_per_split
    last_block = tl.minimum(first_block + blocks_per_split, tl.cdiv(length + before, BLOCK_N))
    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_gained = tl.zeros([BLOCK_M], tl.float32)
    b_accs = ()
    for f in tl.static_range(_BANDS):
        b_accs = b_accs + (tl.zeros([BLOCK_W, BLOCK_M], tl.float32),)
    for block in range(first_block, last_block):
        n = block * BLOCK_N - before + o_n
        m_n = (n >= 0) & (n < length)
        at = tl.maximum(n, 0).to(tl.int64)
        tile = (start + block * BLOCK_N - before) // TILE - start // TILE
        at_query = (i_bh * num_tiles + tile) * rows + o_m
        b_s = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for f in tl.static_range(_BANDS):
            p_query = query + at_query[None, :] * D + (f * W + o_w)[:, None]
            b_q = tl.load(p_query, mask=m_w[:, None] & m_m[None, :], other=0.0)
            b_c = _band_operand(k_packed + at * kp_time, m_n, k_fields + 3 * f, o_w, m_w, W, FP32_DOT)
            b_s = tl.dot(b_c, b_q, b_s, input_precision="ieee")
        b_factor = tl.load(numbers + at_query * 2, mask=m_m, other=0.0)
        b_zero = tl.load(numbers + at_query * 2 + 1, mask=m_m, other=0.0)
        b_s = (b_s * b_factor[None, :] - b_zero[None, :]) * gains(k_gain + at * kg_time, m_n)[:, None]
        if HAS_OFFSET:
            p_offset = offsets + i_bh * o_head + o_m.to(tl.int64)[None, :] * o_row + at[:, None]
            b_s += tl.load(p_offset, mask=m_n[:, None] & m_m[None, :], other=0.0)
        b_s = tl.where(m_n[:, None], b_s, float("-inf"))
        highest = tl.maximum(b_max, tl.max(b_s, 0))
        safe = tl.where(highest == float("-inf"), 0.0, highest)
        b_p = tl.exp2(b_s - safe[None, :])
        b_scale = tl.exp2(b_max - safe)
        b_sum = b_sum * b_scale + tl.sum(b_p, 0)
        b_max = highest
        b_p = b_p * gains(v_gain + at * vg_time, m_n)[:, None]
        b_gained = b_gained * b_scale + tl.sum(b_p, 0)
        b_p = b_p.to(dtype)
        b_new = ()
        for f in tl.static_range(_BANDS):
            b_c = _band_operand(v_packed + at * vp_time, m_n, v_fields + 3 * f, o_w, m_w, W, FP32_DOT)
            b_a = tl.dot(tl.trans(b_c), b_p, b_accs[f] * b_scale[None, :], input_precision="ieee")
            b_new = b_new + (b_a,)
        b_accs = b_new
    total = tl.where(b_sum > 0, b_sum, 1.0)
    row = (i_bh * tl.num_programs(0) + tl.program_id(0)) * rows + o_m
    for f in tl.static_range(_BANDS):
        p_out = split_out + row[None, :] * D + (f * W + o_w)[:, None]
        levels = tl.load(v_fields + 3 * f + 2).to(tl.float32)
        b_out = b_accs[f]
        if not FP32_DOT:
            b_out = b_out * (scale * tl.exp2(-tl.load(v_fields + 3 * f + 1).to(tl.float32)))
        b_out = b_out - levels * 0.5 * b_gained[None, :]
        tl.store(p_out, b_out / total[None, :], mask=m_w[:, None] & m_m[None, :])
    b_lse = tl.where(b_sum > 0, b_max + tl.log2(total), float("-inf")) * lse_unit
    tl.store(split_lse + row, b_lse, mask=m_m)


KLTLayer = LayerCodec[KLTKey, KLTValue]


def unsupported(codec: KLTLayer) -> str | None:
    """Why these kernels cannot read a layer's codes: they can."""
    return None


def fused_attend(codec: KLTLayer, query: Tensor, encoded: EncodedTokens, scaling: float) -> PartialAttention:
    """softmax(scaling q K^T) V over encoded tokens, an `AttendCodes`; float32 queries are multiplied in float32.

    Raises:
        CacheError: positions that are not consecutive.
    """
    spec, key_codes, value_codes = codec.key.spec, encoded.key_codes, encoded.value_codes
    batch, heads, query_len, head_dim = query.shape
    kv_heads, fp32_dot, rotations = spec.num_kv_heads, query.dtype == torch.float32, encoded.rotations
    assert rotations is not None
    rows, length = heads // kv_heads * query_len, encoded.length
    by_head = query.reshape(batch, kv_heads, rows, head_dim)
    offset, scores = codec.offset, query.new_empty(0, 0, 0, 0, dtype=torch.float32)
    if offset is not None:
        scores = torch.empty(batch, kv_heads, rows, cdiv(length, 64) * 64, device=query.device)
        offset_scores(query, offset, rotations, scores, scaling * LOG2E)
    tile_query, numbers = tile_queries(codec.key, by_head, rotations, scaling * LOG2E)
    block_m = 16 if fp32_dot or rows > 8 else 8
    blocks_m = cdiv(rows, block_m)
    split = tokens_per_split(length, batch * kv_heads * blocks_m, _BLOCK_N, _PROGRAMS_PER_SM)
    num_splits = cdiv(length + _BLOCK_N - 1, split)
    split_out = torch.empty(batch * kv_heads, num_splits, rows, head_dim, device=query.device)
    split_lse = torch.empty(batch * kv_heads, num_splits, rows, device=query.device)
    positions, width = rotations.positions, head_dim // BANDS
    _attend_kernel[(num_splits, batch * kv_heads, blocks_m)](
        tile_query, numbers, positions, split_lse if encoded.lengths is None else encoded.lengths, scores,
        key_codes.packed, key_codes.gain, codec.key.tables.fields,
        value_codes.packed, value_codes.gain, codec.value.tables.fields, split_out, split_lse,
        positions.stride(0) if positions.shape[0] > 1 else 0,
        key_codes.packed.stride(0), key_codes.packed.stride(2), *key_codes.gain.stride()[:3],
        value_codes.packed.stride(0), value_codes.packed.stride(2), *value_codes.gain.stride()[:3],
        *scores.stride()[1:3], kv_heads, rows, length, tile_query.shape[2], split // _BLOCK_N,
        math.log(2) if num_splits == 1 else 1.0,
        W=width, D=head_dim, TILE=ROPE_TILE, BLOCK_W=max(16, power_of_two(width)), BLOCK_M=block_m, BLOCK_N=_BLOCK_N,
        FP32_DOT=fp32_dot, HAS_OFFSET=offset is not None, HAS_LENGTHS=encoded.lengths is not None,
        num_warps=_WARPS_FP32 if fp32_dot else _WARPS, num_stages=_STAGES,
    )  # fmt: skip
    out, lse = split_out.squeeze(1), split_lse.squeeze(1)
    if num_splits > 1:
        out = torch.empty(batch * kv_heads, rows, head_dim, device=query.device)
        lse = torch.empty(batch * kv_heads, rows, device=query.device)
        merge_splits(split_out, split_lse, out, lse)
    value = codec.value
    with without_autocast(query):
        out = out.view(batch, kv_heads, rows, head_dim) @ value.basis.mT + value.mean.unsqueeze(1)
    lse = lse.view(batch, kv_heads, rows, 1)
    out = out.masked_fill(lse == -torch.inf, 0.0)
    return out.view(query.shape), lse.view(query.shape[:3])


def tile_queries(key: KLTKey, query: Tensor, rotations: TokenRotations, scaling: float) -> tuple[Tensor, Tensor]:
    """`out` and `numbers` of `_tile_queries_kernel` of query rows [batch, num_kv_heads, rows, head_dim], after RoPE."""
    batch, kv_heads, rows, head_dim = query.shape
    tiles, tables, fp32_dot = rotations.rope_tiles(), key.tables, query.dtype == torch.float32
    num_tiles = tiles.cos.shape[2]
    shape = (batch, kv_heads, num_tiles, rows)
    out = torch.empty(*shape, head_dim, dtype=torch.float32 if fp32_dot else torch.float16, device=query.device)
    numbers = torch.empty(*shape, 2, device=query.device)
    _tile_queries_kernel[(cdiv(num_tiles * rows, _BLOCK_R), batch * kv_heads)](
        query.contiguous(), key.basis, tables.bit, tables.levels, tiles.cos, tiles.sin, out, numbers,
        tiles.cos.stride(0) if tiles.cos.shape[0] > 1 else 0, kv_heads, rows, num_tiles, scaling,
        D=head_dim, ROTARY=2 * tiles.cos.shape[3], BLOCK_D=max(16, power_of_two(head_dim)), BLOCK_K=_BLOCK_K,
        BLOCK_R=_BLOCK_R, FP32_DOT=fp32_dot, num_warps=4,
    )  # fmt: skip
    return out, numbers
