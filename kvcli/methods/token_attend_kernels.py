"""Attention over tokens that are quantized one by one: RTN, OSCAR, FP8, and TurboQuant without signs of residuals.

A tile of tokens is decoded in registers and multiplied there; a second kernel merges the splits of the tokens. Codecs
that rotate tokens first leave them rotated: the query is, and what comes out is rotated back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.launch import Tiles, cdiv, norm_unit, power_of_two, row_major, tokens_per_split
from kvcli.kernels.offset import offset_scores
from kvcli.kernels.pages import origin, token_offsets
from kvcli.kernels.pdl import pdl_begin, pdl_launch_options
from kvcli.kernels.splits import LOG2E, batch_and_head, merge_splits, query_rows, split_range, split_size
from kvcli.kernels.words import FP16_MAX
from kvcli.methods.base import without_autocast
from kvcli.methods.fp8 import FP8
from kvcli.methods.layer_codec import EncodedTokens, LayerCodec, PartialAttention
from kvcli.methods.oscar import OSCAR
from kvcli.methods.scalar.codec import PerTokenCodec
from kvcli.methods.turboquant import TurboQuant

GROUPED = tl.constexpr(0)
FLOAT8 = tl.constexpr(1)
CENTROIDS = tl.constexpr(2)

# tuned on one H200, torch 2.11, triton 3.6; with more stages, loads of centroids take five times as long
_TILE = {"BLOCK_N": 64, "num_warps": 4, "num_stages": 1}
_TILES = Tiles(hopper=_TILE, smaller={**_TILE, "BLOCK_N": 32})
_ONE_WARP = {**_TILE, "num_warps": 1}
_WORD_TILES = {
    GROUPED.value: Tiles(hopper=_ONE_WARP, smaller={**_ONE_WARP, "BLOCK_N": 32}),
    CENTROIDS.value: Tiles(hopper={**_ONE_WARP, "BLOCK_N": 16}, smaller={**_ONE_WARP, "BLOCK_N": 16}),
}
"""Where words have several numbers: each of their products is too small for more warps."""
_WIDE_TILES = Tiles(hopper=_TILE, smaller={**_TILE, "BLOCK_N": 16})
_WIDEST_TILE = {**_TILE, "BLOCK_N": 16}
_BLOCK_M = 16
_PROGRAMS_PER_SM = 8

_HEADROOM = 4.0
"""By what rotated tokens are divided: a coordinate of a token within the range of float16 may be 2.7 times as large."""


@triton.jit
def _channels(f, o_w, KIND: tl.constexpr, WORDS: tl.constexpr):
    """Channels of the f-th numbers of words o_w."""
    return 8 * o_w + f if KIND == CENTROIDS else f * WORDS + o_w


@triton.jit
def _words(packed, at, o_w, KIND: tl.constexpr, B: tl.constexpr, WORDS: tl.constexpr, ROW: tl.constexpr):
    """Words o_w [W] of tokens at offsets [N]: int32 [N, W], 0 beyond the last; a token has ROW numbers in `packed`."""
    p_token, m_w = packed + at[:, None], (o_w < WORDS)[None, :]
    if KIND == CENTROIDS:  # eight indices are B bytes
        words = tl.zeros([at.shape[0], o_w.shape[0]], tl.int32)
        for i in tl.static_range(B):
            byte = (B * o_w + i)[None, :]
            words |= tl.load(p_token + byte, mask=byte < ROW, other=0).to(tl.int32) << (8 * i)
    else:
        words = tl.load(p_token + o_w[None, :], mask=m_w, other=0).to(tl.int16 if KIND == FLOAT8 else tl.int32)
    return words


@triton.jit
def _numbers(
    words, f, scale, zero, centroids, at, o_w, unit,
    KIND: tl.constexpr, B: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    FP32_DOT: tl.constexpr,
):  # fmt: skip
    """The f-th numbers of words [N, W]: float32, else float16; of channels that do not exist, any.

    Scale and zero are at offsets [N]. Of GROUPED, words are those of `pack_planes`, and numbers are code * scale +
    zero; FLOAT8 are bytes of e4m3 times `scale`, which is 256 times theirs; CENTROIDS are indices by `pack_bits`, eight
    in a word, and numbers are centroids times `scale` and `unit`.
    """
    if KIND == GROUPED:
        if GROUP % WORDS == 0:  # numbers of a field share a group
            at = at[:, None] + f * WORDS // GROUP
        else:
            at = at[:, None] + tl.minimum(_channels(f, o_w, KIND, WORDS) // GROUP, GROUPS - 1)[None, :]
        b_x = ((words >> (B * f)) & ((1 << B) - 1)).to(tl.float32)
        b_x = b_x * tl.load(scale + at).to(tl.float32) + tl.load(zero + at).to(tl.float32)
    else:
        if KIND == FLOAT8:
            b_x = (((words & 0x80) << 8) | ((words & 0x7F) << 7)).to(tl.float16, bitcast=True)
            b_x = tl.where((words & 0x7F) == 0x7F, float("nan"), b_x.to(tl.float32))
        else:
            b_x = tl.load(centroids + ((words >> (B * f)) & ((1 << B) - 1)))
        b_x = b_x * (tl.load(scale + at).to(tl.float32) * unit)[:, None]
    if not FP32_DOT:
        b_x = tl.clamp(b_x, -FP16_MAX, FP16_MAX, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    return b_x


@triton.jit(do_not_specialize=["length", "table_row"])
def _attend_kernel(
    query, k_packed, k_scale, k_zero, k_centroids, v_packed, v_scale, v_zero, v_centroids, lengths, scores,
    split_out, split_lse,
    q_batch, q_head, q_time, kp_batch, kp_head, kp_time, ks_batch, ks_head, ks_time,
    vp_batch, vp_head, vp_time, vs_batch, vs_head, vs_time, s_head, s_row,
    num_kv_heads, query_len, length, per_split, scaling, unit, lse_unit, table, table_row,
    HEADS: tl.constexpr, KIND: tl.constexpr, K_BITS: tl.constexpr, V_BITS: tl.constexpr, K_WORDS: tl.constexpr,
    V_WORDS: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, K_FIELDS: tl.constexpr, V_FIELDS: tl.constexpr,
    K_GROUPS: tl.constexpr, V_GROUPS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, SKIP: tl.constexpr,
    SPLIT: tl.constexpr, K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    FP32_DOT: tl.constexpr, HAS_LENGTHS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """softmax(scaling q K^T) V of the program's split of the tokens, and the log-sum-exp of its scores.

    Grid (num_splits, batch * num_kv_heads, ceil(rows / BLOCK_M)), rows = HEADS * query_len. One program: BLOCK_M query
    rows of one kv head and per_split tokens, BLOCK_N at a time.

    query [batch, num_heads, query_len, D] float16 or float32, strides q_*; packed [batch, num_kv_heads, tokens, ROW],
    int16 if GROUPED, else uint8, and scale, zero float16 [batch, num_kv_heads, tokens, groups] of keys and values,
    strides kp_*, ks_*, vp_*, vs_*, those of zero as of scale; k_centroids, v_centroids float32 [2^bits]; lengths int32
    [batch] if HAS_LENGTHS; scores float32 [batch, num_kv_heads, rows, tokens], strides s_*, are added if ADD. These,
    `scaling` and the log-sum-exp are in units of log 2, the latter times lse_unit. Written: split_out float32 [batch *
    num_kv_heads, num_splits, rows, D], normalized, and split_lse float32 [batch * num_kv_heads, num_splits, rows]. With
    PAGE, codes are pages of so many tokens of the block table, int32 [batch, max_pages], stride table_row. The first
    SKIP tokens are not attended to. SPLIT: of `split_size`; the rest as in `_numbers`: a key's K_WORDS, padded to
    K_BLOCK, have K_FIELDS numbers each.
    """
    pdl_begin()
    i_bh, i_b, i_h = batch_and_head(1, num_kv_heads)
    o_m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_k, o_v, o_n = tl.arange(0, K_BLOCK), tl.arange(0, V_BLOCK), tl.arange(0, BLOCK_N)
    rows = HEADS * query_len
    m_m = o_m < rows
    if HAS_LENGTHS:
        length = tl.load(lengths + i_b)
    per_split = split_size(length, per_split, SPLIT)
    first, count = split_range(length, per_split)
    if PAGE > 0:
        table += i_b * table_row
    i_row, token, begin = origin(i_b, first, PAGE)
    k_packed += i_row * kp_batch + i_h * kp_head + token * kp_time
    v_packed += i_row * vp_batch + i_h * vp_head + token * vp_time
    at_k, at_v = i_row * ks_batch + i_h * ks_head + token * ks_time, i_row * vs_batch + i_h * vs_head + token * vs_time
    end = begin + count if PAGE > 0 else 0
    p_query = query_rows(query, i_b, i_h, o_m, q_batch, q_head, q_time, query_len, HEADS)
    b_qs, b_outs = (), ()
    for f in tl.static_range(K_FIELDS):
        channel = _channels(f, o_k, KIND, K_WORDS)
        mask = m_m[:, None] & ((o_k < K_WORDS) & (channel < D))[None, :]
        b_qs = b_qs + (tl.load(p_query[:, None] + channel[None, :], mask=mask, other=0.0),)
    for _ in tl.static_range(V_FIELDS):
        b_outs = b_outs + (tl.zeros([BLOCK_M, V_BLOCK], tl.float32),)
    p_scores = scores + i_bh * s_head + o_m.to(tl.int64)[:, None] * s_row + first
    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_total = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, count, BLOCK_N):
        n = start + o_n
        at = tl.minimum(n, count - 1)
        offsets = token_offsets(table, begin, at, end, kp_batch, kp_time, PAGE)
        words = _words(k_packed, offsets, o_k, KIND, K_BITS, K_WORDS, K_ROW)
        offsets = token_offsets(table, begin, at, end, ks_batch, ks_time, PAGE)
        b_s = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for f in tl.static_range(K_FIELDS):
            b_k = _numbers(
                words, f, k_scale + at_k, k_zero + at_k, k_centroids, offsets, o_k, unit,
                KIND, K_BITS, K_WORDS, D // K_GROUPS, K_GROUPS, FP32_DOT,
            )  # fmt: skip
            b_s = tl.dot(b_qs[f], tl.trans(b_k), b_s, input_precision="tf32x3")
        b_s = b_s * scaling
        if ADD:
            b_s += tl.load(p_scores + at[None, :], mask=m_m[:, None], other=0.0)
        b_s = tl.where(((n < count) & (first + n >= SKIP))[None, :], b_s, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, 1))
        shift = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_p = tl.exp2(b_s - shift[:, None])
        b_old = tl.exp2(b_max - shift)
        b_total = b_total * b_old + tl.sum(b_p, 1)
        offsets = token_offsets(table, begin, at, end, vp_batch, vp_time, PAGE)
        words = _words(v_packed, offsets, o_v, KIND, V_BITS, V_WORDS, V_ROW)
        offsets = token_offsets(table, begin, at, end, vs_batch, vs_time, PAGE)
        b_sums = ()
        for f in tl.static_range(V_FIELDS):
            b_v = _numbers(
                words, f, v_scale + at_v, v_zero + at_v, v_centroids, offsets, o_v, unit,
                KIND, V_BITS, V_WORDS, D // V_GROUPS, V_GROUPS, FP32_DOT,
            )  # fmt: skip
            b_sums = b_sums + (tl.dot(b_p.to(b_v.dtype), b_v, b_outs[f] * b_old[:, None], input_precision="tf32x3"),)
        b_outs = b_sums
        b_max = b_new
    safe_total = tl.where(b_total == 0, 1.0, b_total)
    row = (i_bh * tl.num_programs(0) + tl.program_id(0)) * rows + o_m
    for f in tl.static_range(V_FIELDS):
        channel = _channels(f, o_v, KIND, V_WORDS)
        mask = m_m[:, None] & ((o_v < V_WORDS) & (channel < D))[None, :]
        tl.store(split_out + row[:, None] * D + channel[None, :], b_outs[f] / safe_total[:, None], mask=mask)
    tl.store(split_lse + row, (b_max + tl.log2(safe_total)) * lse_unit, mask=m_m)


@dataclass(frozen=True)
class _Operand:
    """Codes of keys or values as the kernel reads them.

    Attributes:
        kind: of `_numbers`.
        fields, words: numbers in a word, and words of a token.
        packed: [batch, num_kv_heads, time, ...], int16 if they are grouped, else uint8.
        scale, zero: float16 [batch, num_kv_heads, time, groups]; zero is `scale` where there is none.
        centroids: float32 [2^bits]; `scale` where there are none.
        unit: of `scale`.
        basis: [num_kv_heads or 1, head_dim, head_dim] float32, whose rows what is decoded is multiplied with; None: it
            is not.
    """

    kind: int
    bits: int
    fields: int
    words: int
    packed: Tensor
    scale: Tensor
    zero: Tensor
    centroids: Tensor
    unit: float = 1.0
    basis: Tensor | None = None

    @classmethod
    def of(cls, codec: Any, codes: Any) -> _Operand:
        width, bits = codec.spec.head_dim, codec.n_bits if isinstance(codec, (TurboQuant, PerTokenCodec)) else 8
        if isinstance(codec, TurboQuant):
            norm, unit, basis = codes.norm, norm_unit(width) / _HEADROOM, codec.rotation.unsqueeze(0)
            return cls(CENTROIDS.value, bits, 8, cdiv(width, 8), codes.packed, norm, norm, codec.centroids, unit, basis)
        if isinstance(codec, FP8):
            return cls(FLOAT8.value, bits, 1, width, codes.x, codes.scale, codes.scale, codes.scale)
        packed, basis = codes.packed.view(torch.int16), codec.rotation.mT if isinstance(codec, OSCAR) else None
        words, scale = packed.shape[-1], codes.scale
        fields = cdiv(width, words)  # of few channels, not all of a word's
        return cls(GROUPED.value, bits, fields, words, packed, scale, codes.zero, scale, basis=basis)

    @property
    def block(self) -> int:
        """Words, padded."""
        return max(16, power_of_two(self.words))


def unsupported(codec: LayerCodec) -> str | None:
    """Why this kernel cannot read a layer's codes; None if it can."""
    return "signs of residuals" if getattr(codec.key, "residual_sign", False) else None


