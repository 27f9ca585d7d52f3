"""Triton kernels of (P S) C (CommVQ Eq. 22): value bits S under the softmax of given scores, then the codebook C.

The packed bits of a token are words; one masked bit reads as a float16 power of two (see `kvcli.kernels.words`), so P S
is a product on tensor cores for each of the 16 bits of a word. All query heads of all kv heads share it, because value
codes are joint.

Sums of bits are stored as 16 planes, one for each bit of a word, with one place per word. Each 16 words have 16 places:
first the words at even places of the token, then those at odd ones, because two words are loaded at once.

Tuned on one H200, torch 2.11, triton 3.6.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.launch import cdiv, power_of_two, tokens_per_split
from kvcli.kernels.operands import eight_tokens_as_rows, in_thread_order
from kvcli.kernels.pages import origin, tile_start, token_offsets
from kvcli.kernels.pdl import pdl_launch_dependents, pdl_launch_options, pdl_wait
from kvcli.kernels.splits import merge_splits, split_range, split_size
from kvcli.kernels.words import FIELD_SCALE, high_halves, low_halves, masked_pairs, pow2_above
from kvcli.methods.commvq.values import CommVQValueCodec, CommVQValueCodes
from kvcli.methods.layer_codec import EncodedTokens

_PLANES = 8
_BLOCK_N = 64
_PER_SM = 8
_LEAST_PER_SPLIT = 2 * _BLOCK_N
"""The sums of a split are larger than the codes of 64 tokens."""

_WARPS_FP32 = 4
_WEIGHTS_TILE = {"BLOCK_M": 4, "BLOCK_N": 256, "num_warps": 4}


@triton.jit(do_not_specialize=["length", "table_row"])
def _weights_kernel(
    scores, scale, lengths, weights, factor, part_out, part_lse,
    s_batch, s_row, c_batch, c_time, length, per_split, rows, table, table_row,
    CHANNELS: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    """weights = exp2(scores - max) * scale / unit in each split of `per_split` tokens, factor = unit / sum(exp2(..)).

    Also part_lse, and part_out in the 16 channels after the bits: the sum of the weights, then zeros. `unit` is a power
    of two that keeps weights within float16. Grid (num_splits, ceil(rows / BLOCK_M), batch), rows of all kv heads.
    scores float32 [batch, rows, >= length]; scale float16 [batch, 1, time, 1]; lengths int32 [batch] if HAS_LENGTHS;
    weights like scores, float16 or float32, 0 from a sequence's end to the end of the split; factor and part_lse
    (units of log 2) float32 [batch, num_splits, rows]; part_out float32 [batch, num_splits, rows, CHANNELS].
    s_ strides of scores and weights, c_ of scale. With PAGE, scale is of pages of so many tokens of the block table,
    int32 [batch, max_pages], stride table_row. SPLIT: of `split_size`. BLOCK_N tokens at a time.
    """
    pdl_launch_dependents()
    i_b = tl.program_id(2).to(tl.int64)
    o_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)
    m_m = o_m < rows
    limit = length
    if HAS_LENGTHS:
        limit = tl.load(lengths + i_b)
    per_split = split_size(limit, per_split, SPLIT)
    first, count = split_range(limit, per_split)
    at_row = i_b * s_batch + o_m.to(tl.int64)[:, None] * s_row + first
    if PAGE > 0:
        table += i_b * table_row
    i_row, token, begin = origin(i_b, first, PAGE)
    scale += i_row * c_batch + token * c_time
    end = begin + count if PAGE > 0 else 0

    pdl_wait()
    b_top = tl.full([BLOCK_M, BLOCK_N], float("-inf"), tl.float32)
    b_unit = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, count, BLOCK_N):
        n = start + o_n
        m_n = n < count
        b_s = tl.load(scores + at_row + n[None, :], mask=m_m[:, None] & m_n[None, :], other=float("-inf"))
        b_top = tl.maximum(b_top, b_s)
        p_scale = scale + token_offsets(table, begin, n, end, c_batch, c_time, PAGE)
        b_unit = tl.maximum(b_unit, tl.abs(tl.load(p_scale, mask=m_n, other=0.0).to(tl.float32)))
    top = tl.max(b_top, 1)
    safe = tl.where(top == float("-inf"), 0.0, top)
    # weights times scales are stored as float16: the unit keeps the largest near 2^10
    unit = pow2_above(tl.maximum(tl.max(b_unit, 0), 1e-30)) / 1024.0
    per_unit = 1.0 / unit
    b_total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    b_mass = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    # zeros are written beyond the end of the sequence, so that products of whole tiles can include them
    for start in range(0, per_split, BLOCK_N):
        n = start + o_n
        m_n = n < count
        b_s = tl.load(scores + at_row + n[None, :], mask=m_m[:, None] & m_n[None, :], other=float("-inf"))
        p_scale = scale + token_offsets(table, begin, n, end, c_batch, c_time, PAGE)
        b_c = tl.load(p_scale, mask=m_n, other=0.0).to(tl.float32) * per_unit
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
    # the channel after the bits: the sum of all weights, for the offset
    o_e = tl.arange(0, 16)
    b_extra = tl.where(o_e[None, :] == 0, (tl.sum(b_mass, 1) * unit / safe_total)[:, None], 0.0)
    tl.store(part_out + row[:, None] * CHANNELS + (CHANNELS - 16 + o_e)[None, :], b_extra, mask=m_m[:, None])


@triton.jit
def _pointers(base, last, o_n, o_8, o_w, PITCH: tl.constexpr, BYTES: tl.constexpr, WHOLE: tl.constexpr):
    """Pointers to elements o_w of tokens o_n + o_8, PITCH elements each; not after token `last`, if not WHOLE."""
    # the sum in this order leaves constant offsets to a thread's loads
    at = o_8 * PITCH + o_w + o_n * PITCH if WHOLE else tl.minimum(o_n + o_8, last) * PITCH + o_w
    return in_thread_order(base, at, BYTES)


@triton.jit
def _load_words(packed, last, o_w, j, W: tl.constexpr, N: tl.constexpr, WHOLE: tl.constexpr):
    """16 words from o_w on, an even number, of tokens 32 i + 8 t + 2 q + j: int32 [4 i + q, 8, t], two words each.

    W words per token, 0 beyond them; tokens after `last` are read as that one.
    """
    o_q = tl.arange(0, N // 8)[:, None, None, None]
    o_n = o_q // 4 * 32 + o_q % 4 * 2 + j
    o_8 = tl.arange(0, 4)[None, None, :, None] * 8
    o_w += tl.arange(0, 8)[None, :, None, None] * 2
    if W % 2 == 0:
        pointers = _pointers(packed.to(tl.pointer_type(tl.int32)), last, o_n, o_8, o_w // 2, W // 2, 4, WHOLE)
        words = tl.load(pointers) if W % 16 == 0 else tl.load(pointers, mask=o_w < W, other=0)
    else:
        pointers = _pointers(packed, last, o_n, o_8, o_w, W, 2, WHOLE)
        words = tl.load(pointers, mask=o_w < W, other=0).to(tl.int32) & 0xFFFF
        words |= tl.load(pointers + 1, mask=o_w + 1 < W, other=0).to(tl.int32) << 16
    return tl.reshape(words, [N // 8, 8, 4])


@triton.jit
def _as_operand(even, odd):
    """Fields [N / 8, 8, 4, 2] of words at even and at odd places as a first operand [16, N].

    Tokens 32 i + 8 t + 2 q + j are at [4 i + q, :, t, j]; the columns are in the order of `eight_tokens_as_rows`.
    """
    x = tl.join(even, odd)
    x = tl.reshape(x, [x.shape[0] // 4, 2, 2, 8, 4, 2, 2])
    return tl.reshape(tl.permute(x, [6, 3, 0, 2, 4, 1, 5]), [16, even.shape[0] * 8])


@triton.jit
def _load_weights(p_weights, m_m, N: tl.constexpr):
    """Weights of rows p_weights [M] and N tokens as a second operand [N, M]."""
    n = tl.arange(0, N // 32)[:, None, None, None] * 32 + tl.arange(0, 4)[None, None, :, None] * 8
    n += tl.arange(0, 8)[None, None, None, :]
    pointers = in_thread_order(p_weights[None, :, None, None], n, 16)
    return eight_tokens_as_rows(tl.load(pointers, mask=m_m[None, :, None, None], other=0.0))


@triton.jit
def _load_tile(
    p_weights, packed, table, begin, p_page, m_m, o_w, start, count,
    W: tl.constexpr, N: tl.constexpr, PAGE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Weights and 16 words of N tokens from `start` on, of `count`; WHOLE: there are as many.

    Pages are those of `tile_start`, for tokens counted from `begin` on.
    """
    # rows of weights are padded with zeros to whole tiles
    b_ps = _load_weights(p_weights + start, m_m, N)
    o_8 = 0
    if PAGE > 0:
        # eight tokens that a thread has are in one page
        o_8 = tl.arange(0, N // 8)[:, None, None, None] // 4 * 32 + tl.arange(0, 4)[None, None, :, None] * 8
        o_8 = o_8 if WHOLE else tl.minimum(o_8, count - 1 - start)
    packed = tile_start(packed, table, begin + start, o_8, begin + count, p_page, W, PAGE, N, N)
    last = count - 1 - start
    b_first = _load_words(packed, last, o_w, 0, W, N, WHOLE)
    return b_ps, b_first, _load_words(packed, last, o_w, 1, W, N, WHOLE)


@triton.jit
def _add_bits(b_sums, tile, plane, PLANES: tl.constexpr, FP32_DOT: tl.constexpr):
    """Adds a tile of `_load_tile` to the sums of PLANES bits, at most those of a byte."""
    b_ps, b_first, b_second = tile
    even, odd = low_halves(b_first, b_second) >> plane, high_halves(b_first, b_second) >> plane
    new = ()
    for f in tl.static_range(PLANES):
        b_bits = _as_operand(masked_pairs(even, 1 << f), masked_pairs(odd, 1 << f))
        if FP32_DOT:
            new = new + (tl.dot(b_bits.to(tl.float32), b_ps, b_sums[f], input_precision="ieee"),)
        else:
            new = new + (tl.dot(b_bits, b_ps, b_sums[f]),)
    return new


@triton.jit(do_not_specialize=["length", "table_row"])
def _bits_kernel(
    weights, packed, lengths, factor, part_out, w_batch, w_row, p_batch, length, per_split, rows, table, table_row,
    W: tl.constexpr, CHANNELS: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PLANES: tl.constexpr, FP32_DOT: tl.constexpr, HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    """part_out[.., place] = factor * sum over a split's tokens of weights * bit, for PLANES bits of 16 words.

    Grid (num_splits, ceil(W / 16) * (16 / PLANES), batch * ceil(rows / BLOCK_M)).
    weights float16 (float32 if FP32_DOT) [batch, rows, >= length], 0 from a sequence's end to a multiple of BLOCK_N;
    packed int16 [batch, 1, time, W]; lengths int32 [batch] if HAS_LENGTHS; factor float32 [batch, num_splits, rows];
    part_out float32 [batch, num_splits, rows, CHANNELS], CHANNELS = 16 * places + 16.
    w_ and p_ are strides; pages as in `_weights_kernel`. BLOCK_N tokens at a time, which divides per_split.
    """
    pdl_launch_dependents()
    BLOCKS: tl.constexpr = 16 // PLANES
    PLACES: tl.constexpr = CHANNELS // 16 - 1
    plane = (tl.program_id(1) % BLOCKS) * PLANES
    blocks_m = tl.cdiv(rows, BLOCK_M)
    i_b = (tl.program_id(2) // blocks_m).to(tl.int64)
    o_m = (tl.program_id(2) % blocks_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_w = (tl.program_id(1) // BLOCKS) * 16
    m_m = o_m < rows
    if HAS_LENGTHS:
        length = tl.load(lengths + i_b)
    per_split = split_size(length, per_split, SPLIT)
    first, count = split_range(length, per_split)
    count = tl.maximum(count, 0)
    p_weights = weights + i_b * w_batch + o_m.to(tl.int64) * w_row + first
    if PAGE > 0:
        table += i_b * table_row
    i_row, token, begin = origin(i_b, first, PAGE)
    packed += i_row * p_batch + token * W

    b_sums = ()
    for f in tl.static_range(PLANES):
        b_sums = b_sums + (tl.zeros([16, BLOCK_M], tl.float32),)
    in_full_tiles = count // BLOCK_N * BLOCK_N
    pdl_wait()
    if in_full_tiles > 0:
        tile = _load_tile(p_weights, packed, table, begin, p_batch, m_m, o_w, 0, count, W, BLOCK_N, PAGE, True)
        for start in range(0, in_full_tiles, BLOCK_N):
            # the next tile is loaded while one is added; the last one is loaded twice
            ahead = tl.minimum(start + BLOCK_N, in_full_tiles - BLOCK_N)
            next_tile = _load_tile(
                p_weights, packed, table, begin, p_batch, m_m, o_w, ahead, count, W, BLOCK_N, PAGE, True
            )
            b_sums = _add_bits(b_sums, tile, plane, PLANES, FP32_DOT)
            tile = next_tile
    if in_full_tiles < count:
        tile = _load_tile(
            p_weights, packed, table, begin, p_batch, m_m, o_w, in_full_tiles, count, W, BLOCK_N, PAGE, False
        )
        b_sums = _add_bits(b_sums, tile, plane, PLANES, FP32_DOT)
    row = (i_b * tl.num_programs(0) + tl.program_id(0)) * rows + o_m
    b_factor = tl.load(factor + row, mask=m_m, other=0.0) * FIELD_SCALE
    p_out = part_out + row[None, :] * CHANNELS + (plane * PLACES + o_w + tl.arange(0, 16))[:, None]
    for f in tl.static_range(PLANES):
        b_out = b_sums[f] * (b_factor * (1.0 / (1 << f)))[None, :]
        tl.store(p_out + f * PLACES, b_out, mask=m_m[None, :])


def bit_sums(scores: Tensor, encoded: EncodedTokens, fp32_dot: bool) -> tuple[Tensor, Tensor]:
    """Softmax weights times scale, summed over each value bit.

    scores float32 [batch, num_kv_heads, rows, >= length], in units of log 2; `encoded` has value codes of a codec whose
    shapes are supported; fp32_dot: float32 products instead of float16.

    Returns float32 [batch, 1, all rows, N_c rounded up to a multiple of 256 + 16]: the bits in planes, the sum of all
    weights, zeros; and lse [batch, 1, all rows].
    """
    codes: CommVQValueCodes = encoded.value_codes
    batch, kv_heads, rows, padded = scores.shape
    words = codes.packed.view(torch.int16)
    assert words.stride(2) == words.shape[-1] or words.shape[2] == 1
    count, rows = words.shape[-1], rows * kv_heads
    channels = cdiv(count, 16) * 256 + 16
    block_m = min(32, max(16 if fp32_dot else 8, power_of_two(rows)))
    blocks_m, blocks_w = cdiv(rows, block_m), cdiv(count, 16) * (16 // _PLANES)
    per_split = tokens_per_split(encoded.length, batch * blocks_m * blocks_w, _BLOCK_N, _PER_SM)
    per_split = max(per_split, _LEAST_PER_SPLIT)
    num_splits, split = cdiv(encoded.length, per_split), _BLOCK_N if encoded.pages is not None else 0
    device = scores.device
    weights = torch.empty(scores.shape, dtype=torch.float32 if fp32_dot else torch.float16, device=device)
    factor = torch.empty(batch, num_splits, rows, device=device)
    part_out = torch.empty(batch, num_splits, rows, channels, device=device)
    part_lse = torch.empty(batch, num_splits, rows, device=device)
    _weights_kernel[(num_splits, cdiv(rows, _WEIGHTS_TILE["BLOCK_M"]), batch)](
        scores, codes.scale, scores if encoded.lengths is None else encoded.lengths,
        weights, factor, part_out, part_lse,
        scores.stride(0), padded, codes.scale.stride(0), codes.scale.stride(2), encoded.length, per_split, rows,
        *encoded.table, CHANNELS=channels, PAGE=encoded.page_size, SPLIT=split, HAS_LENGTHS=encoded.lengths is not None,
        **_WEIGHTS_TILE, **pdl_launch_options(),
    )  # fmt: skip
    _bits_kernel[(num_splits, blocks_w, batch * blocks_m)](
        weights, words, scores if encoded.lengths is None else encoded.lengths, factor, part_out,
        weights.stride(0), padded, words.stride(0), encoded.length, per_split, rows, *encoded.table,
        W=count, CHANNELS=channels, PAGE=encoded.page_size, SPLIT=split, BLOCK_M=block_m, BLOCK_N=_BLOCK_N,
        PLANES=_PLANES, FP32_DOT=fp32_dot, HAS_LENGTHS=encoded.lengths is not None,
        num_warps=_WARPS_FP32 if fp32_dot else 1, num_stages=1, **pdl_launch_options(),
    )  # fmt: skip
    if num_splits == 1:
        return part_out, part_lse * math.log(2)
    sums, lse = torch.empty(batch, 1, rows, channels, device=device), torch.empty(batch, 1, rows, device=device)
    merge_splits(part_out, part_lse, sums, lse)
    return sums, lse


@triton.jit
def _codebook_kernel(
    sums, codebook, offset, out, num_kv_heads, rows, width,
    W: tl.constexpr, CHANNELS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr, FP32_DOT: tl.constexpr,
):  # fmt: skip
    """out = bits C + mass * offset, each row in the channels of its kv head, for sums of bits and then of all weights.

    Grid (batch * num_kv_heads, ceil(D / BLOCK_D), ceil(rows / BLOCK_M)); `rows` per kv head.
    sums float32 [batch * num_kv_heads, rows, CHANNELS]; codebook float16 [16 W, width]; offset float16 [width]; out
    float32 [batch * num_kv_heads, rows, D]. BLOCK_K bits at a time; FP32_DOT: products in float32, else tf32.
    """
    pdl_launch_dependents()
    i_bh = tl.program_id(0).to(tl.int64)
    i_h = i_bh % num_kv_heads
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    o_m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_k = tl.arange(0, BLOCK_K)
    m_m = o_m < rows
    m_d = o_d < D
    row = i_bh * rows + o_m
    BITS: tl.constexpr = CHANNELS - 16
    PLACES: tl.constexpr = BITS // 16
    b_out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    pdl_wait()
    for start in range(0, BITS, BLOCK_K):
        k = start + o_k
        place = k % PLACES
        word = place // 16 * 16 + place % 8 * 2 + place // 8 % 2
        m_k = (k < BITS) & (word < W)
        b_y = tl.load(sums + row[:, None] * CHANNELS + k[None, :], mask=m_m[:, None] & m_k[None, :], other=0.0)
        p_book = codebook + (word * 16 + k // PLACES)[:, None] * width + (i_h * D + o_d)[None, :]
        b_c = tl.load(p_book, mask=m_k[:, None] & m_d[None, :], other=0.0).to(tl.float32)
        b_out = tl.dot(b_y, b_c, b_out, input_precision="ieee" if FP32_DOT else "tf32")
    b_mass = tl.load(sums + row * CHANNELS + BITS, mask=m_m, other=0.0)
    b_offset = tl.load(offset + i_h * D + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_out += b_mass[:, None] * b_offset[None, :]
    tl.store(out + row[:, None] * D + o_d[None, :], b_out, mask=m_m[:, None] & m_d[None, :])


def apply_codebook(value: CommVQValueCodec, sums: Tensor, shape: torch.Size, fp32_dot: bool) -> Tensor:
    """`bit_sums` times the codebook of each row's head, float32 of the query's shape [batch, num_heads, query_len, d].

    `fp32_dot`: float32 products instead of tf32.
    """
    batch, kv_heads, head_dim = shape[0], value.spec.num_kv_heads, shape[3]
    rows = sums.shape[2] // kv_heads
    out = torch.empty(shape, device=sums.device)
    block_d = 16 if batch * kv_heads < 64 else 64
    _codebook_kernel[(batch * kv_heads, cdiv(head_dim, block_d), cdiv(rows, 16))](
        sums, value.codebook, value.offset, out, kv_heads, rows, value.codebook.shape[1],
        W=value.codebook.shape[0] // 16, CHANNELS=sums.shape[-1], D=head_dim, BLOCK_D=block_d, BLOCK_M=16, BLOCK_K=128,
        FP32_DOT=fp32_dot, num_warps=4, num_stages=3, **pdl_launch_options(),
    )  # fmt: skip
    return out
