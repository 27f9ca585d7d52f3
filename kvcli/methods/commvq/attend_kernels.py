"""Attention over CommVQ's codes (arXiv 2506.18879): key scores, value bits summed under the softmax, value codebook.

Here is the Triton kernel of the scores (Eq. 18-20). A token's codewords are summed once per kv head, those of u_a and
those of u_b apart, so that one table serves both; then u_a + i u_b is formed once (`codeword_kernels.py`). The rotation
is split as in `TokenRotations.tiles`: the position of a tile goes into the query, the offset within the tile is one
small table. Tuned on one H200, torch 2.11, triton 3.6.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.launch import cdiv, power_of_two, row_major
from kvcli.kernels.offset import offset_scores
from kvcli.kernels.pages import origin, tile_start
from kvcli.kernels.pdl import pdl_launch_dependents
from kvcli.kernels.splits import LOG2E
from kvcli.kernels.words import fma2
from kvcli.methods.commvq.codeword_kernels import MAX_STAGES, code_words, codeword_sums, four_per_thread, halves_of_sums
from kvcli.methods.commvq.config import CommVQConfig
from kvcli.methods.commvq.keys import CommVQKeyCodec
from kvcli.methods.commvq.value_kernels import apply_codebook, bit_sums
from kvcli.methods.commvq.values import CommVQValueCodec
from kvcli.methods.head_groups import KeyGroups
from kvcli.methods.layer_codec import EncodedTokens, LayerCodec, PartialAttention

_TILE = 64
_WARPS = 4
_WORDS_AT_A_TIME = 1024
"""Words of a table row times tokens, eight for each thread: two gathers of 16 bytes."""

_LEAST_PAIRS = 8
"""Channel pairs of a group that fill the least depth of a product, 16."""

_TABLE_BYTES = 11 * 2**14
"""Bytes of codebook tables per pass (176 KiB), which must fit in L1."""


@triton.jit
def _rotated(b_re, b_im, cos, sin, at):
    """b_re + i b_im [T, W] times cos + i sin of the table, x and y, in its dtype: [T, W, 2]."""
    b_cos, b_sin = tl.load(four_per_thread(cos, at)), tl.load(four_per_thread(sin, at))
    b_re, b_im = b_re.to(b_cos.dtype), b_im.to(b_cos.dtype)
    if b_cos.dtype == tl.float16:
        return tl.join(fma2(b_re, b_cos, -(b_im * b_sin)), fma2(b_im, b_cos, b_re * b_sin))
    return tl.join(b_re * b_cos - b_im * b_sin, b_im * b_cos + b_re * b_sin)


@triton.jit
def _as_operand(first, second):
    """[T, W, 2] of both halves of words, tokens in the order of `_tokens`, as a first operand [T, 4 W].

    Its columns are x and then y of the first and then the second halves. For W = 16 and 16 tokens per warp this moves
    nothing: four threads hold the words of a token in order, and those of another one 8 rows below, as products do.
    """
    T: tl.constexpr = first.shape[0]
    W: tl.constexpr = first.shape[1]
    x = tl.reshape(tl.join(first, second), [2, T // 16, 8, W, 2, 2])
    return tl.reshape(tl.permute(x, [1, 0, 2, 4, 5, 3]), [T, 4 * W])


@triton.jit
def _tokens(T: tl.constexpr):
    """T tokens, a multiple of 16: eight of each sixteen, then the others."""
    n = tl.arange(0, T)
    return n % (T // 2) // 8 * 16 + n // (T // 2) * 8 + n % 8


@triton.jit
def _padded(x, COLUMNS: tl.constexpr):
    """x [K, M], and zeros on the right: [K, COLUMNS], a multiple of M by a power of two."""
    if x.shape[1] < COLUMNS:
        both = tl.permute(tl.join(x, tl.zeros_like(x)), [0, 2, 1])
        x = _padded(tl.reshape(both, [x.shape[0], 2 * x.shape[1]]), COLUMNS)
    return x


@triton.jit(do_not_specialize=["length", "table_row"])
def _key_scores_kernel(
    query, packed, norm, table, pair_scale, tile_cos, tile_sin, offset_cos, offset_sin, lengths, scores,
    q_batch, q_head, q_time, p_batch, p_time, n_batch, n_head, n_time, t_batch, s_head, s_row,
    num_kv_heads, query_len, length, scaling, pages, table_row,
    HEADS: tl.constexpr, STAGES: tl.constexpr, FIRST: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
    CODE_BITS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, PITCH: tl.constexpr, PAGE: tl.constexpr,
    ALIGNED: tl.constexpr, WORDS: tl.constexpr, TILE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr,
    COLUMNS: tl.constexpr, FP32_DOT: tl.constexpr, ADD: tl.constexpr, HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    """scores = scaling * norm * Re<q, R_t sum_r (u_a + i u_b)> over stages FIRST..FIRST + R - 1; added to what is in
    scores if ADD. One group of pairs after the other: gathers of several groups at once would change layout each.

    Grid (ceil(length / TILE), batch * ceil(rows / BLOCK_M), num_kv_heads), rows = HEADS * query_len per kv head.
    query [batch, num_kv_heads * HEADS, query_len, D] any float; packed [batch, 1, time, PITCH bytes], int32 words if
    ALIGNED, else uint8; norm float16 [batch, 1 or num_kv_heads, time, 1]; table int32 [num_kv_heads, GROUPS, STAGES, N,
    g/2] of `pack_codebook`; pair_scale float32 [num_kv_heads, GROUPS, g]; tile_cos and tile_sin float32 [batch or 1,
    tiles, D/2], rotation of each tile's first position; offset_cos and offset_sin [2 GROUPS, TILE, g/2], two halves of
    each group's pairs, float16, or float32 if FP32_DOT; lengths int32 [batch], tokens of each sequence, if HAS_LENGTHS;
    scores float32 [batch, num_kv_heads, rows, >= length], written up to a sequence's end, base-2 (`scaling` includes
    log2(e)). q_, p_, n_, t_, s_ are strides; `length` tokens. With PAGE, packed and norm are pages of so many tokens of
    the block table, int32 [batch, max_pages], stride table_row. STAGES: all stages; CODE_BITS per code; WORDS: 32-bit
    words that hold R codes; BLOCK_T tokens and BLOCK_M rows at a time, which are padded to COLUMNS for products;
    FP32_DOT: float32 products instead of float16.
    """
    pdl_launch_dependents()
    i_t = tl.program_id(0)
    # all sequences of a head, then the next head: programs that run at the same time share a codebook
    blocks_m = tl.cdiv(HEADS * query_len, BLOCK_M)
    i_b = (tl.program_id(1) // blocks_m).to(tl.int64)
    if HAS_LENGTHS:
        length = tl.load(lengths + i_b)
        if i_t * TILE >= length:
            return
    i_h = tl.program_id(2).to(tl.int64)
    o_m = tl.program_id(1) % blocks_m * BLOCK_M + tl.arange(0, BLOCK_M)
    PAIRS: tl.constexpr = D // 2
    PART: tl.constexpr = PAIRS // GROUPS // 2
    o_w = tl.arange(0, PART)

    # [4 PART, M] per group: the queries of this kv head, rotated back by the tile's position, in units of the codebook;
    # rows in the order of `_as_operand`
    o_k = tl.arange(0, 4 * PART)
    place, is_y = o_k % (2 * PART), o_k >= 2 * PART
    m_m = o_m < HEADS * query_len
    head = i_h * HEADS + o_m // query_len
    p_query = (query + i_b * q_batch + head * q_head + (o_m % query_len).to(tl.int64) * q_time)[None, :]
    offs_tile = i_b * t_batch + i_t.to(tl.int64) * PAIRS
    b_qs = ()
    for k in tl.static_range(GROUPS):
        pair = place * GROUPS + k
        channel, partner = pair + tl.where(is_y, PAIRS, 0), pair + tl.where(is_y, 0, PAIRS)
        b_channel = tl.load(p_query + channel[:, None], mask=m_m[None, :], other=0.0).to(tl.float32)
        b_partner = tl.load(p_query + partner[:, None], mask=m_m[None, :], other=0.0).to(tl.float32)
        b_unit = tl.load(pair_scale + i_h * PAIRS + k * (2 * PART) + place)
        b_tc = tl.load(tile_cos + offs_tile + pair) * b_unit
        b_ts = tl.load(tile_sin + offs_tile + pair) * tl.where(is_y, -b_unit, b_unit)
        b_q = b_channel * b_tc[:, None] + b_partner * b_ts[:, None]
        b_qs = b_qs + (_padded(b_q if FP32_DOT else b_q.to(tl.float16), COLUMNS),)

    bit = i_h.to(tl.int32) * (GROUPS * STAGES * CODE_BITS) + FIRST * CODE_BITS
    start = i_t.to(tl.int64) * TILE
    if PAGE > 0:
        pages += i_b * table_row
    i_row, token, begin = origin(i_b, start, PAGE)
    p_codes = packed + i_row * p_batch + token * p_time
    norm += i_row * n_batch + i_h * n_head + token * n_time
    o_m = tl.program_id(1) % blocks_m * BLOCK_M + tl.arange(0, COLUMNS)
    m_m = (tl.arange(0, COLUMNS) < BLOCK_M) & (o_m < HEADS * query_len)
    p_scores = scores + (i_b * num_kv_heads + i_h) * s_head + o_m.to(tl.int64)[None, :] * s_row + start
    count = tl.minimum(length - i_t * TILE, TILE)
    table += (i_h * (GROUPS * STAGES) + FIRST) * (N * PART)
    for sub in range(0, count, BLOCK_T):
        t = sub + _tokens(BLOCK_T)
        b_s = tl.zeros([BLOCK_T, COLUMNS], tl.float32)
        b_raws = ()
        p_sub, o_t, left = p_codes, t, count
        if PAGE > 0:
            o_t, left = t - sub, count - sub
            p_sub = tile_start(p_codes, pages, begin + sub, o_t, begin + count, p_batch, p_time, PAGE, BLOCK_T, BLOCK_T)
        for k in tl.static_range(GROUPS):
            first = (bit + k * STAGES * CODE_BITS) // 32
            b_raws = b_raws + (code_words(p_sub, o_t, p_time, first, left, PITCH, ALIGNED, WORDS),)
        for k in tl.static_range(GROUPS):
            shift = ((bit + k * STAGES * CODE_BITS) % 32).to(tl.uint32)
            p_rows = table + k * (STAGES * N * PART)
            real, imag = codeword_sums(b_raws[k], shift, p_rows, o_w, PART, R, N, CODE_BITS, WORDS)
            # [T, W]: the summed codeword of each token, rotated by its offset
            low, high = halves_of_sums(real, imag, R)
            at = (t[:, None] * PART + o_w[None, :] + k * (2 * TILE * PART)).to(tl.uint32)
            b_first = _rotated(*low, offset_cos, offset_sin, at)
            b_k = _as_operand(b_first, _rotated(*high, offset_cos, offset_sin, at + TILE * PART))
            if FP32_DOT:
                b_s = tl.dot(b_k, b_qs[k], b_s, input_precision="ieee")
            else:
                b_s = tl.dot(b_k, b_qs[k], b_s)
        t = sub + tl.arange(0, BLOCK_T)
        m_t = t < count
        p_norm, o_t = norm, t
        if PAGE > 0:
            o_t = t - sub
            p_norm = tile_start(norm, pages, begin + sub, o_t, begin + count, n_batch, n_time, PAGE, BLOCK_T, BLOCK_T)
        b_norm = tl.load(p_norm + o_t * n_time, mask=m_t, other=0.0).to(tl.float32) * scaling
        b_s = b_s * b_norm[:, None]
        m_s = m_t[:, None] & m_m[None, :]
        if ADD:
            b_s += tl.load(p_scores + t[:, None], mask=m_s, other=0.0)
        tl.store(p_scores + t[:, None], b_s, mask=m_s)


def stage_ranges(config: CommVQConfig, head_dim: int) -> list[tuple[int, int]]:
    """First stage and number of stages of each pass over the keys; scores of passes add up.

    The tables of a pass, N * head_dim bytes per stage and head, fit into the L1 of a multiprocessor.
    """
    limit = max(1, min(MAX_STAGES, _TABLE_BYTES // (config.codebook_size * head_dim)))
    each = cdiv(config.num_residuals, cdiv(config.num_residuals, limit))
    return [(first, min(each, config.num_residuals - first)) for first in range(0, config.num_residuals, each)]


def unsupported(codec: LayerCodec[Any, Any]) -> str | None:
    """Why these kernels cannot read a layer's codes; None if they can."""
    key: CommVQKeyCodec = codec.key.parts[0] if isinstance(codec.key, KeyGroups) else codec.key
    config, head_dim = key.config, key.spec.head_dim
    if key.spec.rope.rotary_dim != head_dim:
        return "keys that are rotated in part of their channels"
    if head_dim & (head_dim - 1) or head_dim < 64 or config.pairs_per_group < _LEAST_PAIRS:
        return f"CommVQ keys of head_dim {head_dim} in groups of {config.pairs_per_group} pairs"
    bits = config.value_code_bits
    return f"{bits} value bits; choose a multiple of 16" if bits % 16 else None


