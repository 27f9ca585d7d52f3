"""Attention over CommVQ's codes in three steps: scores from key codes, bits weighted by the softmax, the value codebook.

Keys: a token's codewords are summed once a kv head. Codebook entries are bytes, so a word holds four of them, and two
integer sums do for 2 R words: one of the words and one of their odd bytes, from which the even ones follow exactly. A
second table holds i u. Rotation is split as in `TokenRotations.tiles`: the position of a tile goes into the query, the
offset in a tile is one small table.

Values: (P S) C. The packed bits of a token are words; one masked bit reads as a float16 power of two (see
`kvcli.kernels.words`), so P S is a product on tensor cores for each of the 16 planes. All query heads of all kv heads
share it, because value codes are joint. The codebook follows once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.launch import refuse, splits
from kvcli.kernels.values import LOG2E, join
from kvcli.kernels.words import masked, odd_bytes, power_above, settled
from kvcli.methods.base import EncodedPart, LayerCodec, PartialAttention
from kvcli.methods.commvq.codebook import times_i
from kvcli.methods.commvq.keys import CommVQKeyCodec
from kvcli.methods.commvq.values import CommVQValueCodec, CommVQValueCodes

_TILE = 32
_KEY_WARPS = 2
_PLANES = 4
_VALUE_TOKENS = 64
_VALUE_WARPS = 4
_VALUE_SPREAD = 4


@triton.jit
def _code_word(packed, at, first, i: tl.constexpr, m_n, PITCH: tl.constexpr, ALIGNED: tl.constexpr):
    """32 bits of each row's code stream, from word `first` + i on: uint32 [N, G]."""
    if ALIGNED:
        mask = m_n[:, None] & (first + i < PITCH // 4)[None, :]
        return tl.load(packed + at[:, None] + (first + i)[None, :], mask=mask, other=0).to(tl.uint32, bitcast=True)
    word = tl.zeros([at.shape[0], first.shape[0]], tl.uint32)
    for k in tl.static_range(4):
        byte = 4 * (first + i) + k
        mask = m_n[:, None] & (byte < PITCH)[None, :]
        word |= tl.load(packed + at[:, None] + byte[None, :], mask=mask, other=0).to(tl.uint32) << (8 * k)
    return word


@triton.jit
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
    R: tl.constexpr,
    N: tl.constexpr,
    CODE_BITS: tl.constexpr,
    GROUPS: tl.constexpr,
    D: tl.constexpr,
    PITCH: tl.constexpr,
    ALIGNED: tl.constexpr,
    WORDS: tl.constexpr,
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
    o_n = i_t * BLOCK_T + tl.arange(0, BLOCK_T)
    m_n = o_n < length
    PAIRS: tl.constexpr = D // 2
    WIDTH: tl.constexpr = D // 4
    PART: tl.constexpr = WIDTH // GROUPS
    MASK: tl.constexpr = (1 << CODE_BITS) - 1

    # the group's codes, aligned to its first bit: WORDS tensors [T, G]
    bit = (i_h.to(tl.int32) * GROUPS + o_g) * (R * CODE_BITS)
    first = bit // 32
    shift = (bit % 32).to(tl.uint32)[None, :]
    at = o_n.to(tl.int64) * p_time
    p_codes = packed + i_b * p_batch
    raw = _code_word(p_codes, at, first, 0, m_n, PITCH, ALIGNED)
    b_words = ()
    for i in tl.static_range(WORDS):
        following = _code_word(p_codes, at, first, i + 1, m_n, PITCH, ALIGNED)
        b_words = b_words + ((raw >> shift) | ((following << 1) << (31 - shift)),)
        raw = following

    # sums of codewords, [T, G, PART] words of four bytes
    even = tl.zeros([BLOCK_T, GROUPS, PART], tl.int32)
    odd = tl.zeros([BLOCK_T, GROUPS, PART], tl.int32)
    p_table = table + i_h * (GROUPS * 2 * R * N * PART) + o_g[None, :, None] * (2 * R * N * PART)
    p_table += tl.arange(0, PART)[None, None, :]
    for r in tl.static_range(R):
        code = b_words[(r * CODE_BITS) // 32] >> ((r * CODE_BITS) % 32)
        if (r * CODE_BITS) % 32 + CODE_BITS > 32:
            code |= b_words[(r * CODE_BITS) // 32 + 1] << (32 - (r * CODE_BITS) % 32)
        code = (code & MASK).to(tl.int32)
        a = tl.load(p_table + ((code // N) * PART + r * N * PART)[:, :, None])
        b = tl.load(p_table + ((code % N) * PART + (R + r) * N * PART)[:, :, None])
        even += a + b
        odd += odd_bytes(a) + odd_bytes(b)
    even = tl.reshape(settled(even - (odd << 8)), [BLOCK_T, WIDTH])
    odd = tl.reshape(settled(odd), [BLOCK_T, WIDTH])
    BIAS: tl.constexpr = 2 * R * 128

    # [W, M]: the queries of this head, rotated back by the tile's position, in units of the codebook
    o_w = tl.arange(0, WIDTH)
    m_m = o_m < HEADS * query_len
    head = i_h * HEADS + o_m // query_len
    p_query = (query + i_b * q_batch + head * q_head + (o_m % query_len).to(tl.int64) * q_time)[None, :]
    turn = i_b * t_batch + i_t.to(tl.int64) * PAIRS
    b_s = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)
    for half in tl.static_range(2):
        pair = 2 * o_w + half
        b_x = tl.load(p_query + pair[:, None], mask=m_m[None, :], other=0.0).to(tl.float32)
        b_y = tl.load(p_query + (PAIRS + pair)[:, None], mask=m_m[None, :], other=0.0).to(tl.float32)
        b_unit = tl.load(pair_scale + i_h * PAIRS + pair)
        b_tc = tl.load(tile_cos + turn + pair) * b_unit
        b_ts = tl.load(tile_sin + turn + pair) * b_unit
        b_qx = b_x * b_tc[:, None] + b_y * b_ts[:, None]
        b_qy = b_y * b_tc[:, None] - b_x * b_ts[:, None]
        # [T, W]: the summed codeword of each token, rotated by its offset
        b_re = (((even >> (16 * half)) & 0xFFFF) - BIAS).to(tl.float32)
        b_im = (((odd >> (16 * half)) & 0xFFFF) - BIAS).to(tl.float32)
        o_turn = tl.arange(0, BLOCK_T)[:, None] * PAIRS + pair[None, :]
        b_oc = tl.load(offset_cos + o_turn)
        b_os = tl.load(offset_sin + o_turn)
        b_kx = b_re * b_oc - b_im * b_os
        b_ky = b_im * b_oc + b_re * b_os
        if EXACT:
            b_s = tl.dot(b_kx, b_qx, b_s, input_precision="ieee")
            b_s = tl.dot(b_ky, b_qy, b_s, input_precision="ieee")
        else:
            b_s = tl.dot(b_kx.to(tl.float16), b_qx.to(tl.float16), b_s)
            b_s = tl.dot(b_ky.to(tl.float16), b_qy.to(tl.float16), b_s)
    b_norm = tl.load(norm + i_b * n_batch + i_h * n_head + o_n.to(tl.int64) * n_time, mask=m_n, other=0.0)
    b_s = b_s * (b_norm.to(tl.float32) * scaling)[:, None]
    p_scores = scores + i_bh * s_head + o_m.to(tl.int64)[None, :] * s_row + o_n[:, None]
    tl.store(p_scores, b_s, mask=m_n[:, None] & m_m[None, :])


@triton.jit
def _bits_kernel(
    scores,
    packed,
    scale,
    lengths,
    part_out,
    part_lse,
    s_batch,
    s_row,
    p_batch,
    p_time,
    c_batch,
    c_time,
    length,
    per_split,
    rows,
    words,
    BLOCK_W: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PLANES: tl.constexpr,
    EXACT: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
):
    BLOCKS: tl.constexpr = 16 // PLANES
    plane = (tl.program_id(1) % BLOCKS).to(tl.int16) * PLANES
    i_w = tl.program_id(1) // BLOCKS
    blocks_m = tl.cdiv(rows, BLOCK_M)
    i_b = (tl.program_id(2) // blocks_m).to(tl.int64)
    o_m = (tl.program_id(2) % blocks_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_w = i_w * BLOCK_W + tl.arange(0, BLOCK_W)
    o_n = tl.arange(0, BLOCK_N)
    m_m = o_m < rows
    m_w = o_w < words
    limit = length
    if HAS_LENGTHS:
        limit = tl.load(lengths + i_b)
    first = tl.program_id(0) * per_split
    last = tl.minimum(first + per_split, limit)
    p_scores = scores + i_b * s_batch + o_m.to(tl.int64)[None, :] * s_row
    packed += i_b * p_batch
    scale += i_b * c_batch

    b_top = tl.full([BLOCK_N, BLOCK_M], float("-inf"), tl.float32)
    b_unit = tl.zeros([BLOCK_N], tl.float32)
    for start in range(first, last, BLOCK_N):
        n = start + o_n
        m_n = n < last
        b_s = tl.load(p_scores + n[:, None], mask=m_n[:, None] & m_m[None, :], other=float("-inf"))
        b_top = tl.maximum(b_top, b_s)
        b_c = tl.load(scale + n.to(tl.int64) * c_time, mask=m_n, other=0.0).to(tl.float32)
        b_unit = tl.maximum(b_unit, tl.abs(b_c))
    top = tl.max(b_top, 0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    # weights times scales are float16: this power of two keeps the largest near 2^10
    unit = power_above(tl.maximum(tl.max(b_unit, 0), 1e-30)) / 1024.0

    b_sums = ()
    for f in tl.static_range(PLANES):
        b_sums = b_sums + (tl.zeros([BLOCK_W, BLOCK_M], tl.float32),)
    b_weight = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    b_mass = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(first, last, BLOCK_N):
        n = start + o_n
        m_n = n < last
        at = n.to(tl.int64)
        b_s = tl.load(p_scores + n[:, None], mask=m_n[:, None] & m_m[None, :], other=float("-inf"))
        b_c = tl.load(scale + at * c_time, mask=m_n, other=0.0).to(tl.float32) / unit
        b_p = tl.exp2(b_s - safe[None, :])
        b_ps = b_p * b_c[:, None]
        b_words = tl.load(packed + at[:, None] * p_time + o_w[None, :], mask=m_n[:, None] & m_w[None, :], other=0)
        b_words = tl.trans(b_words) >> plane
        b_weight += b_p
        if not EXACT:
            b_half = b_ps.to(tl.float16)
            b_ps = b_half.to(tl.float32)
        b_mass += b_ps
        new = ()
        for f in tl.static_range(PLANES):
            if EXACT:
                b_bit = ((b_words >> f) & 1).to(tl.float32)
                new = new + (tl.dot(b_bit, b_ps, b_sums[f], input_precision="ieee"),)
            else:
                new = new + (tl.dot(masked(b_words, 1 << f), b_half, b_sums[f]),)
        b_sums = new

    total = tl.sum(b_weight, 0)
    safe_total = tl.where(total > 0, total, 1.0)
    row = (i_b * tl.num_programs(0) + tl.program_id(0)) * rows + o_m
    channels = words * 16 + 1
    if tl.program_id(1) == 0:
        tl.store(part_lse + row, tl.where(total > 0, safe + tl.log2(safe_total), float("-inf")), mask=m_m)
        tl.store(part_out + row * channels + words * 16, tl.sum(b_mass, 0) * unit / safe_total, mask=m_m)
    for f in tl.static_range(PLANES):
        b_out = b_sums[f] * unit
        if not EXACT:
            b_out = b_out * (16777216.0 / (1 << f))
        p_out = part_out + row[None, :] * channels + (o_w * 16 + plane.to(tl.int32) + f)[:, None]
        tl.store(p_out, b_out / safe_total[None, :], mask=m_w[:, None] & m_m[None, :])


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
    return _apply_codebook(value, sums, query), lse.view(query.shape[:3])


def byte_table(codec: CommVQKeyCodec) -> Tensor:
    """The codebook for u_a and i u_b as biased bytes: int32 [num_kv_heads, groups, 2, R, N, g/2], made once."""
    version = codec.codebook._version
    made = getattr(codec, "_byte_table", None)
    if made is None or made[0] != version or made[1].device != codec.codebook.device:
        both = torch.stack((codec.codebook, times_i(codec.codebook)), dim=2)
        made = (version, (both.to(torch.int16) + 128).to(torch.uint8).view(torch.int32).contiguous())
        codec._byte_table = made
    table: Tensor = made[1]
    return table


def _key_scores(key: CommVQKeyCodec, query: Tensor, part: EncodedPart, scaling: float, exact: bool) -> Tensor:
    """Scores of all rows and tokens in units of log 2: float32 [batch, num_kv_heads, rows, length]."""
    spec, codes, config = key.spec, part.key_codes, key.config
    batch, heads, query_len, head_dim = query.shape
    if spec.rope.rotary_dim != head_dim:
        raise refuse("keys that are rotated in part of their channels")
    if head_dim & (head_dim - 1) or head_dim < 64 or config.pairs_per_group < 2:
        raise refuse(f"CommVQ keys of head_dim {head_dim} in groups of {config.pairs_per_group} pairs")
    if config.num_residuals > 128:
        raise refuse(f"{config.num_residuals} residual stages")
    assert part.rotations is not None
    heads_per_kv = heads // spec.num_kv_heads
    rows = heads_per_kv * query_len
    tiles, offsets = part.rotations.tiles(_TILE), part.rotations.offsets(_TILE)
    packed, pitch = codes.packed, codes.packed.shape[-1]
    aligned = pitch % 4 == 0
    if aligned:
        packed = packed.view(torch.int32)
    scores = torch.empty(batch, spec.num_kv_heads, rows, part.length, device=query.device)
    query = query if query.stride(-1) == 1 else query.contiguous()
    block_m = 16 if exact else 8
    width = spec.kv_dim if config.key_norm == "joint" else head_dim
    grid = (triton.cdiv(part.length, _TILE), batch * spec.num_kv_heads, triton.cdiv(rows, block_m))
    _key_scores_kernel[grid](
        query,
        packed,
        codes.norm,
        byte_table(key),
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
        R=config.num_residuals,
        N=config.codebook_size,
        CODE_BITS=config.bits_per_code,
        GROUPS=key.num_groups,
        D=head_dim,
        PITCH=pitch,
        ALIGNED=aligned,
        WORDS=triton.cdiv(config.num_residuals * config.bits_per_code, 32),
        BLOCK_T=_TILE,
        BLOCK_M=block_m,
        EXACT=exact,
        num_warps=_KEY_WARPS,
        num_stages=1,
    )
    return scores


def _bit_sums(value: CommVQValueCodec, scores: Tensor, part: EncodedPart, exact: bool) -> tuple[Tensor, Tensor]:
    """Softmax weights times scale, summed over each value bit.

    Returns:
        float32 [batch, 1, all rows, N_c + 1], the last channel without a bit, and lse [batch, 1, all rows].
    """
    codes: CommVQValueCodes = part.value_codes
    batch, kv_heads, rows, _ = scores.shape
    if value.config.value_code_bits % 16:
        raise refuse(f"{value.config.value_code_bits} value bits; choose a multiple of 16")
    words = codes.packed.view(torch.int16)
    count, rows = words.shape[-1], rows * kv_heads
    block_m = min(32, max(16 if exact else 8, triton.next_power_of_2(rows)))
    block_w = min(64, max(16, triton.next_power_of_2(count)))
    others = triton.cdiv(count, block_w) * (16 // _PLANES) * batch * triton.cdiv(rows, block_m)
    per_split = splits(part.length, others * _VALUE_SPREAD, _VALUE_TOKENS)
    parts = triton.cdiv(part.length, per_split)
    device = scores.device
    part_out = torch.empty(batch, parts, rows, count * 16 + 1, device=device)
    part_lse = torch.empty(batch, parts, rows, device=device)
    sums = torch.empty(batch, 1, rows, count * 16 + 1, device=device)
    lse = torch.empty(batch, 1, rows, device=device)
    grid = (parts, triton.cdiv(count, block_w) * (16 // _PLANES), batch * triton.cdiv(rows, block_m))
    _bits_kernel[grid](
        scores,
        words,
        codes.scale,
        scores if part.lengths is None else part.lengths,
        part_out,
        part_lse,
        scores.stride(0),
        scores.stride(2),
        words.stride(0),
        words.stride(2),
        codes.scale.stride(0),
        codes.scale.stride(2),
        part.length,
        per_split,
        rows,
        count,
        BLOCK_W=block_w,
        BLOCK_M=block_m,
        BLOCK_N=_VALUE_TOKENS,
        PLANES=_PLANES,
        EXACT=exact,
        HAS_LENGTHS=part.lengths is not None,
        num_warps=_VALUE_WARPS,
        num_stages=1,
    )
    join(part_out, part_lse, sums, lse)
    return sums, lse


def _apply_codebook(value: CommVQValueCodec, sums: Tensor, query: Tensor) -> Tensor:
    """Bit sums [batch, 1, rows, N_c + 1] times the codebook of each row's head: float32, shaped like the query."""
    spec = value.spec
    batch, heads, query_len, head_dim = query.shape
    dtype = torch.float32 if query.dtype == torch.float32 else torch.float16
    rows = sums.view(batch, spec.num_kv_heads, -1, sums.shape[-1]).transpose(0, 1).flatten(1, 2).to(dtype)
    book = torch.cat((value.codebook, value.offset.unsqueeze(0))).to(dtype)
    out = rows @ book.unflatten(1, (spec.num_kv_heads, head_dim)).transpose(0, 1)
    out = out.view(spec.num_kv_heads, batch, -1, head_dim).transpose(0, 1).float()
    return out.reshape(batch, heads, query_len, head_dim)
