"""Attention over KLT's codes: the scores of keys, from their codes; softmax and sums of values are in `value_kernels`.

A score is <q, R (m + B y)> with y = g (c - l / 2) the coded vector of levels c from 0 to l, R the rotation of the first
position of its tile and m the offset at its block of the tile. The query is transformed once per tile, to B^T R^T q,
and multiplied with levels, of a trellis with 4 fields + subsets; its products with the offsets of the tile's blocks are
a few numbers. Of heads that share a transform, each holds a share of y: a query of one has a part for each of them, and
its score is the sum of their products.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.launch import cdiv, power_of_two
from kvcli.kernels.operands import in_thread_order
from kvcli.kernels.pages import origin, tile_start
from kvcli.kernels.pdl import pdl_begin, pdl_launch_dependents, pdl_launch_options, pdl_wait
from kvcli.kernels.splits import LOG2E, SplitScores, batch_and_head, split_range, split_size, without_first
from kvcli.kernels.words import FIELD_SCALE, TINY, pow2_above
from kvcli.methods.klt.codec import KLTKey, KLTValue
from kvcli.methods.klt.field_kernels import (
    COLUMNS,
    FIELDS,
    band_columns,
    channels_as_rows,
    gains,
    head_bands,
    head_bytes,
    head_planes,
    head_subsets,
    subset_band,
    words_before,
)
from kvcli.methods.klt.fields import BANDS, MOST_BYTES
from kvcli.methods.klt.value_kernels import value_sum
from kvcli.methods.layer_codec import EncodedTokens, LayerCodec, PartialAttention
from kvcli.rope import OFFSET_BLOCK, ROPE_TILE, TokenRotations

# tuned on one H100, torch 2.11, triton 3.6
_BLOCK_N = 32
_BLOCK_R = 32
_QUERY_PROGRAMS = 264
_QUERY_WARPS = 4
_WARPS = 1
_WARPS_FP32 = 4
_MAX_REGISTERS = {False: 128, True: 168}  # without and with a trellis
_MORE_REGISTERS = 40  # for queries of several heads, on one H200

_BANDS = tl.constexpr(BANDS)
_OFFSET_BLOCK = tl.constexpr(OFFSET_BLOCK)
_MOST_BYTES = tl.constexpr(MOST_BYTES)


@triton.jit(do_not_specialize=["num_tiles"])
def _tile_queries_kernel(
    query, basis, factors, offsets, tile_cos, tile_sin, positions, lengths, out, numbers,
    t_batch, at_batch, num_kv_heads, rows, num_tiles, scaling,
    D: tl.constexpr, ROTARY: tl.constexpr, NUMBERS: tl.constexpr, TILE: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, JOINT: tl.constexpr, FP32_DOT: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    """out = B^T R^T q of each tile and query row, times scaling, as the other operand of `band_columns`.

    Grid (programs, batch * num_kv_heads, JOINT): heads of codes, and the query's among the JOINT ones that share a
    transform with it; a program takes each `programs`-th BLOCK_R rows of a query's head.

    Args:
        query: float [batch, num_kv_heads, rows, D], contiguous, after RoPE.
        basis, factors, offsets: of `QueryTables`; offsets are not read if there are none.
        tile_cos, tile_sin: float32 [batch or 1, num_tiles, ROTARY / 2], of the first position, stride t_batch.
        positions: int [batch or 1, >= 1], stride at_batch, of the first token; lengths: int32 [batch], tokens of each
            sequence, if HAS_LENGTHS.
        out: [batch, num_kv_heads, num_tiles, JOINT * rows, D], float32 if FP32_DOT, else float16 in units; written up
            to the last tile of a sequence.
        numbers: float32 [batch, num_kv_heads, num_tiles, JOINT * rows, NUMBERS], written: the factor of products, the
            product with the levels' middle, and, of the first of JOINT heads, those with the offsets.
    """
    pdl_begin()
    i_bh, i_b, i_h = batch_and_head(1, num_kv_heads)
    i_part, i_own = i_h % JOINT, tl.program_id(2)
    i_query = i_h - i_part + i_own  # head of the query
    BD: tl.constexpr = JOINT * D
    HALF: tl.constexpr = ROTARY // 2
    CHUNKS: tl.constexpr = (D + BLOCK_K - 1) // BLOCK_K
    OFFSETS: tl.constexpr = NUMBERS - 2
    PRECISION: tl.constexpr = "tf32x3" if FP32_DOT else "tf32"  # the former has the precision of float32
    o_p = tl.arange(0, BLOCK_P)
    m_p = o_p < D // 2
    # channels in the pairs of `to_pairs`
    first, second = o_p, o_p + D // 2
    if ROTARY < D:
        first, second = tl.where(o_p < HALF, o_p, o_p + HALF), tl.where(o_p < HALF, o_p + HALF, second)
    basis += i_query * (D * BD) + i_part * D
    offset_unit = factors + i_query * (2 * D + 1) + 2 * D
    factors += i_h * (2 * D + 1)
    if CHUNKS == 1:
        b_first = _columns(basis, first, m_p, 0, D, BD, BLOCK_K)
        b_second = _columns(basis, second, m_p, 0, D, BD, BLOCK_K)
    if OFFSETS > 0:
        COLUMNS: tl.constexpr = OFFSETS if FP32_DOT else 2 * OFFSETS
        offsets += i_query * (D * COLUMNS)
        b_x_offset = _columns(offsets, first, m_p, 0, COLUMNS, COLUMNS, 16)
        b_y_offset = _columns(offsets, second, m_p, 0, COLUMNS, COLUMNS, 16)
        if not FP32_DOT:
            b_x_rest = _columns(offsets, first, m_p, OFFSETS, COLUMNS, COLUMNS, 16)
            b_y_rest = _columns(offsets, second, m_p, OFFSETS, COLUMNS, COLUMNS, 16)
    count = num_tiles
    if HAS_LENGTHS:
        begin = tl.load(positions + i_b * at_batch).to(tl.int32) % TILE
        count = tl.minimum(count, tl.cdiv(begin + tl.load(lengths + i_b), TILE))
    for start in range(tl.program_id(0) * BLOCK_R, count * rows, tl.num_programs(0) * BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        m_r, tile, row = r < count * rows, r // rows, r % rows
        mask = m_r[:, None] & m_p[None, :]
        p_row = query + ((i_b * num_kv_heads + i_query) * rows + row)[:, None] * D
        b_x = tl.load(p_row + first[None, :], mask=mask, other=0.0).to(tl.float32) * scaling
        b_y = tl.load(p_row + second[None, :], mask=mask, other=0.0).to(tl.float32) * scaling
        p_angle = i_b * t_batch + tile[:, None] * HALF + o_p[None, :]
        m_angle = m_r[:, None] & (o_p < HALF)[None, :]
        b_cos = tl.load(tile_cos + p_angle, mask=m_angle, other=1.0)
        b_sin = tl.load(tile_sin + p_angle, mask=m_angle, other=0.0)
        b_x, b_y = b_x * b_cos + b_y * b_sin, b_y * b_cos - b_x * b_sin
        unit = tl.full([BLOCK_R], 1.0, tl.float32)
        if not FP32_DOT:
            unit = pow2_above(tl.maximum(tl.max(tl.maximum(tl.abs(b_x), tl.abs(b_y)), 1), TINY))
            b_x, b_y = b_x * (1.0 / unit)[:, None], b_y * (1.0 / unit)[:, None]
        at = i_bh * num_tiles * (JOINT * rows) + (tile * JOINT + i_own) * rows + row
        p_number = numbers + at * NUMBERS
        b_q = b_x.to(out.dtype.element_ty), b_y.to(out.dtype.element_ty)
        if OFFSETS > 0:
            o_b = tl.arange(0, 16)
            if i_part == 0:
                b_o = tl.dot(b_q[0], b_x_offset, input_precision=PRECISION)
                b_o = tl.dot(b_q[1], b_y_offset, b_o, input_precision=PRECISION)
                if not FP32_DOT:  # in two parts, both operands have 22 bits
                    b_o = tl.dot(b_q[0], b_x_rest, b_o)
                    b_o = tl.dot(b_q[1], b_y_rest, b_o)
                    b_o = tl.dot((b_x - b_q[0].to(tl.float32)).to(tl.float16), b_x_offset, b_o)
                    b_o = tl.dot((b_y - b_q[1].to(tl.float32)).to(tl.float16), b_y_offset, b_o)
                    b_o *= (unit * tl.load(offset_unit))[:, None]
                tl.store(p_number[:, None] + 2 + o_b[None, :], b_o, mask=m_r[:, None] & (o_b < OFFSETS)[None, :])
        b_outs = ()
        b_top = tl.zeros([BLOCK_R], tl.float32)
        for i in tl.static_range(CHUNKS):
            o_k = i * BLOCK_K + tl.arange(0, BLOCK_K)
            if CHUNKS > 1:
                b_first = _columns(basis, first, m_p, i * BLOCK_K, D, BD, BLOCK_K)
                b_second = _columns(basis, second, m_p, i * BLOCK_K, D, BD, BLOCK_K)
            b_out = tl.dot(b_q[0], b_first, input_precision=PRECISION)
            b_out = tl.dot(b_q[1], b_second, b_out, input_precision=PRECISION)
            b_out *= tl.load(factors + o_k, mask=o_k < D, other=0.0)[None, :]
            if not FP32_DOT:
                b_top = tl.maximum(b_top, tl.max(tl.abs(b_out), 1))
            b_outs = b_outs + (b_out,)
        out_unit = unit if FP32_DOT else pow2_above(tl.maximum(b_top, TINY))
        b_zero = tl.zeros([BLOCK_R], tl.float32)
        for i in tl.static_range(CHUNKS):
            o_k = i * BLOCK_K + tl.arange(0, BLOCK_K)
            b_out = (b_outs[i] * (1.0 / out_unit)[:, None]).to(out.dtype.element_ty)
            tl.store(out + at[:, None] * D + o_k[None, :], b_out, mask=m_r[:, None] & (o_k < D)[None, :])
            b_middle = tl.load(factors + D + o_k, mask=o_k < D, other=0.0)
            b_zero += tl.sum(b_out.to(tl.float32) * b_middle[None, :], 1)
        if not FP32_DOT:
            unit = unit * out_unit
        tl.store(p_number, unit if FP32_DOT else unit * FIELD_SCALE, mask=m_r)
        tl.store(p_number + 1, b_zero * unit, mask=m_r)


@triton.jit
def _columns(matrix, o_d, m_d, begin, COUNT: tl.constexpr, STRIDE: tl.constexpr, BLOCK_K: tl.constexpr):
    """Rows o_d, STRIDE apart, and BLOCK_K columns from `begin` on of a matrix of COUNT columns, 0 beyond them."""
    o_k = begin + tl.arange(0, BLOCK_K)
    return tl.load(matrix + o_d[:, None] * STRIDE + o_k[None, :], mask=m_d[:, None] & (o_k < COUNT)[None, :], other=0.0)


@triton.jit
def _load_tokens(
    p_head, p_gain, table, begin, n, low, high, num_bytes, p_page, p_time, g_page, g_time,
    PLANES: tl.constexpr, W: tl.constexpr, BLOCK_W: tl.constexpr, PAGE: tl.constexpr, TRELLIS: tl.constexpr,
):  # fmt: skip
    """Planes, stored gains and, if TRELLIS, `words_before` of tokens n, from `begin` on, or of those nearest to them of
    low to high - 1.

    An empty split reads one. In pages, `p_head` and `p_gain` point to token 0, else to token `low`.
    """
    o_q = tl.arange(0, BLOCK_W // 4)
    at = tl.maximum(tl.minimum(n, high - 1), low) - low
    if PAGE > 0:
        # blocks begin where those of positions do, in the middle of a page; a tile begins with the page
        N: tl.constexpr = n.shape[0]
        first = tl.maximum(tl.minimum(begin, high - 1), low) // PAGE * PAGE
        at += low - first
        p_head = tile_start(p_head, table, first, at[:, None], high, p_page, p_time, PAGE, N + PAGE, PAGE)
        p_gain = tile_start(p_gain, table, first, at, high, g_page, g_time, PAGE, N + PAGE, PAGE)
    p_word = in_thread_order(p_head, at[:, None] * p_time + o_q[None, :] * 4, 4 if W % 4 == 0 else 2)
    lane = o_q[None, :] * 4
    before = words_before(p_word, lane, 4, W) if TRELLIS else ()
    return head_planes(p_word, lane, num_bytes, PLANES, 4, W), tl.load(p_gain + at * g_time), before


@triton.jit
def _score_tokens(
    tile_query, numbers, at_query, rows, m_m, num_tiles, start, low, high, p_head, num_bytes, bands, fields, p_page,
    p_time, p_gain, g_page, g_head, g_time, table, p_scores, PLANES: tl.constexpr, W: tl.constexpr, D: tl.constexpr,
    TILE: tl.constexpr, NUMBERS: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
    SKIP: tl.constexpr, JOINT: tl.constexpr, FP32_DOT: tl.constexpr, TRELLIS: tl.constexpr,
):  # fmt: skip
    """Writes the scores of tokens low to high - 1, of heads of at most PLANES bytes, and returns the largest ones.

    `start` is the position of token 0; `at_query` [M] counts the rows of its tile, of the first of JOINT heads, which
    have the same fields.
    """
    o_w, o_n = tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_N)
    m_w = o_w < W
    lane = tl.arange(0, BLOCK_W // 4)[None, :] * 4
    coded = tl.load(fields + _BANDS * COLUMNS + 2)
    ALIGNED: tl.constexpr = BLOCK_W // 4 if W == BLOCK_W else 1
    b_max = tl.full([BLOCK_N, m_m.shape[0]], float("-inf"), tl.float32)
    first, last = start + low, start + high  # positions
    if PAGE == 0:
        p_head += low.to(tl.int64) * p_time
        p_gain += low.to(tl.int64) * g_time
    begin = first // BLOCK_N * BLOCK_N - start
    following = _load_tokens(
        p_head, p_gain, table, begin, begin + o_n, low, high, num_bytes, p_page, p_time, g_page, g_time,
        PLANES, W, BLOCK_W, PAGE, TRELLIS,
    )  # fmt: skip
    # an empty split reads no tile: those after the last token are not written
    for tile in range(first // TILE, tl.cdiv(last, TILE) * (high > low)):
        b_qs, b_subset_qs, b_factors, b_zeros = (), (), (), ()
        for head in tl.static_range(JOINT):
            at_tile = at_query + (head * num_tiles + tile - start // TILE) * rows
            for f in tl.static_range(_BANDS):
                p_tile = tl.multiple_of(at_tile[None, :] * D + (f * W + o_w)[:, None], [ALIGNED, ALIGNED])
                b_q = tl.load(tile_query + p_tile, mask=m_w[:, None] & m_m[None, :], other=0.0)
                if TRELLIS:
                    b_subset_qs = b_subset_qs + (channels_as_rows(b_q),)
                    ratio = tl.full([], 4.0, tl.float32)  # of a field to a subset, as they are read
                    if not FP32_DOT:
                        ratio = tl.exp2((2 + f // 2 * 2 - tl.load(fields + f * COLUMNS + 1)).to(tl.float32))
                    b_q *= ratio.to(b_q.dtype)
                b_qs = b_qs + (channels_as_rows(b_q),)
            b_factors = b_factors + (tl.load(numbers + at_tile * NUMBERS, mask=m_m, other=0.0),)
            b_zeros = b_zeros + (tl.load(numbers + at_tile * NUMBERS + 1, mask=m_m, other=0.0),)
        low_tile = tl.maximum(tile * TILE, first // BLOCK_N * BLOCK_N)
        for position in range(low_tile, tl.minimum((tile + 1) * TILE, last), BLOCK_N):
            n = position - start + o_n
            m_s = ((n >= low) & (n < high))[:, None] & m_m[None, :]
            b_s = tl.zeros([BLOCK_N, m_m.shape[0]], tl.float32)
            for head in tl.static_range(JOINT):
                planes, b_gain, before = following
                after = position - start + (head + 1) // JOINT * BLOCK_N
                following = _load_tokens(
                    p_head + (head + 1) % JOINT * W * num_bytes, p_gain + (head + 1) % JOINT * g_head, table, after,
                    after + o_n, low, high, num_bytes, p_page, p_time, g_page, g_time, PLANES, W, BLOCK_W, PAGE,
                    TRELLIS,
                )  # fmt: skip
                b_c = tl.zeros([BLOCK_N, m_m.shape[0]], tl.float32)
                for f in tl.static_range(_BANDS):
                    b_f = band_columns(planes, bands[f], FP32_DOT)
                    b_c = tl.dot(b_f, b_qs[head * _BANDS + f], b_c, input_precision="ieee")
                if TRELLIS:
                    subsets = head_subsets(planes[0], before, lane, coded, 4)
                    for f in tl.static_range(_BANDS):
                        b_f = band_columns(subsets, subset_band(f, FP32_DOT), FP32_DOT)
                        b_c = tl.dot(b_f, b_subset_qs[head * _BANDS + f], b_c, input_precision="ieee")
                b_s += (b_c * b_factors[head][None, :] - b_zeros[head][None, :]) * gains(b_gain)[:, None]
            if NUMBERS > 2:
                at_tile = at_query + (tile - start // TILE) * rows
                p_offset = numbers + at_tile * NUMBERS + 2 + position % TILE // _OFFSET_BLOCK
                for i in tl.static_range(BLOCK_N // _OFFSET_BLOCK):
                    b_o = tl.load(p_offset + i, mask=m_m, other=0.0)
                    b_s += tl.where((o_n // _OFFSET_BLOCK == i)[:, None], b_o[None, :], 0.0)
            b_s = without_first(b_s, n, SKIP)
            b_max = tl.maximum(b_max, tl.where(m_s, b_s, float("-inf")))
            tl.store(p_scores + n[:, None], b_s, mask=m_s)
    return tl.max(b_max, 0)


@triton.jit(do_not_specialize=["length", "per_split", "num_tiles", "table_row"])
def _scores_kernel(
    tile_query, numbers, positions, lengths, packed, gain, fields, scores, split_max,
    at_batch, p_batch, p_time, g_batch, g_head, g_time, s_head, s_row,
    num_kv_heads, rows, length, per_split, num_tiles, table, table_row,
    W: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, NUMBERS: tl.constexpr, BLOCK_W: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, SKIP: tl.constexpr, SPLIT: tl.constexpr,
    JOINT: tl.constexpr, FP32_DOT: tl.constexpr, HAS_LENGTHS: tl.constexpr, TRELLIS: tl.constexpr,
):  # fmt: skip
    """scores[m, n] = sum_h g_hn (<q_h,tile(n), c_hn> - zero_h,tile(n)) + offset_block(n) of the tokens n of a split,
    over the JOINT heads h of a group.

    Grid (num_splits, batch * groups, ceil(rows / BLOCK_M)); rows are those of all heads of a group. BLOCK_N is a
    multiple of OFFSET_BLOCK. Scores of the first SKIP tokens are -inf. SPLIT: of `split_size`.

    Args:
        tile_query, numbers: as `_tile_queries_kernel` wrote them.
        positions: int [batch or 1, >= 1], stride at_batch, of the first token.
        lengths: int32 [batch], tokens of each sequence, if HAS_LENGTHS.
        packed: uint8 [batch, 1, length, bytes], strides p_*; gain: uint8 [batch, num_kv_heads, length, 1], strides g_*.
            Pages [pages, ..], if PAGE, of the block table, int32 [batch, max_pages], stride table_row.
        fields: int32 [num_kv_heads, BANDS + 1, 6], see `Tables`.
        scores: float32 [batch, groups, rows, >= length], strides s_*, in units of log 2; written.
        split_max: float32 [batch, groups, num_splits, rows], written.
    """
    pdl_launch_dependents()
    i_bg, i_b, i_g = batch_and_head(1, num_kv_heads // JOINT)
    i_h = i_g * JOINT
    o_m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_m = o_m < rows
    if HAS_LENGTHS:
        length = tl.load(lengths + i_b)
    per_split = split_size(length, per_split, SPLIT)
    low, count = split_range(length, per_split)
    low = low.to(tl.int32)
    start = tl.load(positions + i_b * at_batch).to(tl.int32)
    fields += i_h * FIELDS
    if PAGE > 0:
        table += i_b * table_row
    i_row, _, _ = origin(i_b, low, PAGE)
    p_head, num_bytes = head_bytes(packed + i_row * p_batch, fields, W)
    bands = head_bands(fields, FP32_DOT)
    p_gain = gain + i_row * g_batch + i_h * g_head
    p_scores = scores + i_bg * s_head + o_m.to(tl.int64)[None, :] * s_row
    pdl_wait()
    high = low + tl.maximum(count, 0).to(tl.int32)
    at_query = i_bg * JOINT * num_tiles * rows + o_m
    # heads of at most two bytes per channel are read with half of the selections
    if num_bytes <= 2:
        b_max = _score_tokens(
            tile_query, numbers, at_query, rows, m_m, num_tiles, start, low, high, p_head, num_bytes, bands, fields,
            p_batch, p_time, p_gain, g_batch, g_head, g_time, table, p_scores, 2, W, D, TILE, NUMBERS, BLOCK_W, BLOCK_N,
            PAGE, SKIP, JOINT, FP32_DOT, TRELLIS,
        )  # fmt: skip
    else:
        b_max = _score_tokens(
            tile_query, numbers, at_query, rows, m_m, num_tiles, start, low, high, p_head, num_bytes, bands, fields,
            p_batch, p_time, p_gain, g_batch, g_head, g_time, table, p_scores, _MOST_BYTES, W, D, TILE, NUMBERS,
            BLOCK_W, BLOCK_N, PAGE, SKIP, JOINT, FP32_DOT, TRELLIS,
        )  # fmt: skip
    tl.store(split_max + (i_bg * tl.num_programs(0) + tl.program_id(0)) * rows + o_m, b_max, mask=m_m)


KLTLayer = LayerCodec[KLTKey, KLTValue]


def unsupported(codec: KLTLayer) -> str | None:
    """Why these kernels cannot read a layer's codes; None if they can."""
    width, fewer = codec.key.width, " or fewer than 4" * codec.key.code.trellis
    return f"bands of {width} channels, an odd number{fewer}" if width % 2 or (fewer and width < 4) else None