def fused_attend(codec: LayerCodec, query: Tensor, encoded: EncodedTokens, scaling: float) -> PartialAttention:
    """softmax(scaling q K^T) V over encoded tokens, an `AttendCodes`; float32 queries are multiplied in float32, others
    as float16 numbers. CacheError: positions that are not consecutive, of keys with a constant part.
    """
    batch, heads, query_len, head_dim = query.shape
    kv_heads, length = codec.key.spec.num_kv_heads, encoded.length
    rows, fp32_dot = heads // kv_heads * query_len, query.dtype == torch.float32
    keys, values = _Operand.of(codec.key, encoded.key_codes), _Operand.of(codec.value, encoded.value_codes)
    blocks = cdiv(rows, _BLOCK_M)
    tiles = _TILES if fp32_dot else _WORD_TILES.get(keys.kind, _TILES)
    tile = (tiles if head_dim <= 128 else _WIDE_TILES).on(query.device) if head_dim <= 256 else _WIDEST_TILE
    per_split = tokens_per_split(length, batch * kv_heads * blocks, tile["BLOCK_N"], _PROGRAMS_PER_SM)
    num_splits = cdiv(length, per_split)
    scores = None
    if (offset := codec.offset_of(encoded.key_state)) is not None:
        assert encoded.rotations is not None
        scores = torch.empty(batch, kv_heads, rows, length, device=query.device)
        offset_scores(query, offset, encoded.rotations, scores, scaling * LOG2E, encoded.lengths)
    headroom = _HEADROOM if keys.kind == CENTROIDS.value else 1.0
    query = _rotated(query, keys.basis, transposed=True)
    query = row_major(query if fp32_dot else query.float().clamp_(-FP16_MAX.value, FP16_MAX.value).half())
    split_out = torch.empty(batch * kv_heads, num_splits, rows, head_dim, device=query.device)
    split_lse = torch.empty(batch * kv_heads, num_splits, rows, device=query.device)
    _attend_kernel[(num_splits, batch * kv_heads, blocks)](
        query, keys.packed, keys.scale, keys.zero, keys.centroids,
        values.packed, values.scale, values.zero, values.centroids,
        split_lse if encoded.lengths is None else encoded.lengths, split_lse if scores is None else scores,
        split_out, split_lse, *query.stride()[:3], *keys.packed.stride()[:3], *keys.scale.stride()[:3],
        *values.packed.stride()[:3], *values.scale.stride()[:3], *((0, 0) if scores is None else scores.stride()[1:3]),
        kv_heads, query_len, length, per_split, scaling * LOG2E * headroom, keys.unit,
        math.log(2) if num_splits == 1 else 1.0, *encoded.table, HEADS=heads // kv_heads, KIND=keys.kind,
        K_BITS=keys.bits, V_BITS=values.bits, K_WORDS=keys.words, V_WORDS=values.words, K_ROW=keys.packed.shape[-1],
        V_ROW=values.packed.shape[-1], K_FIELDS=keys.fields, V_FIELDS=values.fields, K_GROUPS=keys.scale.shape[-1],
        V_GROUPS=values.scale.shape[-1], D=head_dim, PAGE=encoded.page_size, SKIP=encoded.skip,
        SPLIT=tile["BLOCK_N"] if encoded.pages is not None else 0, K_BLOCK=keys.block, V_BLOCK=values.block,
        BLOCK_M=_BLOCK_M, FP32_DOT=fp32_dot, HAS_LENGTHS=encoded.lengths is not None, ADD=scores is not None, **tile,
        **pdl_launch_options(encoded.pages is None),
    )  # fmt: skip
    out, lse = split_out, split_lse
    if num_splits > 1:
        out = torch.empty(batch, kv_heads, rows, head_dim, device=query.device)
        lse = torch.empty(batch, kv_heads, rows, device=query.device)
        merge_splits(split_out, split_lse, out, lse)
    out = _rotated(out.view(query.shape), values.basis)
    return out if headroom == 1.0 else out.mul_(headroom), lse.view(query.shape[:3])


def _rotated(x: Tensor, basis: Tensor | None, *, transposed: bool = False) -> Tensor:
    """x [batch, num_heads, query_len, head_dim] times a basis of its kv head, or the basis transposed; float32."""
    if basis is None:
        return x
    with without_autocast(x):
        of_heads = x.float().unflatten(1, (len(basis), -1))
        return (of_heads @ (basis.mT if transposed else basis).unsqueeze(1)).flatten(1, 2)
