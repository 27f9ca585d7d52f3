"""Attention over CommVQ's codes: scores from key codes, value bits weighted by the softmax, then the value codebook.

Keys: a token's codewords are summed once a kv head. Codebook entries are bytes, so a word holds four of them, and two
integer sums do for 2 R words: one of the words and one of their odd bytes, from which the even ones follow exactly. A
second table holds i u. Rotation is split as in `TokenRotations.tiles`: the position of a tile goes into the query, the
offset in a tile is one small table.

Values: (P S) C. The packed bits of a token are words; one masked bit reads as a float16 power of two (see
`kvcli.kernels.words`), so P S is a product on tensor cores for each of the 16 planes. All query heads of all kv heads
share it, because value codes are joint. The codebook follows once.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.launch import refuse, splits
from kvcli.kernels.values import LOG2E, join
from kvcli.kernels.words import masked, odd_bytes, power_above, settled_half
from kvcli.methods.base import EncodedPart, LayerCodec, PartialAttention
from kvcli.methods.commvq.codebook import times_i
from kvcli.methods.commvq.config import CommVQConfig
from kvcli.methods.commvq.keys import CommVQKeyCodec
from kvcli.methods.commvq.values import CommVQValueCodec, CommVQValueCodes

_TILE = 64
_KEY_TOKENS = 16
_KEY_WARPS = 4
_PLANES = 4
_VALUE_TOKENS = 128
_VALUE_WARPS = 2
_VALUE_PER_SM = 2
_VALUE_STAGES = 3
_VALUE_WORDS = 32
_KEY_REGISTERS: int | None = None
_TABLE_BYTES = 11 * 2**14


@triton.jit
def _code_word(packed, at, first, i: tl.constexpr, m_n, PITCH: tl.constexpr, ALIGNED: tl.constexpr):
    """32 bits of each row's code stream, from word `first` + i on: uint32 [N, G]."""
    if ALIGNED:
        mask = m_n[:, None] & (first + i < PITCH // 4)[None, :]
        word = tl.load(packed + at[:, None] + (first + i)[None, :], mask=mask, other=0)
        return word.to(tl.uint32, bitcast=True)
    word = tl.zeros([at.shape[0], first.shape[0]], tl.uint32)
    for k in tl.static_range(4):
        byte = 4 * (first + i) + k
        mask = m_n[:, None] & (byte < PITCH)[None, :]
        word |= tl.load(packed + at[:, None] + byte[None, :], mask=mask, other=0).to(tl.uint32) << (8 * k)
    return word


@triton.jit(do_not_specialize=["length"])
def _key_scores_kernel(
    query,
    packed,
    norm,
    table,
    pair_scale,
    tile_cos,
    tile_sin,
    offset_cos,
    offset_sin,
    scores,
    q_batch,
    q_head,
    q_time,
    p_batch,
    p_time,
    n_batch,
    n_head,
    n_time,
    t_batch,
    s_head,
    s_row,
    num_kv_heads,
    query_len,
    length,
    scaling,
    HEADS: tl.constexpr,
    STAGES: tl.constexpr,
    FIRST: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
    CODE_BITS: tl.constexpr,
    GROUPS: tl.constexpr,
    D: tl.constexpr,
    PITCH: tl.constexpr,
    ALIGNED: tl.constexpr,
    WORDS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
    EXACT: tl.constexpr,
):
    i_t = tl.program_id(0)
    i_bh = tl.program_id(1).to(tl.int64)
    i_b = i_bh // num_kv_heads
    i_h = i_bh % num_kv_heads
    o_m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_g = tl.arange(0, GROUPS)
    o_t = tl.arange(0, BLOCK_T)
    PAIRS: tl.constexpr = D // 2
    WIDTH: tl.constexpr = D // 4
    PART: tl.constexpr = WIDTH // GROUPS
    MASK: tl.constexpr = (1 << CODE_BITS) - 1
    BIAS: tl.constexpr = 2 * R * 128
    o_w = tl.arange(0, WIDTH)
    # word w of a group holds its pairs w and w + PART
    low = (o_w // PART) * (2 * PART) + o_w % PART

    # [W, M], two tiles each: the queries of this head, rotated back by the tile's position, in units of the codebook
    m_m = o_m < HEADS * query_len
    head = i_h * HEADS + o_m // query_len
    p_query = (query + i_b * q_batch + head * q_head + (o_m % query_len).to(tl.int64) * q_time)[None, :]
    turn = i_b * t_batch + i_t.to(tl.int64) * PAIRS
    b_xs = ()
    b_ys = ()
    for half in tl.static_range(2):
        pair = low + half * PART
        b_x = tl.load(p_query + pair[:, None], mask=m_m[None, :], other=0.0).to(tl.float32)
        b_y = tl.load(p_query + (PAIRS + pair)[:, None], mask=m_m[None, :], other=0.0).to(tl.float32)
        b_unit = tl.load(pair_scale + i_h * PAIRS + pair)
        b_tc = tl.load(tile_cos + turn + pair) * b_unit
        b_ts = tl.load(tile_sin + turn + pair) * b_unit
        b_qx = b_x * b_tc[:, None] + b_y * b_ts[:, None]
        b_qy = b_y * b_tc[:, None] - b_x * b_ts[:, None]
        if not EXACT:
            b_qx, b_qy = b_qx.to(tl.float16), b_qy.to(tl.float16)
        b_xs = b_xs + (b_qx,)
        b_ys = b_ys + (b_qy,)

    bit = (i_h.to(tl.int32) * GROUPS + o_g) * (STAGES * CODE_BITS) + FIRST * CODE_BITS
    first = bit // 32
    shift = (bit % 32).to(tl.uint32)[None, :]
    start = i_t.to(tl.int64) * TILE
    p_codes = packed + i_b * p_batch + start * p_time
    norm += i_b * n_batch + i_h * n_head + start * n_time
    p_scores = scores + i_bh * s_head + o_m.to(tl.int64)[None, :] * s_row + start
    count = tl.minimum(length - i_t * TILE, TILE)
    p_table = table + i_h * (GROUPS * 2 * STAGES * N * PART) + o_g[None, :, None] * (2 * STAGES * N * PART)
    p_table += FIRST * N * PART + tl.arange(0, PART)[None, None, :]
    for sub in range(0, count, BLOCK_T):
        t = sub + o_t
        m_t = t < count
        # the group's codes, aligned to its first bit: WORDS tensors [T, G]
        raw = _code_word(p_codes, t * p_time, first, 0, m_t, PITCH, ALIGNED)
        b_words = ()
        for i in tl.static_range(WORDS):
            following = _code_word(p_codes, t * p_time, first, i + 1, m_t, PITCH, ALIGNED)
            b_words = b_words + ((raw >> shift) | ((following << 1) << (31 - shift)),)
            raw = following

        # sums of codewords, [T, G, PART] words of four bytes
        even = tl.zeros([BLOCK_T, GROUPS, PART], tl.int32)
        odd = tl.zeros([BLOCK_T, GROUPS, PART], tl.int32)
        for r in tl.static_range(R):
            code = b_words[(r * CODE_BITS) // 32] >> ((r * CODE_BITS) % 32)
            if (r * CODE_BITS) % 32 + CODE_BITS > 32:
                code |= b_words[(r * CODE_BITS) // 32 + 1] << (32 - (r * CODE_BITS) % 32)
            code = (code & MASK).to(tl.int32)
            a = tl.load(p_table + ((code // N) * PART + r * N * PART)[:, :, None])
            b = tl.load(p_table + ((code % N) * PART + (STAGES + r) * N * PART)[:, :, None])
            even += a + b
            odd += odd_bytes(a) + odd_bytes(b)
        even = tl.reshape(even - (odd << 8), [BLOCK_T, WIDTH])
        odd = tl.reshape(odd, [BLOCK_T, WIDTH])

        b_s = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)
        for half in tl.static_range(2):
            # [T, W]: the summed codeword of each token, rotated by its offset
            b_re = (((even >> (16 * half)) & 0xFFFF) - BIAS).to(tl.float32)
            b_im = (((odd >> (16 * half)) & 0xFFFF) - BIAS).to(tl.float32)
            o_turn = t[:, None] * PAIRS + (low + half * PART)[None, :]
            b_oc = tl.load(offset_cos + o_turn).to(tl.float32)
            b_os = tl.load(offset_sin + o_turn).to(tl.float32)
            b_kx = b_re * b_oc - b_im * b_os
            b_ky = b_im * b_oc + b_re * b_os
            if EXACT:
                b_s = tl.dot(b_kx, b_xs[half], b_s, input_precision="ieee")
                b_s = tl.dot(b_ky, b_ys[half], b_s, input_precision="ieee")
            else:
                b_s = tl.dot(settled_half(b_kx.to(tl.float16)), b_xs[half], b_s)
                b_s = tl.dot(settled_half(b_ky.to(tl.float16)), b_ys[half], b_s)
        b_norm = tl.load(norm + t * n_time, mask=m_t, other=0.0).to(tl.float32) * scaling
        b_s = b_s * b_norm[:, None]
        m_s = m_t[:, None] & m_m[None, :]
        if FIRST > 0:
            b_s += tl.load(p_scores + t[:, None], mask=m_s, other=0.0)
        tl.store(p_scores + t[:, None], b_s, mask=m_s)


@triton.jit(do_not_specialize=["length"])
def _weights_kernel(
    scores,
    scale,
    lengths,
    weights,
    factor,
    part_out,
    part_lse,
    s_batch,
    s_row,
    c_batch,
    c_time,
    length,
    per_split,
    rows,
    CHANNELS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
):
    i_b = tl.program_id(2).to(tl.int64)
    o_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)
    m_m = o_m < rows
    limit = length
    if HAS_LENGTHS:
        limit = tl.load(lengths + i_b)
    first = tl.program_id(0).to(tl.int64) * per_split
    count = tl.minimum(limit - tl.program_id(0) * per_split, per_split)
    at_row = i_b * s_batch + o_m.to(tl.int64)[:, None] * s_row + first
    scale += i_b * c_batch + first * c_time

    b_top = tl.full([BLOCK_M, BLOCK_N], float("-inf"), tl.float32)
    b_unit = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, count, BLOCK_N):
        n = start + o_n
        m_n = n < count
        b_s = tl.load(scores + at_row + n[None, :], mask=m_m[:, None] & m_n[None, :], other=float("-inf"))
        b_top = tl.maximum(b_top, b_s)
        b_unit = tl.maximum(b_unit, tl.abs(tl.load(scale + n * c_time, mask=m_n, other=0.0).to(tl.float32)))
    top = tl.max(b_top, 1)
    safe = tl.where(top == float("-inf"), 0.0, top)
    # weights times scales are stored as float16: this power of two keeps the largest near 2^10
    unit = power_above(tl.maximum(tl.max(b_unit, 0), 1e-30)) / 1024.0
    per_unit = 1.0 / unit
    b_total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    b_mass = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    # tokens beyond the end of the row are written too: as zeros, which the product may then take in
    for start in range(0, per_split, BLOCK_N):
        n = start + o_n
        m_n = n < count
        b_s = tl.load(scores + at_row + n[None, :], mask=m_m[:, None] & m_n[None, :], other=float("-inf"))
        b_c = tl.load(scale + n * c_time, mask=m_n, other=0.0).to(tl.float32) * per_unit
        b_p = tl.exp2(b_s - safe[:, None])
        b_total += b_p
        b_ps = (b_p * b_c[None, :]).to(weights.dtype.element_ty)
        b_mass += b_ps.to(tl.float32)
        m_out = m_m[:, None] & ((n < per_split) & (first + n < s_row))[None, :]
        tl.store(weights + at_row + n[None, :], b_ps, mask=m_out)
    total = tl.sum(b_total, 1)
    safe_total = tl.where(total > 0, total, 1.0)
    row = (i_b * tl.num_programs(0) + tl.program_id(0)) * rows + o_m
    tl.store(part_lse + row, tl.where(total > 0, safe + tl.log2(safe_total), float("-inf")), mask=m_m)
    tl.store(factor + row, unit / safe_total, mask=m_m)
    # the channel after the bits carries the sum without a bit
    o_e = tl.arange(0, 16)
    b_extra = tl.where(o_e[None, :] == 0, (tl.sum(b_mass, 1) * unit / safe_total)[:, None], 0.0)
    tl.store(part_out + row[:, None] * CHANNELS + (CHANNELS - 16 + o_e)[None, :], b_extra, mask=m_m[:, None])


@triton.jit(do_not_specialize=["length"])
def _bits_kernel(
    weights,
    packed,
    factor,
    part_out,
    w_batch,
    w_row,
    p_batch,
    p_time,
    length,
    per_split,
    rows,
    words,
    CHANNELS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PLANES: tl.constexpr,
    EXACT: tl.constexpr,
):
    BLOCKS: tl.constexpr = 16 // PLANES
    plane = (tl.program_id(1) % BLOCKS) * PLANES
    blocks_m = tl.cdiv(rows, BLOCK_M)
    i_b = (tl.program_id(2) // blocks_m).to(tl.int64)
    o_m = (tl.program_id(2) % blocks_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_w = (tl.program_id(1) // BLOCKS) * BLOCK_W + tl.arange(0, BLOCK_W)
    o_n = tl.arange(0, BLOCK_N)
    m_m = o_m < rows
    m_w = o_w < words
    first = tl.program_id(0).to(tl.int64) * per_split
    count = tl.minimum(length - tl.program_id(0) * per_split, per_split)
    p_weights = weights + i_b * w_batch + o_m.to(tl.int64)[None, :] * w_row + first
    packed += i_b * p_batch + first * p_time

    b_sums = ()
    for f in tl.static_range(PLANES):
        b_sums = b_sums + (tl.zeros([BLOCK_W, BLOCK_M], tl.float32),)
    for start in range(0, count, BLOCK_N):
        n = start + o_n
        # rows of weights are padded with zeros to whole tiles
        b_ps = tl.load(p_weights + n[:, None], mask=m_m[None, :], other=0.0)
        at = tl.minimum(n, count - 1)
        b_words = tl.load(packed + at[:, None] * p_time + o_w[None, :], mask=m_w[None, :], other=0)
        b_words = tl.trans(b_words) >> plane.to(tl.int16)
        new = ()
        for f in tl.static_range(PLANES):
            if EXACT:
                b_bit = ((b_words >> f) & 1).to(tl.float32)
                new = new + (tl.dot(b_bit, b_ps, b_sums[f], input_precision="ieee"),)
            else:
                new = new + (tl.dot(masked(b_words, 1 << f), b_ps, b_sums[f]),)
        b_sums = new
    row = (i_b * tl.num_programs(0) + tl.program_id(0)) * rows + o_m
    b_factor = tl.load(factor + row, mask=m_m, other=0.0)
    if not EXACT:
        b_factor = b_factor * 16777216.0
    for f in tl.static_range(PLANES):
        b_out = b_sums[f] * b_factor[None, :]
        if not EXACT:
            b_out = b_out * (1.0 / (1 << f))
        p_out = part_out + row[None, :] * CHANNELS + (o_w * 16 + plane + f)[:, None]
        tl.store(p_out, b_out, mask=m_w[:, None] & m_m[None, :])


@triton.jit
def _codebook_kernel(
    sums,
    codebook,
    offset,
    out,
    num_kv_heads,
    rows,
    width,
    CHANNELS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EXACT: tl.constexpr,
):
    i_bh = tl.program_id(0).to(tl.int64)
    i_h = i_bh % num_kv_heads
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    o_m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_k = tl.arange(0, BLOCK_K)
    m_m = o_m < rows
    m_d = o_d < D
    row = i_bh * rows + o_m
    BITS: tl.constexpr = CHANNELS - 16
    b_out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(0, BITS, BLOCK_K):
        k = start + o_k
        m_k = k < BITS
        b_y = tl.load(sums + row[:, None] * CHANNELS + k[None, :], mask=m_m[:, None] & m_k[None, :], other=0.0)
        p_book = codebook + k[:, None] * width + (i_h * D + o_d)[None, :]
        b_c = tl.load(p_book, mask=m_k[:, None] & m_d[None, :], other=0.0).to(tl.float32)
        b_out = tl.dot(b_y, b_c, b_out, input_precision="ieee" if EXACT else "tf32")
    b_mass = tl.load(sums + row * CHANNELS + BITS, mask=m_m, other=0.0)
    b_offset = tl.load(offset + i_h * D + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_out += b_mass[:, None] * b_offset[None, :]
    tl.store(out + row[:, None] * D + o_d[None, :], b_out, mask=m_m[:, None] & m_d[None, :])


def fused_attend(codec: LayerCodec, query: Tensor, part: EncodedPart, scaling: float) -> PartialAttention:
    """Attention over CommVQ's codes; see `kvcli.methods.base.PartialAttend`.

    Raises:
        UsageError: a shape the kernels do not support.
    """
    key, value = codec.key, codec.value
    assert isinstance(key, CommVQKeyCodec)
    assert isinstance(value, CommVQValueCodec)
    exact = query.dtype == torch.float32
    scores = _key_scores(key, query, part, scaling, exact)
    sums, lse = _bit_sums(value, scores, part, exact)
    return _apply_codebook(value, sums, query.shape, exact), lse.view(query.shape[:3])


def byte_table(codebook: Tensor) -> Tensor:
    """The codebook for u_a and i u_b as biased bytes, four to a word.

    Args:
        codebook: int8 [num_kv_heads, groups, R, N, 2g], (re, im) interleaved.

    Returns:
        int32 [num_kv_heads, groups, 2, R, N, g/2]; word w holds (re, im) of pair w, then of pair w + g/2.
    """
    both = torch.stack((codebook, times_i(codebook)), dim=2).to(torch.int16) + 128
    halves = both.unflatten(-1, (2, -1, 2)).transpose(-3, -2).flatten(-3)
    return halves.to(torch.uint8).contiguous().view(torch.int32)


def stage_ranges(config: CommVQConfig, head_dim: int) -> list[tuple[int, int]]:
    """First stage and number of stages of each pass over the keys; scores of passes add up.

    A pass takes as many stages as have their tables of one head, 2 N head_dim bytes a stage, in a multiprocessor's L1.
    """
    most = max(1, _TABLE_BYTES // (2 * config.codebook_size * head_dim))
    passes = -(-config.num_residuals // most)
    each = -(-config.num_residuals // passes)
    return [(first, min(each, config.num_residuals - first)) for first in range(0, config.num_residuals, each)]


def _key_scores(key: CommVQKeyCodec, query: Tensor, part: EncodedPart, scaling: float, exact: bool) -> Tensor:
    """Scores of all rows and tokens in units of log 2: float32 [batch, num_kv_heads, rows, length]."""
    spec, codes, config = key.spec, part.key_codes, key.config
    batch, heads, query_len, head_dim = query.shape
    if spec.rope.rotary_dim != head_dim:
        raise refuse("keys that are rotated in part of their channels")
    if head_dim & (head_dim - 1) or head_dim < 64 or config.pairs_per_group < 2:
        raise refuse(f"CommVQ keys of head_dim {head_dim} in groups of {config.pairs_per_group} pairs")
    assert part.rotations is not None
    heads_per_kv = heads // spec.num_kv_heads
    rows = heads_per_kv * query_len
    tiles = part.rotations.tiles(_TILE)
    offsets = part.rotations.offsets(_TILE, torch.float32 if exact else torch.float16)
    packed, pitch = codes.packed, codes.packed.shape[-1]
    aligned = pitch % 4 == 0
    if aligned:
        packed = packed.view(torch.int32)
    scores = torch.empty(batch, spec.num_kv_heads, rows, -(-part.length // 128) * 128, device=query.device)
    query = query if query.stride(-1) == 1 else query.contiguous()
    block_m = 16 if exact else 8
    width = spec.kv_dim if config.key_norm == "joint" else head_dim
    grid = (triton.cdiv(part.length, _TILE), batch * spec.num_kv_heads, triton.cdiv(rows, block_m))
    for first, count in stage_ranges(config, head_dim):
        _key_scores_kernel[grid](
            query,
            packed,
            codes.norm,
            key.byte_table.get(lambda: byte_table(key.codebook), key.codebook),
            key.codebook_scale,
            tiles.cos,
            tiles.sin,
            offsets.cos,
            offsets.sin,
            scores,
            *query.stride()[:3],
            packed.stride(0),
            packed.stride(2),
            codes.norm.stride(0),
            codes.norm.stride(1) if codes.norm.shape[1] > 1 else 0,
            codes.norm.stride(2),
            tiles.cos.stride(0) if tiles.cos.shape[0] > 1 else 0,
            scores.stride(1),
            scores.stride(2),
            spec.num_kv_heads,
            query_len,
            part.length,
            scaling * LOG2E * width**-0.5,
            HEADS=heads_per_kv,
            STAGES=config.num_residuals,
            FIRST=first,
            R=count,
            N=config.codebook_size,
            CODE_BITS=config.bits_per_code,
            GROUPS=key.num_groups,
            D=head_dim,
            PITCH=pitch,
            ALIGNED=aligned,
            WORDS=triton.cdiv(count * config.bits_per_code, 32),
            TILE=_TILE,
            BLOCK_T=_KEY_TOKENS,
            BLOCK_M=block_m,
            EXACT=exact,
            num_warps=_KEY_WARPS,
            maxnreg=_KEY_REGISTERS,
            num_stages=1,
        )
    return scores


def _bit_sums(value: CommVQValueCodec, scores: Tensor, part: EncodedPart, exact: bool) -> tuple[Tensor, Tensor]:
    """Softmax weights times scale, summed over each value bit.

    Returns:
        float32 [batch, 1, all rows, N_c + 1], the last channel without a bit, and lse [batch, 1, all rows].
    """
    codes: CommVQValueCodes = part.value_codes
    batch, kv_heads, rows, padded = scores.shape
    if value.config.value_code_bits % 16:
        raise refuse(f"{value.config.value_code_bits} value bits; choose a multiple of 16")
    words = codes.packed.view(torch.int16)
    count, rows = words.shape[-1], rows * kv_heads
    channels = count * 16 + 16
    block_m = min(32, max(16 if exact else 8, triton.next_power_of_2(rows)))
    block_w = min(_VALUE_WORDS, max(16, triton.next_power_of_2(count)))
    blocks_m, blocks_w = triton.cdiv(rows, block_m), triton.cdiv(count, block_w) * (16 // _PLANES)
    per_split = splits(part.length, batch * blocks_m * blocks_w, _VALUE_TOKENS, _VALUE_PER_SM)
    parts = triton.cdiv(part.length, per_split)
    device = scores.device
    weights = torch.empty(scores.shape, dtype=torch.float32 if exact else torch.float16, device=device)
    factor = torch.empty(batch, parts, rows, device=device)
    part_out = torch.empty(batch, parts, rows, channels, device=device)
    part_lse = torch.empty(batch, parts, rows, device=device)
    sums = torch.empty(batch, 1, rows, channels, device=device)
    lse = torch.empty(batch, 1, rows, device=device)
    row_block = 4
    _weights_kernel[(parts, triton.cdiv(rows, row_block), batch)](
        scores,
        codes.scale,
        scores if part.lengths is None else part.lengths,
        weights,
        factor,
        part_out,
        part_lse,
        scores.stride(0),
        padded,
        codes.scale.stride(0),
        codes.scale.stride(2),
        part.length,
        per_split,
        rows,
        CHANNELS=channels,
        BLOCK_M=row_block,
        BLOCK_N=256,
        HAS_LENGTHS=part.lengths is not None,
        num_warps=4,
    )
    _bits_kernel[(parts, blocks_w, batch * blocks_m)](
        weights,
        words,
        factor,
        part_out,
        weights.stride(0),
        padded,
        words.stride(0),
        words.stride(2),
        part.length,
        per_split,
        rows,
        count,
        CHANNELS=channels,
        BLOCK_W=block_w,
        BLOCK_M=block_m,
        BLOCK_N=_VALUE_TOKENS,
        PLANES=_PLANES,
        EXACT=exact,
        num_warps=_VALUE_WARPS,
        num_stages=_VALUE_STAGES,
    )
    if parts == 1:
        return part_out, part_lse * math.log(2)
    join(part_out, part_lse, sums, lse)
    return sums, lse


def _apply_codebook(value: CommVQValueCodec, sums: Tensor, shape: torch.Size, exact: bool) -> Tensor:
    """Bit sums [batch, 1, all rows, channels] times the codebook of each row's head: float32 of the query's shape."""
    batch, kv_heads, head_dim = shape[0], value.spec.num_kv_heads, shape[3]
    rows = sums.shape[2] // kv_heads
    out = torch.empty(shape, device=sums.device)
    block_d = 16 if batch * kv_heads < 64 else 64
    _codebook_kernel[(batch * kv_heads, triton.cdiv(head_dim, block_d), triton.cdiv(rows, 16))](
        sums,
        value.codebook,
        value.offset,
        out,
        kv_heads,
        rows,
        value.codebook.shape[1],
        CHANNELS=sums.shape[-1],
        D=head_dim,
        BLOCK_D=block_d,
        BLOCK_M=16,
        BLOCK_K=128,
        EXACT=exact,
        num_warps=4,
        num_stages=3,
    )
    return out