def fused_attend(codec: KLTLayer, query: Tensor, encoded: EncodedTokens, scaling: float) -> PartialAttention:
    """softmax(scaling q K^T) V over encoded tokens, an `AttendCodes`; float32 queries are multiplied in float32.

    CacheError: positions that are not consecutive.
    """
    scores = key_scores(codec.key, codec.offset, query, encoded, scaling)
    out, lse = value_sum(codec.value, scores, encoded, query.dtype == torch.float32)
    return out.view(query.shape), lse.view(query.shape[:3])


def key_scores(
    key: KLTKey, offset: Tensor | None, query: Tensor, encoded: EncodedTokens, scaling: float
) -> SplitScores:
    """Scores of all query rows and encoded tokens; float32 queries are multiplied in float32.

    Args:
        offset: float32 [1, num_kv_heads, 1, head_dim], the constant pre-RoPE key that is not coded.
        query: after RoPE, [batch, num_heads, query_len, head_dim].

    CacheError: positions that are not consecutive.
    """
    codes, rotations, fp32_dot, joint = encoded.key_codes, encoded.rotations, query.dtype == torch.float32, key.joint
    assert rotations is not None
    batch, heads, query_len, head_dim = query.shape
    kv_heads = key.spec.num_kv_heads
    groups, rows = kv_heads // joint, heads // kv_heads * query_len * joint
    by_head = query.reshape(batch, kv_heads, rows // joint, head_dim)
    early = encoded.pages is None
    tile_query, numbers = tile_queries(key, offset, by_head, rotations, scaling * LOG2E, encoded.lengths, early)
    block_m = 16 if fp32_dot else 8
    blocks = cdiv(rows, block_m)
    scores = SplitScores(
        batch, groups, rows, encoded.length, 64, joint * blocks, query.device, balanced=encoded.pages is not None
    )
    positions, packed = rotations.positions, codes.packed
    _scores_kernel[(scores.num_splits, batch * groups, blocks)](
        tile_query, numbers, positions, scores.split_max if encoded.lengths is None else encoded.lengths,
        packed, codes.gain, key.tables.fields, scores.values, scores.split_max,
        positions.stride(0) if positions.shape[0] > 1 else 0, packed.stride(0), packed.stride(2),
        *codes.gain.stride()[:3], *scores.values.stride()[1:3],
        kv_heads, rows, encoded.length, scores.tokens_per_split, tile_query.shape[2], *encoded.table,
        W=key.width, D=head_dim, TILE=ROPE_TILE, NUMBERS=numbers.shape[-1], BLOCK_W=max(16, power_of_two(key.width)),
        BLOCK_M=block_m, BLOCK_N=_BLOCK_N, PAGE=encoded.page_size, SKIP=encoded.skip, SPLIT=scores.split,
        JOINT=joint, FP32_DOT=fp32_dot, HAS_LENGTHS=encoded.lengths is not None, TRELLIS=key.code.trellis,
        num_warps=_WARPS_FP32 if fp32_dot else _WARPS, num_stages=1,
        maxnreg=None if fp32_dot else _MAX_REGISTERS[key.code.trellis] + _MORE_REGISTERS * (joint > 1),
        **pdl_launch_options(),
    )  # fmt: skip
    return scores


def tile_queries(
    key: KLTKey,
    offset: Tensor | None,
    query: Tensor,
    rotations: TokenRotations,
    scaling: float,
    lengths: Tensor | None = None,
    early: bool = False,
) -> tuple[Tensor, Tensor]:
    """`out` and `numbers` of `_tile_queries_kernel` of query rows [batch, num_kv_heads, rows, head_dim], after RoPE.

    `early`: of `pdl_launch_options`.
    """
    batch, kv_heads, rows, head_dim = query.shape
    fp32_dot = query.dtype == torch.float32
    tables = key.query_tables(offset, rotations, torch.float32 if fp32_dot else torch.float16)
    tiles = rotations.rope_tiles()
    num_tiles = tiles.cos.shape[2]
    shape = batch, kv_heads, num_tiles, key.joint * rows
    out = torch.empty(*shape, head_dim, dtype=tables.basis.dtype, device=query.device)
    numbers = torch.empty(*shape, 2 + tables.num_offsets, device=query.device)
    programs = min(cdiv(num_tiles * rows, _BLOCK_R), max(1, _QUERY_PROGRAMS // (batch * kv_heads * key.joint)))
    block_k = max(16, power_of_two(head_dim)) if head_dim <= (64 if fp32_dot else 128) else 64
    positions = rotations.positions
    _tile_queries_kernel[(programs, batch * kv_heads, key.joint)](
        query.contiguous(), tables.basis, tables.factors, tables.offsets, tiles.cos, tiles.sin, positions,
        numbers if lengths is None else lengths, out, numbers, tiles.cos.stride(0) if tiles.cos.shape[0] > 1 else 0,
        positions.stride(0) if positions.shape[0] > 1 else 0, kv_heads, rows, num_tiles, scaling,
        D=head_dim, ROTARY=2 * tiles.cos.shape[3], NUMBERS=numbers.shape[-1], TILE=ROPE_TILE,
        BLOCK_P=max(16, power_of_two(head_dim // 2)), BLOCK_K=block_k, BLOCK_R=_BLOCK_R, JOINT=key.joint,
        FP32_DOT=fp32_dot, HAS_LENGTHS=lengths is not None, num_warps=_QUERY_WARPS, num_stages=1,
        **pdl_launch_options(early),
    )  # fmt: skip
    return out, numbers
