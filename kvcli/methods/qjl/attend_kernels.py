"""Attention over QJL's codes: <S q, sign(S k)> from packed signs, values quantized per token.

With bits b in {0, 1} for the signs, <S q, 2 b - 1> = 2 <S q, b> - sum(S q): a product of masked words with the query's
sketch, and one number per query. Inlier and outlier channels have a sketch each; their scores add up. Three kernels per
layer, and a fourth if the tokens are split: sketch of the query, scores, softmax with the sum of the values, merge.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.launch import cdiv, power_of_two, row_major
from kvcli.kernels.offset import offset_scores
from kvcli.kernels.pages import origin, tile_start
from kvcli.kernels.pdl import pdl_launch_dependents, pdl_launch_options, pdl_wait
from kvcli.kernels.splits import LOG2E, SplitScores, batch_and_head, query_rows, split_range, split_size, without_first
from kvcli.kernels.words import EVICT_FIRST, FIELD_SCALE, field_dot, query_fields, query_in_units
from kvcli.methods.layer_codec import EncodedTokens, LayerCodec, PartialAttention
from kvcli.methods.qjl.codec import QJLKey
from kvcli.methods.scalar.codec import PerTokenValue
from kvcli.methods.scalar.value_kernels import unsupported_values, value_sum

# tuned on one H200, torch 2.11, triton 3.6
_BLOCK_N = 128
_WARPS = 1
_WARPS_FP32 = 4
_STAGES = 1
_SKETCH_BLOCK = 16  # divides the rows of every sketch that `unsupported` lets pass
_FEW_ROWS = 512  # of queries, up to which a step of one sequence would leave most of the GPU idle
_FEW_SKETCH_ROWS, _MANY_SKETCH_ROWS = 16, 64


@triton.jit(do_not_specialize=["total"])
def _sketch_query_kernel(
    query, channels, sketch, outlier_sketch, sketched, q_batch, q_head, q_time, num_kv_heads, query_len, total,
    HEADS: tl.constexpr, D: tl.constexpr, M: tl.constexpr, M_OUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """S q of the inlier channels, then S_out q of the outlier channels, in float32.

    Grid (ceil(total / BLOCK_M), (M + M_OUT) / BLOCK_K), total = batch * num_kv_heads * HEADS * query_len. One program:
    BLOCK_M query rows, of whichever sequences and heads, which all share the sketch, and BLOCK_K rows of one sketch,
    which divide M and M_OUT; BLOCK_D channels at a time, because each thread keeps its operands of a float32 product in
    registers.

    query [batch, num_heads, query_len, D] float, strides q_*, HEADS query heads per kv head; channels float32 [batch,
    num_kv_heads, D], 1 for outlier channels, 0 for others; sketch, outlier_sketch float32 [M, D] and [M_OUT, D];
    sketched float32 [batch, num_kv_heads, rows, M + M_OUT], written.
    """
    pdl_launch_dependents()
    o_r = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    m_r = o_r < total
    i_bh, o_m = o_r // (HEADS * query_len), o_r % (HEADS * query_len)
    p_query = query_rows(
        query, i_bh // num_kv_heads, i_bh % num_kv_heads, o_m, q_batch, q_head, q_time, query_len, HEADS
    )
    outlier = tl.program_id(1) * BLOCK_K >= M
    p_sketch = sketch + o_k * D
    if M_OUT > 0:
        p_sketch = tl.where(outlier, outlier_sketch + (o_k - M) * D, p_sketch)
    b_sq = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for start in range(0, D, BLOCK_D):
        o_d = start + tl.arange(0, BLOCK_D)
        mask = m_r[:, None] & (o_d < D)[None, :]
        b_q = tl.load(p_query[:, None] + o_d[None, :], mask=mask, other=0.0).to(tl.float32)
        b_out = tl.load(channels + i_bh[:, None] * D + o_d[None, :], mask=mask, other=0.0)
        b_q *= tl.where(outlier, b_out, 1.0 - b_out)
        b_s = tl.load(p_sketch[:, None] + o_d[None, :], mask=(o_d < D)[None, :], other=0.0)
        b_sq = tl.dot(b_q, tl.trans(b_s), b_sq, input_precision="ieee")
    tl.store(sketched + o_r[:, None] * (M + M_OUT) + o_k[None, :], b_sq, mask=m_r[:, None])


@triton.jit
def _load_sketched(p_sketched, m_m, o_w, W: tl.constexpr, FP32_DOT: tl.constexpr):
    """Sketched query rows at p_sketched [M] by bits of a word: 16 tensors [W, M], each row's unit and sum."""
    b_qs, unit = query_fields(p_sketched, m_m, o_w, 1, 16, W, 16 * W, 1, FP32_DOT)
    b_sum = tl.zeros([o_w.shape[0], p_sketched.shape[0]], tl.float32)
    for f in tl.static_range(16):
        b_sum += b_qs[f]
    return query_in_units(b_qs, unit, 1, FP32_DOT), unit, tl.sum(b_sum, 0)