def fused_attend(
    codec: LayerCodec[Any, Any], query: Tensor, encoded: EncodedTokens, scaling: float
) -> PartialAttention:
    """Attention over CommVQ's codes, an `AttendCodes`; float32 queries are multiplied in float32."""
    keys, values, offset = codec.key, codec.value, codec.offset
    if not isinstance(keys, KeyGroups):
        return _attend(keys, values, offset, query, encoded, scaling)
    offsets = [None] * len(keys.parts) if offset is None else keys.split(offset)
    key_codes, value_codes = keys.split_codes(encoded.key_codes), values.split_codes(encoded.value_codes)
    parts = [replace(encoded, key_codes=x, value_codes=y) for x, y in zip(key_codes, value_codes, strict=True)]
    groups = zip(keys.parts, values.parts, offsets, keys.split(query), parts, strict=True)
    out, lse = zip(*(_attend(*group, scaling) for group in groups), strict=True)
    return torch.cat(out, dim=1), torch.cat(lse, dim=1)


def _attend(
    key: CommVQKeyCodec, value: CommVQValueCodec, offset: Tensor | None, query: Tensor, encoded: EncodedTokens,
    scaling: float,
) -> PartialAttention:  # fmt: skip
    fp32_dot = query.dtype == torch.float32
    scores = key_scores(key, offset, query, encoded, scaling, fp32_dot)
    if encoded.skip:
        scores[..., : encoded.skip] = float("-inf")
    sums, lse = bit_sums(scores, encoded, fp32_dot)
    return apply_codebook(value, sums, query.shape, fp32_dot), lse.view(query.shape[:3])


