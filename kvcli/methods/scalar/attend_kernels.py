"""Attention over scalar codes (KIVI, SQuat): keys per channel, before or after RoPE, values per token.

Two kernels per layer, and a third if the tokens are split: scores of all tokens, softmax with the weighted sum of the
values, merge of the splits. No key or value is written in full precision.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.launch import cdiv, power_of_two, row_major
from kvcli.kernels.operands import words_as_columns, words_as_rows
from kvcli.kernels.pages import origin, tile_start, token_offsets
from kvcli.kernels.pdl import pdl_begin, pdl_launch_options
from kvcli.kernels.splits import LOG2E, SplitScores, batch_and_head, query_rows, split_range, split_size, without_first
from kvcli.kernels.words import EVICT_FIRST, FIELD_SCALE, field_dot, mul2, query_fields, query_in_units
from kvcli.methods.layer_codec import EncodedTokens, LayerCodec, PartialAttention
from kvcli.methods.scalar.codec import PerChannelCodec, PerTokenValue
from kvcli.methods.scalar.rotated_score_kernels import rotated_scores_kernel
from kvcli.methods.scalar.value_kernels import unsupported_values, value_sum

# tuned on one H200, torch 2.11, triton 3.6
_WARPS = 1
_WARPS_FP32 = 4
_STAGES = 1
_MAX_REGISTERS = 128
_ROTATED_STAGES = 3

ZERO_GROUPS = tl.constexpr(16)
"""Groups whose zeros are multiplied with the query in one product."""


@triton.jit
def _zero_sums(
    zero, b_units, first, count, o_w, table, begin, end, c_page, c_time,
    W: tl.constexpr, D: tl.constexpr, B: tl.constexpr, PAGE: tl.constexpr, FP32_DOT: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """sum_c q_c zero_c of ZERO_GROUPS groups from `first` on, of `count`, for each query row: [ZERO_GROUPS, C].

    PAGE groups are in a page, see `token_offsets`.
    """
    LOW: tl.constexpr = 8 // B
    FIELDS: tl.constexpr = 16 // B
    ALIGNED: tl.constexpr = o_w.shape[0] // 4 if WHOLE else 1
    o_g = tl.minimum(first + tl.arange(0, ZERO_GROUPS), count - 1)
    b_zeros = tl.zeros([ZERO_GROUPS, b_units[0].shape[1]], tl.float32)
    for low in tl.static_range(LOW):
        # units of fields that lie equally high in their byte are divided by the same power of two
        b_sum = tl.zeros([ZERO_GROUPS, b_units[0].shape[1]], tl.float32)
        for f in tl.static_range(low, FIELDS, LOW):
            at_group = token_offsets(table, begin, o_g[:, None], end, c_page, c_time, PAGE)
            at = tl.multiple_of(at_group + (f * W + o_w)[None, :], [ALIGNED, ALIGNED])
            if WHOLE:
                b_z = tl.load(zero + at, eviction_policy=EVICT_FIRST)
            else:
                b_z = tl.load(zero + at, mask=((o_w < W) & (f * W + o_w < D))[None, :], other=0.0)
            b_z = words_as_columns(b_z.to(tl.float32) if FP32_DOT else b_z)
            b_sum = tl.dot(b_z, words_as_rows(b_units[f]), b_sum, input_precision="ieee")
        b_zeros += b_sum * (1 if FP32_DOT else 1 << (B * low))
    return b_zeros


@triton.jit(do_not_specialize=["groups", "table_row"])
def _scores_kernel(
    query, packed, scale, zero, lengths, scores, split_max,
    q_batch, q_head, q_time, p_batch, p_head, c_batch, c_head, c_time, s_head, s_row,
    num_kv_heads, query_len, groups, groups_per_split, scaling, table, table_row,
    HEADS: tl.constexpr, B: tl.constexpr, W: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr,
    SKIP: tl.constexpr, SPLIT: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PACK: tl.constexpr, FP32_DOT: tl.constexpr, HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    """scores[m, n] = scaling (sum_c (q_mc scale_gc) code_nc + sum_c q_mc zero_gc) for tokens n of group g.

    Grid (num_splits, batch * num_kv_heads, ceil(rows / BLOCK_M)), rows = HEADS * query_len, HEADS query heads per kv
    head. One program: BLOCK_M query rows of one kv head and groups_per_split groups of GROUP tokens, PACK groups at a
    time.

    query [batch, num_heads, query_len, D] float, rotated, strides q_*; packed int16 [batch, num_kv_heads, tokens, W],
    strides p_*, B-bit codes by `pack_planes`; scale and zero float16 [batch, num_kv_heads, groups, D], strides c_*,
    `groups` those of the longest sequence; lengths int32 [batch], tokens of each sequence, if HAS_LENGTHS; written in
    units of log 2 (`scaling` includes log2(e)): scores float32 [batch, num_kv_heads, rows, tokens], strides s_*, and
    split_max float32 [batch, num_kv_heads, num_splits, rows]. With PAGE, packed, scale and zero are pages of so many
    tokens, a multiple of GROUP, of the block table, int32 [batch, max_pages], stride table_row. Scores of the first
    SKIP tokens are -inf. SPLIT: of `split_size`. BLOCK_N tokens per product; BLOCK_W is W padded; FP32_DOT: float32
    products.
    """
    pdl_begin()
    i_bh, i_b, i_h = batch_and_head(1, num_kv_heads)
    # the columns of a product are PACK groups of tokens times the query rows: only some are of use to a token, but
    # tensor cores work on eight at once anyway
    o_c = tl.arange(0, BLOCK_M * PACK)
    o_m = tl.program_id(2) * BLOCK_M + o_c % BLOCK_M
    o_w = tl.arange(0, BLOCK_W)
    o_r = tl.arange(0, BLOCK_N * PACK)
    FIELDS: tl.constexpr = 16 // B
    WHOLE: tl.constexpr = W == BLOCK_W and W * FIELDS == D
    ALIGNED: tl.constexpr = BLOCK_W // 4 if WHOLE else 1
    m_m = o_m < HEADS * query_len
    m_w = o_w < W
    p_query = query_rows(query, i_b, i_h, o_m, q_batch, q_head, q_time, query_len, HEADS)
    if HAS_LENGTHS:
        groups = tl.load(lengths + i_b) // GROUP
    groups_per_split = split_size(groups, groups_per_split, SPLIT // GROUP)
    first, count = split_range(groups, groups_per_split)
    PAGE_GROUPS: tl.constexpr = PAGE // GROUP
    if PAGE > 0:
        table += i_b * table_row
    i_row, group, begin = origin(i_b, first, PAGE)
    packed += i_row * p_batch + i_h * p_head + group * GROUP * W
    scale += i_row * c_batch + i_h * c_head + group * c_time
    zero += i_row * c_batch + i_h * c_head + group * c_time
    end = begin + count if PAGE > 0 else 0
    p_scores = scores + i_bh * s_head + o_m.to(tl.int64)[None, :] * s_row + first * GROUP

    # [W, C] per field
    b_qs, unit = query_fields(p_query, m_m, o_w, W, 1, W, D, B, FP32_DOT)
    b_units = query_in_units(b_qs, unit, B, FP32_DOT)
    zero_factor = unit * scaling
    dot_factor = zero_factor if FP32_DOT else zero_factor * FIELD_SCALE

    # column c serves the tokens of group c // BLOCK_M alone
    same_group = (o_r // BLOCK_N)[:, None] == (o_c // BLOCK_M)[None, :]
    b_max = tl.full([BLOCK_N * PACK, BLOCK_M * PACK], float("-inf"), tl.float32)
    for block in range(0, count, ZERO_GROUPS):
        b_zeros = _zero_sums(
            zero, b_units, block, count, o_w, table, begin, end, c_batch, c_time, W, D, B, PAGE_GROUPS, FP32_DOT, WHOLE
        )
        b_zeros = b_zeros * zero_factor[None, :]
        for g in range(block, tl.minimum(block + ZERO_GROUPS, count), PACK):
            last = count - 1 - g
            group_of_column = tl.minimum(o_c // BLOCK_M, last)
            p_scale = tile_start(
                scale, table, begin + g, group_of_column[None, :], end, c_batch, c_time, PAGE_GROUPS, PACK, 1
            )
            p_scale = p_scale + (group_of_column * c_time)[None, :] + o_w[:, None]
            b_scaled = ()
            for f in tl.static_range(FIELDS):
                if WHOLE:
                    b_c = tl.load(p_scale + f * W, eviction_policy=EVICT_FIRST)
                else:
                    b_c = tl.load(p_scale + f * W, mask=(m_w & (f * W + o_w < D))[:, None], other=0.0)
                b_c = b_units[f] * b_c.to(tl.float32) if FP32_DOT else mul2(b_units[f], b_c)
                b_scaled = b_scaled + (words_as_rows(b_c),)
            of_group = tl.arange(0, ZERO_GROUPS)[:, None] == (g - block + group_of_column)[None, :]
            zeros = tl.sum(tl.where(of_group, b_zeros, 0.0), 0)
            for part in tl.static_range(GROUP // BLOCK_N):
                n = tl.minimum(o_r // BLOCK_N, last) * GROUP + part * BLOCK_N + o_r % BLOCK_N
                at = tl.multiple_of(n[:, None] * W + o_w[None, :], [ALIGNED, ALIGNED])
                p_words = tile_start(
                    packed, table, (begin + g) * GROUP, n[:, None], end * GROUP, p_batch, W, PAGE, PACK * GROUP, GROUP,
                )  # fmt: skip
                if WHOLE:
                    words = tl.load(p_words + at, eviction_policy=EVICT_FIRST)
                else:
                    words = tl.load(p_words + at, mask=m_w[None, :], other=0)
                words = words_as_columns(words)
                # [N, C]
                b_s = tl.zeros([BLOCK_N * PACK, BLOCK_M * PACK], tl.float32)
                for f in tl.static_range(FIELDS):
                    b_s = field_dot(words, b_scaled[f], b_s, f, B, FP32_DOT)
                b_s = without_first(b_s * dot_factor[None, :] + zeros[None, :], (first + g) * GROUP + n, SKIP)
                b_max = tl.maximum(b_max, b_s)
                m_s = same_group & (o_r // BLOCK_N <= last)[:, None] & m_m[None, :]
                tl.store(p_scores + g * GROUP + n[:, None], b_s, mask=m_s)
    b_max = tl.where(same_group, b_max, float("-inf"))
    highest = tl.max(tl.reshape(tl.max(b_max, 0), [PACK, BLOCK_M]), 0)
    o_m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = HEADS * query_len
    tl.store(split_max + (i_bh * tl.num_programs(0) + tl.program_id(0)) * rows + o_m, highest, mask=o_m < rows)


ScalarLayer = LayerCodec[PerChannelCodec[Any], PerTokenValue]


def unsupported(codec: ScalarLayer) -> str | None:
    """Why these kernels cannot read a layer's codes; None if they can."""
    key = codec.key
    group, head_dim = key.tokens_per_group, key.spec.head_dim
    if codec.offset is not None:
        return "keys less an offset"
    if group < 16 or group & (group - 1):
        return f"groups of {group} tokens; they must be a power of two, 16 or more"
    if key.space == "pre_rope" and key.spec.rope.rotary_dim != head_dim:
        return "keys before RoPE that are rotated in part of their channels"
    if key.space == "pre_rope" and head_dim * key.n_bits % 16:
        return f"keys before RoPE of head_dim {head_dim} at {key.n_bits} bits"
    return unsupported_values(codec.value)


