"""Softmax of given scores, and the weighted sum of KLT's values: the second half of attention over codes.

As `scalar.value_kernels`, but a token has one scale, its gain, so zeros are products of one sum; sums of codes are
transformed once per query row.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.launch import cdiv, power_of_two
from kvcli.kernels.operands import in_thread_order, tokens_as_columns, tokens_as_rows
from kvcli.kernels.pages import origin, tile_start
from kvcli.kernels.pdl import pdl_launch_dependents, pdl_launch_options, pdl_wait
from kvcli.kernels.splits import SplitScores, batch_and_head, merge_splits, split_range, split_size
from kvcli.kernels.words import FIELD_SCALE
from kvcli.methods.klt.codec import KLTValue
from kvcli.methods.klt.field_kernels import (
    COLUMNS,
    FIELDS,
    band_rows,
    gains,
    head_bands,
    head_bytes,
    head_planes,
    head_subsets,
    subset_band,
    words_before,
)
from kvcli.methods.klt.fields import BANDS, MOST_BYTES
from kvcli.methods.layer_codec import EncodedTokens

# tuned on one H100, torch 2.11, triton 3.6
_BLOCK_N = 32
_BLOCK_C = 16
_WARPS = 1
_WARPS_FP32 = 4
_MAX_REGISTERS = {False: 128, True: 168}  # without and with a trellis

_BANDS = tl.constexpr(BANDS)
_MOST_BYTES = tl.constexpr(MOST_BYTES)
_LIFT = tl.constexpr(6.0)
"""Weights are multiplied by 2^6: with the largest gain, 2^7.94, they stay in the range of float16."""


@triton.jit
def _in_any_order(x):
    """x [N / 16, C, 4, 4] as the second operand of a sum of all, [N, C]; a thread has what `tokens_as_rows` gives it.

    Triton has products of 8-bit numbers, as gains are, and of what `tl.join` made in other registers than others.
    """
    x = tl.permute(tl.reshape(x, [x.shape[0], x.shape[1], 4, 2, 2]), [0, 3, 2, 4, 1])
    return tl.reshape(x, [x.shape[0] * 16, x.shape[4]])


@triton.jit
def _load_tokens(
    p_scores, p_head, num_bytes, p_gain, table, begin, p_page, p_time, g_page, g_time, m_m, start, count,
    PLANES: tl.constexpr, W: tl.constexpr, BLOCK_W: tl.constexpr, N: tl.constexpr, GAINS: tl.constexpr,
    PAGE: tl.constexpr, WHOLE: tl.constexpr, TRELLIS: tl.constexpr,
):  # fmt: skip
    """Scores and stored gains [N / 16, M, 4, 4], planes and, if TRELLIS, `words_before` of N tokens from `start` on, of
    `count`.

    Pages are those of `tile_start`, for tokens counted from `begin` on. WHOLE: there are as many.
    """
    last = count - 1 - start
    # tokens 16 i + 4 t + j at [i, :, t, j]
    n = tl.arange(0, N // 16)[:, None, None, None] * 16 + tl.arange(0, 4)[None, None, :, None] * 4
    n += tl.arange(0, 4)[None, None, None, :] + tl.zeros([1, m_m.shape[0], 1, 1], tl.int32)
    m_n = m_m[None, :, None, None] if WHOLE else m_m[None, :, None, None] & (n <= last)
    b_s = tl.load(in_thread_order((p_scores + start)[None, :, None, None], n, 16), mask=m_n, other=float("-inf"))
    at = n if WHOLE else tl.minimum(n, last)
    p_gain = tile_start(p_gain, table, begin + start, at, begin + count, g_page, g_time, PAGE, N, N)
    b_g = tl.load(in_thread_order(p_gain, at * g_time, GAINS if WHOLE else 1))
    # tokens 16 i + 4 t + j at [i, j, :, t, :]
    t = tl.arange(0, N // 16)[:, None, None, None, None] * 16 + tl.arange(0, 4)[None, None, None, :, None] * 4
    t += tl.arange(0, 4)[None, :, None, None, None]
    t = t if WHOLE else tl.minimum(t, last)
    o_q = tl.arange(0, BLOCK_W // 2)[None, None, :, None, None]
    p_head = tile_start(p_head, table, begin + start, t, begin + count, p_page, p_time, PAGE, N, N)
    p_word = in_thread_order(p_head, t * p_time + o_q * 2, 2)
    before = words_before(p_word, o_q * 2, 2, W) if TRELLIS else ()
    return b_s, b_g, head_planes(p_word, o_q * 2, num_bytes, PLANES, 2, W), before


@triton.jit
def _add_tokens(
    b_sums, b_ones, loaded, bands, coded, shift, PLANES: tl.constexpr, BLOCK_W: tl.constexpr, FP32_DOT: tl.constexpr,
    TRELLIS: tl.constexpr,
):  # fmt: skip
    """Adds tokens that `_load_tokens` loaded to `_sum_tokens`' sums."""
    b_s, b_g, words, before = loaded
    b_p = tl.exp2(b_s + shift[None, :, None, None])
    b_pg = b_p * gains(b_g)
    dtype: tl.constexpr = tl.float32 if FP32_DOT else tl.float16
    b_p, b_pg, b_one = b_p.to(dtype), b_pg.to(dtype), tl.full([16, b_s.shape[0] * 16], 1.0, dtype)
    new_ones = (
        tl.dot(b_one, _in_any_order(b_p), b_ones[0], input_precision="ieee"),
        tl.dot(b_one, _in_any_order(b_pg), b_ones[1], input_precision="ieee"),
    )
    b_pg = tokens_as_rows(b_pg)
    planes = ()
    for i in tl.static_range(PLANES):
        planes = planes + (tokens_as_columns(words[i]),)
    new_sums = ()
    for f in tl.static_range(_BANDS):
        b_c = band_rows(planes, bands[f], FP32_DOT)
        new_sums = new_sums + (tl.dot(b_c, b_pg, b_sums[f], input_precision="ieee"),)
    if TRELLIS:
        lane = tl.arange(0, BLOCK_W // 2)[None, None, :, None, None] * 2
        even, odd = head_subsets(words[0], before, lane, coded, 2)
        subsets = tokens_as_columns(even), tokens_as_columns(odd)
        for f in tl.static_range(_BANDS):
            b_c = band_rows(subsets, subset_band(f, FP32_DOT), FP32_DOT)
            new_sums = new_sums + (tl.dot(b_c, b_pg, b_sums[_BANDS + f], input_precision="ieee"),)
    return new_sums, new_ones


@triton.jit
def _sum_tokens(
    p_scores, p_head, num_bytes, p_gain, bands, coded, table, begin, p_page, p_time, g_page, g_time, shift, m_m, count,
    PLANES: tl.constexpr, W: tl.constexpr, BLOCK_W: tl.constexpr, N: tl.constexpr, GAINS: tl.constexpr,
    PAGE: tl.constexpr, FP32_DOT: tl.constexpr, TRELLIS: tl.constexpr,
):  # fmt: skip
    """Sums of `count` tokens of a head of at most PLANES bytes: of each band's fields and then, if TRELLIS, of each
    band's subsets [BLOCK_W, M], and of weights [16, M].
    """
    b_sums = ()
    for f in tl.static_range(2 * _BANDS if TRELLIS else _BANDS):
        b_sums = b_sums + (tl.zeros([BLOCK_W, m_m.shape[0]], tl.float32),)
    b_ones = (tl.zeros([16, m_m.shape[0]], tl.float32), tl.zeros([16, m_m.shape[0]], tl.float32))
    in_whole_blocks = count // N * N
    # each block is loaded before the previous one is added; without whole blocks, one token is loaded and not used
    stride = tl.where(in_whole_blocks > 0, 1, 0)
    following = _load_tokens(
        p_scores, p_head, num_bytes, p_gain, table, begin, p_page, p_time * stride, g_page, g_time * stride, m_m, 0,
        count, PLANES, W, BLOCK_W, N, GAINS, PAGE, True, TRELLIS,
    )  # fmt: skip
    for start in range(0, in_whole_blocks, N):
        loaded = following
        following = _load_tokens(
            p_scores, p_head, num_bytes, p_gain, table, begin, p_page, p_time, g_page, g_time, m_m,
            tl.minimum(start + N, in_whole_blocks - N), count, PLANES, W, BLOCK_W, N, GAINS, PAGE, True, TRELLIS,
        )  # fmt: skip
        b_sums, b_ones = _add_tokens(b_sums, b_ones, loaded, bands, coded, shift, PLANES, BLOCK_W, FP32_DOT, TRELLIS)
    if in_whole_blocks < count:
        loaded = _load_tokens(
            p_scores, p_head, num_bytes, p_gain, table, begin, p_page, p_time, g_page, g_time, m_m, in_whole_blocks,
            count, PLANES, W, BLOCK_W, N, GAINS, PAGE, False, TRELLIS,
        )  # fmt: skip
        b_sums, b_ones = _add_tokens(b_sums, b_ones, loaded, bands, coded, shift, PLANES, BLOCK_W, FP32_DOT, TRELLIS)
    return b_sums, b_ones


@triton.jit(do_not_specialize=["length", "per_split", "table_row"])
def _value_kernel(
    scores, packed, gain, fields, lengths, split_max, split_out, split_lse,
    s_head, s_row, p_batch, p_time, g_batch, g_head, g_time, num_kv_heads, length, per_split, rows, lse_unit,
    table, table_row,
    W: tl.constexpr, D: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GAINS: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr, JOINT: tl.constexpr, FP32_DOT: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, TRELLIS: tl.constexpr,
):  # fmt: skip
    """out[m, d] = sum_n p_mn g_n (c_nd - l_d / 2) / sum_n p_mn, p = exp2(scores - max), of a split of tokens.

    Grid (num_splits, batch * num_kv_heads, ceil(rows / BLOCK_M)); rows are those of all JOINT heads of a group, and c
    and g those of one head. Arguments are those of `_scores_kernel`; written: split_out float32 [batch, num_kv_heads,
    num_splits, rows, D] and split_lse [batch, num_kv_heads, num_splits, rows], the same for all heads of a group, in
    units of log 2 / lse_unit. GAINS: what addresses of the gains of every fourth token are multiples of.
    """
    pdl_launch_dependents()
    i_bh, i_b, i_h = batch_and_head(1, num_kv_heads)
    o_m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_r = tl.arange(0, BLOCK_W)
    o_w = o_r % (BLOCK_W // 2) * 2 + o_r // (BLOCK_W // 2)  # as `band_rows` has them
    m_m, m_w = o_m < rows, o_w < W
    if HAS_LENGTHS:
        length = tl.load(lengths + i_b)
    per_split = split_size(length, per_split, SPLIT)
    first, count = split_range(length, per_split)
    first, count = tl.where(count > 0, first, 0), tl.maximum(count, 0)  # 0 beyond the end of the sequence
    fields += i_h * FIELDS
    if PAGE > 0:
        table += i_b * table_row
    i_row, token, begin = origin(i_b, first, PAGE)
    p_head, num_bytes = head_bytes(packed + i_row * p_batch + token * p_time, fields, W)
    bands, coded = head_bands(fields, FP32_DOT), tl.load(fields + _BANDS * COLUMNS + 2)
    p_gain = gain + i_row * g_batch + i_h * g_head + token * g_time
    p_scores = scores + i_bh // JOINT * s_head + o_m.to(tl.int64) * s_row + first

    pdl_wait()
    row = (i_bh * tl.num_programs(0) + tl.program_id(0)) * rows + o_m
    of_group = (i_bh // JOINT * tl.num_programs(0) + tl.program_id(0)) * rows + o_m
    highest = tl.load(split_max + of_group, mask=m_m, other=0.0)
    shift = _LIFT - tl.where(highest == float("-inf"), 0.0, highest)
    # heads of at most two bytes per channel are read with half of the selections
    if num_bytes <= 2:
        b_sums, b_ones = _sum_tokens(
            p_scores, p_head, num_bytes, p_gain, bands, coded, table, begin, p_batch, p_time, g_batch, g_time, shift,
            m_m, count, 2, W, BLOCK_W, BLOCK_N, GAINS, PAGE, FP32_DOT, TRELLIS,
        )  # fmt: skip
    else:
        b_sums, b_ones = _sum_tokens(
            p_scores, p_head, num_bytes, p_gain, bands, coded, table, begin, p_batch, p_time, g_batch, g_time, shift,
            m_m, count, _MOST_BYTES, W, BLOCK_W, BLOCK_N, GAINS, PAGE, FP32_DOT, TRELLIS,
        )  # fmt: skip
    total, gained = tl.max(b_ones[0], 0), tl.max(b_ones[1], 0)
    safe_total = tl.where(total > 0, total, 1.0)
    b_lse = tl.where(total > 0, tl.log2(safe_total) - shift, float("-inf"))
    tl.store(split_lse + row, b_lse * lse_unit, mask=m_m)
    for f in tl.static_range(_BANDS):
        b_out, last = b_sums[f], tl.load(fields + f * COLUMNS + 2)
        if not FP32_DOT:
            b_out = b_out * (FIELD_SCALE * tl.exp2(-tl.load(fields + f * COLUMNS + 1).to(tl.float32)))
        if TRELLIS:
            b_subset = b_sums[_BANDS + f] if FP32_DOT else b_sums[_BANDS + f] * (FIELD_SCALE * 2.0 ** (-(f // 2 * 2)))
            b_out = tl.where(f < coded, 4.0 * b_out + b_subset, 0.0)
            last = tl.where(f < coded, 4 * last + 3, 0)
        b_out = (b_out - last.to(tl.float32) * 0.5 * gained[None, :]) / safe_total[None, :]
        tl.store(split_out + row[None, :] * D + (f * W + o_w)[:, None], b_out, mask=m_w[:, None] & m_m[None, :])


@triton.jit
def _transform_kernel(
    coded, coded_lse, basis, mean, out, lse, num_kv_heads, rows,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, JOINT: tl.constexpr,
):  # fmt: skip
    """out = B x + mean of weighted sums x of coded vectors, 0 where no token was: lse is -inf.

    Grid (batch * num_kv_heads, ceil(D / BLOCK_C), ceil(rows / BLOCK_M)). coded float32 [batch, num_kv_heads,
    JOINT * rows, D] and coded_lse float32 [batch, num_kv_heads, JOINT * rows] are of the rows of all JOINT heads that
    share a transform; out float32 [batch, num_kv_heads, rows, D] and lse float32 [batch, num_kv_heads, rows] are
    written; basis float32 [num_kv_heads / JOINT, JOINT * D, JOINT * D], mean [num_kv_heads, D].
    """
    pdl_launch_dependents()
    i_bh, _, i_h = batch_and_head(0, num_kv_heads)
    i_own = i_h % JOINT
    o_m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_k, o_c = tl.arange(0, BLOCK_D), tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_m, m_k, m_c = o_m < rows, o_k < D, o_c < D
    p_basis = basis + i_h * (JOINT * D * D) + o_c[None, :] * (JOINT * D) + o_k[:, None]
    b_mean = tl.load(mean + i_h * D + o_c, mask=m_c, other=0.0)
    b_basis = tl.load(p_basis, mask=m_k[:, None] & m_c[None, :], other=0.0)
    pdl_wait()
    row = (i_bh - i_own) * JOINT * rows + i_own * rows + o_m
    b_out = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for i in tl.static_range(JOINT):
        if i > 0:
            b_basis = tl.load(p_basis + i * D, mask=m_k[:, None] & m_c[None, :], other=0.0)
        p_x = coded + (row + i * JOINT * rows)[:, None] * D + o_k[None, :]
        b_x = tl.load(p_x, mask=m_m[:, None] & m_k[None, :], other=0.0)
        b_out = tl.dot(b_x, b_basis, b_out, input_precision="tf32x3")
    b_lse = tl.load(coded_lse + row, mask=m_m, other=float("-inf"))
    b_out = tl.where((b_lse == float("-inf"))[:, None], 0.0, b_out + b_mean[None, :])
    own = i_bh * rows + o_m
    tl.store(out + own[:, None] * D + o_c[None, :], b_out, mask=m_m[:, None] & m_c[None, :])
    if JOINT > 1:
        tl.store(lse + own, b_lse, mask=m_m & (tl.program_id(1) == 0))


def value_sum(value: KLTValue, scores: SplitScores, encoded: EncodedTokens, fp32_dot: bool) -> tuple[Tensor, Tensor]:
    """softmax(scores) V for the values of `encoded`.

    Returns:
        out float32 [batch, num_kv_heads, rows, head_dim] and lse float32 [batch, num_kv_heads, rows], natural.
    """
    codes, head_dim, joint = encoded.value_codes, value.spec.head_dim, value.joint
    batch, groups, rows, _ = scores.values.shape
    kv_heads = groups * joint
    block_m = 16 if fp32_dot else 8
    gain = codes.gain
    aligned = gain.data_ptr() % 4 == 0 and all(stride % 4 == 0 for stride in gain.stride()[:2])
    split_out = torch.empty(batch * kv_heads, scores.num_splits, rows, head_dim, device=codes.packed.device)
    split_lse = torch.empty(batch * kv_heads, scores.num_splits, rows, device=codes.packed.device)
    _value_kernel[(scores.num_splits, batch * kv_heads, cdiv(rows, block_m))](
        scores.values, codes.packed, gain, value.tables.fields,
        scores.split_max if encoded.lengths is None else encoded.lengths, scores.split_max, split_out, split_lse,
        *scores.values.stride()[1:3], codes.packed.stride(0), codes.packed.stride(2), *gain.stride()[:3],
        kv_heads, scores.length, scores.tokens_per_split, rows, math.log(2) if scores.num_splits == 1 else 1.0,
        *encoded.table,
        W=value.width, D=head_dim, BLOCK_W=max(16, power_of_two(value.width)), BLOCK_M=block_m, BLOCK_N=_BLOCK_N,
        GAINS=4 if aligned else 1, PAGE=encoded.page_size, SPLIT=scores.split, JOINT=joint, FP32_DOT=fp32_dot,
        HAS_LENGTHS=encoded.lengths is not None, TRELLIS=value.code.trellis,
        num_warps=_WARPS_FP32 if fp32_dot else _WARPS, num_stages=1,
        maxnreg=None if fp32_dot else _MAX_REGISTERS[value.code.trellis], **pdl_launch_options(),
    )  # fmt: skip
    coded, lse = split_out.view(batch, kv_heads, -1, head_dim), split_lse.view(batch, kv_heads, -1)
    if scores.num_splits > 1:
        coded = torch.empty(batch, kv_heads, rows, head_dim, device=gain.device)
        lse = torch.empty(batch, kv_heads, rows, device=gain.device)
        merge_splits(split_out, split_lse, coded, lse)
    rows //= joint
    out = torch.empty(batch, kv_heads, rows, head_dim, device=gain.device)
    own_lse = lse if joint == 1 else torch.empty(batch, kv_heads, rows, device=gain.device)
    _transform_kernel[(batch * kv_heads, cdiv(head_dim, _BLOCK_C), cdiv(rows, 16))](
        coded, lse, value.basis, value.mean, out, own_lse, kv_heads, rows, D=head_dim,
        BLOCK_D=max(16, power_of_two(head_dim)), BLOCK_M=16, BLOCK_C=_BLOCK_C, JOINT=joint, num_warps=4,
        **pdl_launch_options(),
    )  # fmt: skip
    return out, own_lse
