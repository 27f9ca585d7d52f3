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

from kvcli.kernels.launch import cdiv, power_of_two
from kvcli.kernels.operands import in_thread_order, tokens_as_columns, tokens_as_rows
from kvcli.kernels.pages import origin, tile_start, token_offsets
from kvcli.kernels.pdl import pdl_launch_dependents, pdl_launch_options, pdl_wait
from kvcli.kernels.splits import SplitScores, batch_and_head, merge_splits, split_range, split_size
from kvcli.kernels.words import EVICT_FIRST, FIELD_SCALE, TINY, field_dot, field_fp32, mul2, pow2_above
from kvcli.methods.layer_codec import EncodedTokens
from kvcli.methods.scalar.codec import PerTokenCodec

# tuned on one H200, torch 2.11, triton 3.6
_BLOCK_N = 64
_SCAN = 256
_WARPS = 1
_WARPS_FP32 = 4
_STAGES = 1
_MAX_REGISTERS = 128

_MAX_GROUPS = 16
"""Groups of channels: their zeros are the 16 rows of one product."""


@triton.jit
def _load_scores(p_scores, m_m, last, N: tl.constexpr, WHOLE: tl.constexpr):
    """Scores [N / 8, M, 4, 2] of tokens 8 i + 2 t + j at [i, :, t, j]; -inf after token `last`, if not WHOLE."""
    n = tl.arange(0, N // 8)[:, None, None, None] * 8 + tl.arange(0, 4)[None, None, :, None] * 2
    n += tl.arange(0, 2)[None, None, None, :]
    mask = m_m[None, :, None, None]
    if not WHOLE:
        mask = mask & (n <= last)
    return tl.load(in_thread_order(p_scores[None, :, None, None], n, 8), mask=mask, other=float("-inf"))


@triton.jit
def _load_words(packed, last, N: tl.constexpr, W: tl.constexpr, BLOCK_W: tl.constexpr, WHOLE: tl.constexpr):
    """Words [BLOCK_W, N] of codes: row r is word r mod (BLOCK_W / 2) * 2 + r // (BLOCK_W / 2)."""
    o_n = tl.arange(0, N // 8)[:, None, None, None, None] * 8 + tl.arange(0, 2)[None, :, None, None, None]
    o_4 = tl.arange(0, 4)[None, None, None, :, None]
    o_w = tl.arange(0, BLOCK_W // 2)[None, None, :, None, None] * 2 + tl.arange(0, 2)[None, None, None, None, :]
    # the sum in this order leaves constant offsets to a thread's loads
    at = o_4 * (2 * W) + o_w + o_n * W if WHOLE else tl.minimum(o_n + o_4 * 2, last) * W + o_w
    p_words = in_thread_order(packed, at, 4 if W % 2 == 0 else 2)
    if W == BLOCK_W:
        words = tl.load(p_words, eviction_policy=EVICT_FIRST)
    else:
        words = tl.load(p_words, mask=o_w < W, other=0)
    return tokens_as_columns(words)


@triton.jit
def _load_zeros(zero, last, N: tl.constexpr, GROUPS: tl.constexpr, WHOLE: tl.constexpr):
    """Zeros [16, N] of each group of channels; rows from GROUPS on have any value."""
    o_n = tl.arange(0, N // 8)[:, None, None, None, None] * 8 + tl.arange(0, 2)[None, :, None, None, None]
    o_4 = tl.arange(0, 4)[None, None, None, :, None]
    o_g = tl.arange(0, 16)[None, None, :, None, None]
    at = o_n * GROUPS + o_4 * (2 * GROUPS) if WHOLE else tl.minimum(o_n + o_4 * 2, last) * GROUPS
    p_zero = in_thread_order(zero, at + tl.minimum(o_g, GROUPS - 1), 2)
    return tokens_as_columns(tl.load(p_zero, mask=o_g < (8 if GROUPS <= 8 else 16), other=0.0))


@triton.jit
def _load_scales(
    scale, last, N: tl.constexpr, M: tl.constexpr, GROUPS: tl.constexpr, PAIRS: tl.constexpr, WHOLE: tl.constexpr
):
    """Scales [N / 8, M, 4, 2] of each group of channels, the same for all M; a tuple."""
    T: tl.constexpr = N // 8
    n = tl.arange(0, T)[:, None, None, None] * 8 + tl.arange(0, 4)[None, None, :, None] * 2
    n += tl.zeros([1, M, 1, 1], tl.int32)
    if PAIRS and WHOLE:
        # two tokens and all their groups at once
        at = n * GROUPS + tl.arange(0, 2 * GROUPS)[None, None, None, :]
        b_c = tl.reshape(tl.load(in_thread_order(scale, at, 4 * GROUPS)), [T, M, 4, 2, GROUPS // 2, 2])
        even, odd = tl.split(b_c)
        if GROUPS == 2:
            b_cs = (tl.reshape(even, [T, M, 4, 2]), tl.reshape(odd, [T, M, 4, 2]))
        else:
            b_0, b_2 = tl.split(even)
            b_1, b_3 = tl.split(odd)
            b_cs = (b_0, b_1, b_2, b_3)
    else:
        n += tl.arange(0, 2)[None, None, None, :]
        at = n * GROUPS if WHOLE else tl.minimum(n, last) * GROUPS
        b_cs = ()
        for g in tl.static_range(GROUPS):
            b_cs = b_cs + (tl.load(in_thread_order(scale, at + g, 2)),)
    return b_cs


@triton.jit
def _add_tokens(
    b_sums, b_zero, b_total, p_scores, packed, scale, zero, table, begin, p_page, c_page, shift, m_m, start, count,
    B: tl.constexpr, W: tl.constexpr, D: tl.constexpr, GROUPS: tl.constexpr, PAIRS: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_W: tl.constexpr, N: tl.constexpr, FP32_DOT: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Adds N tokens from `start` on, of `count`, to the sums; WHOLE: there are as many.

    Pages are those of `tile_start`, for tokens counted from `begin` on.
    """
    GROUP: tl.constexpr = D // GROUPS
    FIELDS: tl.constexpr = 16 // B
    p_scores += start
    o_5, o_scale = 0, 0
    if PAGE > 0:
        # eight tokens that are loaded together are in one page
        o_8 = tl.arange(0, N // 8)[:, None, None, None] * 8
        o_8 = o_8 if WHOLE else tl.minimum(o_8, count - 1 - start)
        o_5, o_scale = o_8[:, None], tl.minimum(tl.arange(0, N), count - 1 - start)[None, :] if FP32_DOT else o_8
    packed = tile_start(packed, table, begin + start, o_5, begin + count, p_page, W, PAGE, N, N)
    scale = tile_start(scale, table, begin + start, o_scale, begin + count, c_page, GROUPS, PAGE, N, N)
    zero = tile_start(zero, table, begin + start, o_5, begin + count, c_page, GROUPS, PAGE, N, N)
    last = count - 1 - start
    b_p = tl.exp2(_load_scores(p_scores, m_m, last, N, WHOLE) + shift[None, :, None, None])
    words = _load_words(packed, last, N, W, BLOCK_W, WHOLE)
    b_z = _load_zeros(zero, last, N, GROUPS, WHOLE)
    new_sums = ()
    if FP32_DOT:
        b_p = tokens_as_rows(b_p)
        b_zero = tl.dot(b_z.to(tl.float32), b_p, b_zero, input_precision="ieee")
        b_total = tl.dot(tl.full([16, N], 1.0, tl.float32), b_p, b_total, input_precision="ieee")
        o_n = tl.minimum(tl.arange(0, N), last)
        for f in tl.static_range(FIELDS):
            group = tl.minimum((f * W + _words_of_rows(BLOCK_W)) // GROUP, GROUPS - 1)
            b_c = tl.load(scale + o_n[None, :] * GROUPS + group[:, None]).to(tl.float32)
            new_sums = new_sums + (tl.dot(field_fp32(words, f, B) * b_c, b_p, b_sums[f], input_precision="ieee"),)
    else:
        b_p = b_p.to(tl.float16)
        b_zero = tl.dot(b_z, tokens_as_rows(b_p), b_zero)
        b_total = tl.dot(tl.full([16, N], 1.0, tl.float16), tokens_as_rows(b_p), b_total)
        b_cs = _load_scales(scale, last, N, m_m.shape[0], GROUPS, PAIRS, WHOLE)
        for f in tl.static_range(FIELDS):
            b_ps = tokens_as_rows(mul2(b_p, b_cs[(f * W) // GROUP]))
            new_sums = new_sums + (field_dot(words, b_ps, b_sums[f], f, B, FP32_DOT),)
    return new_sums, b_zero, b_total


@triton.jit
def _words_of_rows(BLOCK_W: tl.constexpr):
    """The word in each row of `_load_words`: the low, then the high halves of 32 bits."""
    o_r = tl.arange(0, BLOCK_W)
    return o_r % (BLOCK_W // 2) * 2 + o_r // (BLOCK_W // 2)


@triton.jit(do_not_specialize=["length", "table_row"])
def _value_kernel(
    scores, packed, scale, zero, lengths, split_max, split_out, split_lse,
    s_head, s_row, p_batch, p_head, c_batch, c_head, num_kv_heads, length, per_split, rows, lse_unit, table, table_row,
    B: tl.constexpr, W: tl.constexpr, D: tl.constexpr, GROUPS: tl.constexpr, PAGE: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SCAN: tl.constexpr, SPLIT: tl.constexpr, FP32_DOT: tl.constexpr, HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    """out[m, d] = sum_n p_mn (code_nd scale_ng + zero_ng) / sum_n p_mn with p = exp2(scores - max), d in group g.

    Per field of the packed words, sum_n (p_mn scale_ng) code_nd is a product on tensor cores; the zeros and the sum of
    the weights are two more. Grid (num_splits, batch * num_kv_heads, ceil(rows / BLOCK_M)). One program: BLOCK_M query
    rows of one kv head and per_split tokens, BLOCK_N at a time.

    scores float32 [batch, num_kv_heads, rows, tokens], strides s_*, in units of log 2; packed int16 [batch,
    num_kv_heads, tokens, W], strides p_*, B-bit codes by `pack_planes`; scale and zero float16 [batch, num_kv_heads,
    tokens, GROUPS], strides c_*; lengths int32 [batch], tokens of each sequence, if HAS_LENGTHS; split_max float32
    [batch, num_kv_heads, num_splits, rows], largest score of each split; written: split_out float32 [batch,
    num_kv_heads, num_splits, rows, D] and split_lse, like split_max, in units of log 2 / lse_unit. With PAGE, packed,
    scale and zero are pages of so many tokens, as in `attend_kernels._scores_kernel`.

    PAIRS: there are 2 or 4 groups, and scales of even tokens begin at multiples of 4 GROUPS bytes; BLOCK_W and BLOCK_G
    are W and GROUPS padded; SCAN tokens whose scales are read at a time for their maximum; SPLIT: of `split_size`;
    FP32_DOT: float32 products.
    """
    pdl_launch_dependents()
    i_bh, i_b, i_h = batch_and_head(1, num_kv_heads)
    o_m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_w = _words_of_rows(BLOCK_W)
    o_z = tl.arange(0, 16)
    FIELDS: tl.constexpr = 16 // B
    LOW: tl.constexpr = FIELDS // 2
    GROUP: tl.constexpr = D // GROUPS
    m_m = o_m < rows
    m_w = o_w < W
    if HAS_LENGTHS:
        length = tl.load(lengths + i_b)
    per_split = split_size(length, per_split, SPLIT)
    first, count = split_range(length, per_split)
    count = tl.maximum(count, 0)  # beyond the end of the sequence
    p_scores = scores + i_bh * s_head + o_m.to(tl.int64) * s_row + first
    if PAGE > 0:
        table += i_b * table_row
    i_row, token, begin = origin(i_b, first, PAGE)
    packed += i_row * p_batch + i_h * p_head + token * W
    scale += i_row * c_batch + i_h * c_head + token * GROUPS
    zero += i_row * c_batch + i_h * c_head + token * GROUPS

    # the largest scale, so that weights times scales stay in the range of float16
    b_top = tl.zeros([SCAN, BLOCK_G], tl.float16)
    o_g = tl.arange(0, BLOCK_G)
    for start in range(0, count, SCAN):
        at = start + tl.arange(0, SCAN)
        mask = (at < count)[:, None] & (o_g < GROUPS)[None, :]
        p_scale = scale + token_offsets(table, begin, at[:, None], begin + count, c_batch, GROUPS, PAGE)
        b_top = tl.maximum(b_top, tl.load(p_scale + o_g[None, :], mask=mask, other=0.0))
    unit = pow2_above(tl.maximum(tl.max(tl.max(b_top, 0).to(tl.float32), 0), TINY))
    # products of the largest weight and scale are at most 2^14, so that small ones survive in float16
    lift = tl.minimum(14.0 - tl.log2(unit), 15.0)

    pdl_wait()
    row = (i_bh * tl.num_programs(0) + tl.program_id(0)) * rows + o_m
    highest = tl.load(split_max + row, mask=m_m, other=0.0)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    shift = lift - highest

    b_sums = ()
    for f in tl.static_range(FIELDS):
        b_sums = b_sums + (tl.zeros([BLOCK_W, BLOCK_M], tl.float32),)
    b_zero = tl.zeros([16, BLOCK_M], tl.float32)
    b_total = tl.zeros([16, BLOCK_M], tl.float32)
    in_full_tiles = count // BLOCK_N * BLOCK_N
    for start in range(0, in_full_tiles, BLOCK_N):
        b_sums, b_zero, b_total = _add_tokens(
            b_sums, b_zero, b_total, p_scores, packed, scale, zero, table, begin, p_batch, c_batch, shift, m_m,
            start, count, B, W, D, GROUPS, PAIRS, PAGE, BLOCK_W, BLOCK_N, FP32_DOT, True,
        )  # fmt: skip
    if in_full_tiles < count:
        b_sums, b_zero, b_total = _add_tokens(
            b_sums, b_zero, b_total, p_scores, packed, scale, zero, table, begin, p_batch, c_batch, shift, m_m,
            in_full_tiles, count, B, W, D, GROUPS, PAIRS, PAGE, BLOCK_W, BLOCK_N, FP32_DOT, False,
        )  # fmt: skip

    total = tl.max(b_total, 0)
    safe_total = tl.where(total > 0, total, 1.0)
    b_lse = tl.where(total > 0, tl.log2(safe_total) - shift, float("-inf"))
    tl.store(split_lse + row, b_lse * lse_unit, mask=m_m)
    for f in tl.static_range(FIELDS):
        b_out = b_sums[f] * (1.0 if FP32_DOT else FIELD_SCALE / (1 << (B * (f % LOW))))
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
    """softmax(scores) V for the values of `encoded`, whose codec `unsupported_values` accepts.

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
    pair = 2 * scale.shape[-1]
    aligned = scale.data_ptr() % (2 * pair) == 0 and all(stride % pair == 0 for stride in scale.stride()[:2])
    device = scale.device
    split_out = torch.empty(batch * kv_heads, scores.num_splits, rows, head_dim, device=device)
    split_lse = torch.empty(batch * kv_heads, scores.num_splits, rows, device=device)
    _value_kernel[(scores.num_splits, batch * kv_heads, blocks)](
        scores.values, words, scale, zero, scores.values if encoded.lengths is None else encoded.lengths,
        scores.split_max, split_out, split_lse,
        *scores.values.stride()[1:3], *words.stride()[:2], *scale.stride()[:2],
        kv_heads, scores.length, scores.tokens_per_split, rows, math.log(2) if scores.num_splits == 1 else 1.0,
        *encoded.table, PAGE=encoded.page_size, B=value.n_bits, W=words.shape[-1], D=head_dim, GROUPS=scale.shape[-1],
        PAIRS=aligned and pair in {4, 8}, BLOCK_W=max(16, power_of_two(words.shape[-1])),
        BLOCK_G=power_of_two(scale.shape[-1]), BLOCK_M=block_m, BLOCK_N=_BLOCK_N, SCAN=_SCAN, FP32_DOT=fp32_dot,
        SPLIT=scores.split, HAS_LENGTHS=encoded.lengths is not None, num_warps=_WARPS_FP32 if fp32_dot else _WARPS,
        num_stages=_STAGES,
        maxnreg=None if fp32_dot else _MAX_REGISTERS, **pdl_launch_options(),
    )  # fmt: skip
    if scores.num_splits == 1:
        return split_out, split_lse
    out = torch.empty(batch, kv_heads, rows, head_dim, device=device)
    lse = torch.empty(batch, kv_heads, rows, device=device)
    merge_splits(split_out, split_lse, out, lse)
    return out, lse