def fused_attend(codec: ScalarLayer, query: Tensor, encoded: EncodedTokens, scaling: float) -> PartialAttention:
    """softmax(scaling q K^T) V over encoded tokens, an `AttendCodes`; float32 queries are multiplied in float32."""
    fp32_dot = query.dtype == torch.float32
    scores = key_scores(codec.key, query, encoded, scaling, fp32_dot)
    out, lse = value_sum(codec.value, scores, encoded, fp32_dot)
    return out.view(query.shape), lse.view(query.shape[:3])


def key_scores(
    key: PerChannelCodec[Any], query: Tensor, encoded: EncodedTokens, scaling: float, fp32_dot: bool
) -> SplitScores:
    """Scores of all rows of the query, as `fused_attend` has it, and all encoded tokens."""
    spec, codes = key.spec, encoded.key_codes
    group, head_dim = key.tokens_per_group, spec.head_dim
    batch, heads, query_len, _ = query.shape
    heads_per_kv = heads // spec.num_kv_heads
    rows = heads_per_kv * query_len
    words = codes.packed.view(torch.int16)
    columns = 16 if fp32_dot else 8
    pack = max(1, columns // power_of_two(rows)) if encoded.rotations is None else 1
    block_m = columns // pack
    blocks = cdiv(rows, block_m)
    scores = SplitScores(
        batch, spec.num_kv_heads, rows, encoded.length, 2 * group, blocks, query.device,
        balanced=encoded.pages is not None,
    )  # fmt: skip
    grid = (scores.num_splits, batch * spec.num_kv_heads, blocks)
    query = row_major(query)
    shapes = {
        "HEADS": heads_per_kv, "B": key.n_bits, "W": words.shape[-1], "D": head_dim, "GROUP": group,
        "PAGE": encoded.page_size, "SKIP": encoded.skip, "SPLIT": scores.split,
        "BLOCK_W": max(16, power_of_two(words.shape[-1])), "BLOCK_M": block_m, "FP32_DOT": fp32_dot,
        "HAS_LENGTHS": encoded.lengths is not None, "num_warps": _WARPS_FP32 if fp32_dot else _WARPS,
    }  # fmt: skip
    strides = (*query.stride()[:3], *words.stride()[:2], *codes.scale.stride()[:3])
    score_strides = scores.values.stride()[1:3]
    groups, per_split = encoded.length // group, scores.tokens_per_split // group
    sizes = (spec.num_kv_heads, query_len, groups, per_split, scaling * LOG2E, *encoded.table)
    written = (scores.values if encoded.lengths is None else encoded.lengths, scores.values, scores.split_max)
    if encoded.rotations is None:
        _scores_kernel[grid](
            query, words, codes.scale, codes.zero, *written, *strides, *score_strides, *sizes,
            BLOCK_N=min(group, 32), PACK=pack, num_stages=_STAGES, maxnreg=None if fp32_dot else _MAX_REGISTERS,
            **shapes, **pdl_launch_options(encoded.pages is None),
        )  # fmt: skip
        return scores
    tiles, offsets = encoded.rotations.tiles(group), encoded.rotations.offsets(group)
    rotated_scores_kernel[grid](
        query, words, codes.scale, codes.zero, tiles.cos, tiles.sin, offsets.cos, offsets.sin, *written, *strides,
        tiles.cos.stride(0) if tiles.cos.shape[0] > 1 else 0, *score_strides, *sizes,
        num_stages=_ROTATED_STAGES, **shapes, **pdl_launch_options(encoded.pages is None),
    )  # fmt: skip
    return scores