def key_scores(
    key: CommVQKeyCodec, offset: Tensor | None, query: Tensor, encoded: EncodedTokens, scaling: float, fp32_dot: bool
) -> Tensor:
    """Scores of all rows of the query, as `fused_attend` has it, and all encoded tokens, in units of log 2.

    `offset` is that of `LayerCodec.offset`.

    Returns:
        float32 [batch, num_kv_heads, rows, >= length]; the last axis is rounded up to a multiple of 128, and what is
        beyond the length is not written.
    """
    codes, spec, config = encoded.key_codes, key.spec, key.config
    batch, heads, query_len, head_dim = query.shape
    assert encoded.rotations is not None
    heads_per_kv = heads // spec.num_kv_heads
    rows = heads_per_kv * query_len
    tiles = encoded.rotations.tiles(_TILE)
    dtype = torch.float32 if fp32_dot else torch.float16
    offsets = encoded.rotations.offsets(_TILE, dtype, key.num_groups, num_parts=2)
    pitch, table = codes.packed.shape[-1], key.kernel_codebook()
    aligned = pitch % 4 == 0
    packed = codes.packed.view(torch.int32) if aligned else codes.packed
    scores = torch.empty(batch, spec.num_kv_heads, rows, -(-encoded.length // 128) * 128, device=query.device)
    query, lengths = row_major(query), encoded.lengths
    if offset is not None:
        offset_scores(query, offset, encoded.rotations, scores, scaling * LOG2E, lengths)
    columns = 16 if fp32_dot else 8
    block_m = min(columns, power_of_two(rows))
    block_t = min(_TILE, max(16, _WORDS_AT_A_TIME // (config.pairs_per_group // 2)))
    grid = (cdiv(encoded.length, _TILE), batch * cdiv(rows, block_m), spec.num_kv_heads)
    # launched normally: beside the end of what was launched before it, less of L1 would be left for the tables
    for first, count in stage_ranges(config, head_dim):
        _key_scores_kernel[grid](
            query, packed, codes.norm, table, key.codebook_scale,
            tiles.cos, tiles.sin, offsets.cos, offsets.sin, scores if lengths is None else lengths, scores,
            *query.stride()[:3], packed.stride(0), packed.stride(2),
            codes.norm.stride(0), codes.norm.stride(1) if codes.norm.shape[1] > 1 else 0, codes.norm.stride(2),
            tiles.cos.stride(0) if tiles.cos.shape[0] > 1 else 0, scores.stride(1), scores.stride(2),
            spec.num_kv_heads, query_len, encoded.length, scaling * LOG2E * key.norm_factor, *encoded.table,
            HEADS=heads_per_kv, STAGES=config.num_residuals, FIRST=first, R=count, N=config.codebook_size,
            CODE_BITS=config.bits_per_code, GROUPS=key.num_groups, D=head_dim, PITCH=pitch,
            PAGE=encoded.page_size, ALIGNED=aligned, WORDS=cdiv(count * config.bits_per_code, 32), TILE=_TILE,
            BLOCK_T=block_t, BLOCK_M=block_m, COLUMNS=columns, FP32_DOT=fp32_dot,
            ADD=first > 0 or offset is not None, HAS_LENGTHS=lengths is not None, num_warps=_WARPS, num_stages=1,
        )  # fmt: skip
    return scores