@triton.jit
def _sign_dot(words, b_units, unit, total, FP32_DOT: tl.constexpr):
    """<S q, sign(S k)> of words [N, W] for each query row: [N, M]."""
    b_s = tl.zeros([words.shape[0], unit.shape[0]], tl.float32)
    for f in tl.static_range(16):
        b_s = field_dot(words, b_units[f], b_s, f, 1, FP32_DOT)
    if not FP32_DOT:
        b_s = b_s * FIELD_SCALE
    return b_s * (2.0 * unit)[None, :] - total[None, :]


@triton.jit(do_not_specialize=["length", "table_row"])
def _scores_kernel(
    sketched, signs, norm, outlier_signs, outlier_norm, lengths, scores, split_max,
    p_batch, p_head, n_batch, n_head, o_batch, o_head, s_head, s_row,
    num_kv_heads, length, rows, per_split, factor, outlier_factor, table, table_row,
    W: tl.constexpr, W_OUT: tl.constexpr, PAGE: tl.constexpr, SKIP: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FP32_DOT: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """scores[m, n] = factor norm_n <S q_m, sign(S k_n)>, plus the same of the outlier channels (QJL Definition 2), plus
    what is in scores if ADD.

    Grid (num_splits, batch * num_kv_heads, ceil(rows / BLOCK_M)). One program: BLOCK_M query rows of one kv head and
    per_split tokens, BLOCK_N at a time.

    sketched float32 [batch, num_kv_heads, rows, 16 (W + W_OUT)], S q of inlier, then of outlier channels; signs,
    outlier_signs int16 [batch, num_kv_heads, tokens, W] and [.., W_OUT], strides p_* and o_*; norm, outlier_norm
    float16 [batch, num_kv_heads, tokens, 1], strides n_*; lengths int32 [batch], tokens of each sequence, if
    HAS_LENGTHS; written in units of log 2: scores float32 [batch, num_kv_heads, rows, tokens], strides s_*, and
    split_max float32 [batch, num_kv_heads, num_splits, rows]. factor, outlier_factor: `norm_factor` / m times the
    scaling and log2(e). With PAGE, signs and norms are pages of so many tokens of the block table, int32 [batch,
    max_pages], stride table_row. Scores of the first SKIP tokens are -inf.

    SPLIT: of `split_size`. W_OUT is 0 without outlier channels; BLOCK_W and BLOCK_OUT are W and W_OUT padded; FP32_DOT:
    float32 products.
    """
    pdl_launch_dependents()
    i_bh, i_b, i_h = batch_and_head(1, num_kv_heads)
    o_m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_w = tl.arange(0, BLOCK_W)
    o_o = tl.arange(0, BLOCK_OUT)
    o_n = tl.arange(0, BLOCK_N)
    m_m = o_m < rows
    if HAS_LENGTHS:
        length = tl.load(lengths + i_b)
    per_split = split_size(length, per_split, SPLIT)
    first, count = split_range(length, per_split)
    if PAGE > 0:
        table += i_b * table_row
    i_row, token, begin = origin(i_b, first, PAGE)
    signs += i_row * p_batch + i_h * p_head + token * W
    norm += i_row * n_batch + i_h * n_head + token
    outlier_signs += i_row * o_batch + i_h * o_head + token * W_OUT
    outlier_norm += i_row * n_batch + i_h * n_head + token
    tile, end = 0, begin + count if PAGE > 0 else 0
    p_scores = scores + i_bh * s_head + o_m.to(tl.int64)[None, :] * s_row + first
    p_sketched = sketched + (i_bh * rows + o_m) * ((W + W_OUT) * 16)
    pdl_wait()
    b_units, unit, total = _load_sketched(p_sketched, m_m, o_w, W, FP32_DOT)
    if W_OUT > 0:
        b_outs, out_unit, out_total = _load_sketched(p_sketched + W * 16, m_m, o_o, W_OUT, FP32_DOT)
    b_max = tl.full([BLOCK_N, BLOCK_M], float("-inf"), tl.float32)
    for start in range(0, count, BLOCK_N):
        n = start + o_n
        at = tl.minimum(n, count - 1)
        o_t = at
        if PAGE > 0:
            tile, o_t = begin + start, at - start
        p_w = tile_start(signs, table, tile, o_t[:, None], end, p_batch, W, PAGE, BLOCK_N, BLOCK_N)
        p_w = p_w + o_t[:, None] * W + o_w[None, :]
        words = tl.load(p_w, mask=(o_w < W)[None, :], other=0, eviction_policy=EVICT_FIRST)
        p_norm = tile_start(norm, table, tile, o_t, end, n_batch, 1, PAGE, BLOCK_N, BLOCK_N) + o_t
        b_n = tl.load(p_norm).to(tl.float32) * factor
        b_s = _sign_dot(words, b_units, unit, total, FP32_DOT) * b_n[:, None]
        if W_OUT > 0:
            p_w = tile_start(outlier_signs, table, tile, o_t[:, None], end, o_batch, W_OUT, PAGE, BLOCK_N, BLOCK_N)
            p_w = p_w + o_t[:, None] * W_OUT + o_o[None, :]
            words = tl.load(p_w, mask=(o_o < W_OUT)[None, :], other=0, eviction_policy=EVICT_FIRST)
            p_norm = tile_start(outlier_norm, table, tile, o_t, end, n_batch, 1, PAGE, BLOCK_N, BLOCK_N) + o_t
            b_n = tl.load(p_norm).to(tl.float32) * outlier_factor
            b_s += _sign_dot(words, b_outs, out_unit, out_total, FP32_DOT) * b_n[:, None]
        if ADD:
            b_s += tl.load(p_scores + at[:, None], mask=m_m[None, :], other=0.0)
        b_s = without_first(b_s, first + n, SKIP)
        b_max = tl.maximum(b_max, b_s)
        tl.store(p_scores + n[:, None], b_s, mask=(n < count)[:, None] & m_m[None, :])
    row = (i_bh * tl.num_programs(0) + tl.program_id(0)) * rows + o_m
    tl.store(split_max + row, tl.max(b_max, 0), mask=m_m)


QJLLayer = LayerCodec[QJLKey, PerTokenValue]


def unsupported(codec: QJLLayer) -> str | None:
    """Why these kernels cannot read a layer's codes; None if they can."""
    for sketch in (codec.key.sketch, codec.key.outlier_sketch):
        if len(sketch) % 16:
            return f"a sketch of {len(sketch)} rows; choose a multiple of 16"
    return unsupported_values(codec.value)


def fused_attend(codec: QJLLayer, query: Tensor, encoded: EncodedTokens, scaling: float) -> PartialAttention:
    """softmax(scaling score(q, k)) V over encoded tokens, an `AttendCodes`; float32 queries multiply in float32."""
    key, codes, channels = codec.key, encoded.key_codes, encoded.key_state.channels
    batch, heads, query_len, head_dim = query.shape
    kv_heads = key.spec.num_kv_heads
    rows = heads // kv_heads * query_len
    inliers, outliers = len(key.sketch), len(key.outlier_sketch)
    fp32_dot = query.dtype == torch.float32
    block_m = 16 if fp32_dot else 8
    scores = SplitScores(
        batch, kv_heads, rows, encoded.length, _BLOCK_N, cdiv(rows, block_m), query.device,
        balanced=encoded.pages is not None,
    )  # fmt: skip
    if codec.offset is not None:  # before the kernels that overlap
        assert encoded.rotations is not None
        offset_scores(query, codec.offset, encoded.rotations, scores.values, scaling * LOG2E)

    query = row_major(query)
    sketched = torch.empty(batch, kv_heads, rows, inliers + outliers, device=query.device)
    total = batch * kv_heads * rows
    block_q = _FEW_SKETCH_ROWS if total <= _FEW_ROWS else _MANY_SKETCH_ROWS
    _sketch_query_kernel[(cdiv(total, block_q), (inliers + outliers) // _SKETCH_BLOCK)](
        query, channels if outliers else torch.zeros_like(channels), key.sketch, key.outlier_sketch,
        sketched, *query.stride()[:3], kv_heads, query_len, total,
        HEADS=heads // kv_heads, D=head_dim, M=inliers, M_OUT=outliers,
        BLOCK_M=block_q, BLOCK_K=_SKETCH_BLOCK, BLOCK_D=32, num_warps=4, num_stages=2,
    )  # fmt: skip

    signs = codes.signs.view(torch.int16)
    outlier_signs = codes.outlier_signs.view(torch.int16) if outliers else signs
    weight = scaling * LOG2E * key.norm_factor
    _scores_kernel[(scores.num_splits, batch * kv_heads, cdiv(rows, block_m))](
        sketched, signs, codes.norm, outlier_signs, codes.outlier_norm,
        scores.values if encoded.lengths is None else encoded.lengths, scores.values, scores.split_max,
        *signs.stride()[:2], *codes.norm.stride()[:2], *outlier_signs.stride()[:2], *scores.values.stride()[1:3],
        kv_heads, encoded.length, rows, scores.tokens_per_split, weight / inliers, weight / max(1, outliers),
        *encoded.table, W=inliers // 16, W_OUT=outliers // 16, PAGE=encoded.page_size,
        SKIP=encoded.skip, SPLIT=scores.split, BLOCK_W=max(16, power_of_two(inliers // 16)),
        BLOCK_OUT=max(16, power_of_two(max(1, outliers // 16))),
        BLOCK_M=block_m, BLOCK_N=_BLOCK_N, FP32_DOT=fp32_dot, HAS_LENGTHS=encoded.lengths is not None,
        ADD=codec.offset is not None, num_warps=_WARPS_FP32 if fp32_dot else _WARPS, num_stages=_STAGES,
        **pdl_launch_options(),
    )  # fmt: skip
    out, lse = value_sum(codec.value, scores, encoded, fp32_dot)
    return out.view(query.shape), lse.view(query.shape[:3])
