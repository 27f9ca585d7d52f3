"""Kernels of KLT's tokens: two launches encode keys or values, and a launch decodes them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.launch import Tiles, cdiv, power_of_two, row_major
from kvcli.kernels.pdl import pdl_launch_dependents, pdl_launch_options, pdl_wait
from kvcli.kernels.words import as_decoded
from kvcli.methods.klt.field_kernels import COLUMNS, FIELDS, PER_OCTAVE, UNIT, gains, head_bytes
from kvcli.methods.klt.fields import BANDS, GAINS_PER_OCTAVE, MAX_SHIFT, MOST_BYTES, TRIED_GAINS, UNIT_GAIN
from kvcli.methods.klt.search_kernels import rounded, search

# tuned on one H100, torch 2.11, triton 3.6, for heads of 128 channels
_WIDE_TILE = {"BLOCK_T": 16, "num_warps": 4, "num_stages": 1}
_TILES = Tiles(hopper={"BLOCK_T": 64, "num_warps": 4, "num_stages": 1}, smaller=_WIDE_TILE)

_PROGRAMS = 1056
"""Blocks of tokens of all heads that are encoded at once; each has memory for its transformed channels."""

_BANDS = tl.constexpr(BANDS)
_NEAR = tl.constexpr(2.0 ** ((250 - MAX_SHIFT - UNIT_GAIN) / GAINS_PER_OCTAVE))
"""The root mean square from which on one is noted."""
_MAX_SHIFT = tl.constexpr(MAX_SHIFT)
_TRIED, _FIRST, _STEP = (tl.constexpr(x) for x in (len(TRIED_GAINS), TRIED_GAINS.start, TRIED_GAINS.step))
_MOST_BYTES = tl.constexpr(MOST_BYTES)


@triton.jit
def _tokens(block, length, total, BLOCK_T: tl.constexpr):
    """Tokens of a block, counted over sequences: which exist, sequences and places."""
    n = (block * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    return n < total, n // length, n % length


@triton.jit(do_not_specialize=["first", "length", "total"])
def _analyse_kernel(
    x, inverse, mean, y, x_batch, x_head, x_time, first, length, total,
    D: tl.constexpr, W: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_T: tl.constexpr,
    JOINT: tl.constexpr,
):  # fmt: skip
    """y = B^-1 (x - mean) of a head's band, of blocks of tokens from block `first` on; grid (blocks, BANDS, heads).

    x [batch, heads, length, D] float, strides x_*; inverse float32 [heads / JOINT, JOINT * D, JOINT * D], B^-1; mean
    float32 [heads, D]; y float32 [heads, blocks, BLOCK_T, D] is written. There are `total` = batch * length tokens of a
    head.
    """
    pdl_launch_dependents()
    block, f, i_h = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_d, o_w = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_W)
    m_d, m_w = o_d < D, o_w < W
    m_n, i_b, i_t = _tokens(first + block, length, total, BLOCK_T)
    i_first = i_h // JOINT * JOINT  # of the heads that share the transform
    p_x = (x + i_b * x_batch + i_first * x_head + i_t * x_time)[:, None] + o_d[None, :]
    p_rows = inverse + i_h * (JOINT * D * D) + (f * W + o_w)[None, :] * (JOINT * D) + o_d[:, None]
    b_mean = tl.load(mean + i_first * D + o_d, mask=m_d, other=0.0)
    b_rows = tl.load(p_rows, mask=m_d[:, None] & m_w[None, :], other=0.0)
    pdl_wait()
    b_y = tl.zeros([BLOCK_T, BLOCK_W], tl.float32)
    for i in tl.static_range(JOINT):
        if i > 0:
            b_mean = tl.load(mean + (i_first + i) * D + o_d, mask=m_d, other=0.0)
            b_rows = tl.load(p_rows + i * D, mask=m_d[:, None] & m_w[None, :], other=0.0)
        b_x = tl.load(p_x + i * x_head, mask=m_n[:, None] & m_d[None, :], other=0.0).to(tl.float32) - b_mean[None, :]
        b_y = tl.dot(b_x, b_rows, b_y, input_precision="tf32x3")  # has the precision of float32
    y += (i_h * tl.num_programs(0) + block) * (BLOCK_T * D) + f * W
    tl.store(y + tl.arange(0, BLOCK_T)[:, None] * D + o_w[None, :], b_y, mask=m_w[None, :])


@triton.jit
def _divisor(b_stored):
    """Gains by which channels are divided, of gains as they are stored; float32."""
    return tl.where(b_stored > 0, tl.exp2((b_stored - UNIT) / PER_OCTAVE), 1e-30)


@triton.jit
def _best_gain(b_ys, b_stored, lasts, bands, m_w):
    """Of gains around b_stored [BLOCK_T], float32, the one with the least squared error, as `_KLT.best_gain`.

    b_ys and lasts: of each band, transformed channels [BLOCK_T, BLOCK_W] and the last level, float32; so many bands
    have codes.
    """
    b_best, b_least = b_stored, tl.full(b_stored.shape, float("inf"), tl.float32)
    for i in range(_TRIED):
        b_try = tl.minimum(tl.maximum(b_stored + (_FIRST + i * _STEP), 1.0), 255.0)
        b_try = tl.where(b_stored > 0, b_try, 0.0)
        b_gain = _divisor(b_try)
        b_inverse, b_square = 1.0 / b_gain, tl.zeros(b_ys[0].shape, tl.float32)
        for f in tl.static_range(_BANDS):
            b_level = rounded(b_ys[f] * b_inverse[:, None] + lasts[f] * 0.5, lasts[f])
            b_left = b_ys[f] - b_gain[:, None] * (b_level - lasts[f] * 0.5)
            b_square += tl.where(m_w[None, :] & (f < bands), b_left * b_left, 0.0)
        b_error = tl.sum(b_square, axis=1)
        b_best = tl.where(b_error < b_least, b_try, b_best)
        b_least = tl.minimum(b_error, b_least)
    return b_best


@triton.jit
def _unbiased(b_square, b_product, b_stored):
    """As `_KLT.unbiased_gain`, from sums of y^2 and of y times levels, and the gains that codes are chosen with."""
    b_ratio = tl.maximum(b_square, 1e-37) / tl.maximum(b_product, 1e-37)
    b_new = rounded(tl.log2(b_ratio) * PER_OCTAVE + UNIT, 255.0)
    b_new = tl.minimum(tl.maximum(b_new, b_stored - _MAX_SHIFT), b_stored + _MAX_SHIFT)
    b_new = tl.minimum(tl.maximum(b_new, 1.0), 255.0)
    return tl.where((b_product > 0) & (b_square > 0) & (b_stored > 0), b_new, b_stored)


@triton.jit(do_not_specialize=["first", "length", "total"], do_not_specialize_on_alignment=["packed", "gain", "peak"])
def _encode_kernel(
    y, weights, fields, packed, gain, peak, codes, p_batch, p_time, g_batch, g_head, g_time, first, length, total,
    D: tl.constexpr, W: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_T: tl.constexpr, TRELLIS: tl.constexpr,
    NOTE: tl.constexpr, TRY: tl.constexpr, UNBIASED: tl.constexpr,
):  # fmt: skip
    """Codes and gains of y of `_analyse_kernel`, which a trellis overwrites; grid (blocks, heads).

    weights float32 [heads, D]; fields int32 [heads, BANDS + 1, 6]; packed uint8 [batch, 1, length, bytes] and gain
    uint8 [batch, heads, length, 1], strides p_* and g_*, are written. If TRELLIS, codes int16 shaped like y are, too.
    NOTE: peak, float32 [], grows to the largest root mean square if that is near the largest gain that is stored. TRY:
    as `_KLT.searches_gain`; UNBIASED: as `_KLT.unbiased`.
    """
    pdl_launch_dependents()
    block, i_h = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_w, o_t = tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_T)
    m_w = o_w < W
    m_n, i_b, i_t = _tokens(first + block, length, total, BLOCK_T)
    fields += i_h * FIELDS
    coded = tl.load(fields + _BANDS * COLUMNS + 2)
    own = (i_h * tl.num_programs(0) + block) * (BLOCK_T * D)
    y += own
    b_ys, lasts, b_square = (), (), tl.zeros([BLOCK_T, BLOCK_W], tl.float32)
    pdl_wait()
    for f in tl.static_range(_BANDS):
        b_y = tl.load(y + o_t[:, None] * D + (f * W + o_w)[None, :], mask=m_w[None, :], other=0.0)
        b_weight = tl.load(weights + i_h * D + f * W + o_w, mask=m_w, other=0.0)
        b_square += b_y * b_y * b_weight[None, :]
        b_ys = b_ys + (b_y,)
        lasts = lasts + (tl.load(fields + COLUMNS * f + 2).to(tl.float32),)
    b_square = tl.sum(b_square, axis=1)
    if NOTE:
        largest = tl.max(tl.where(m_n, b_square, 0.0), 0)
        tl.atomic_max(peak, tl.sqrt(largest), mask=largest > _NEAR * _NEAR)
    b_stored = rounded(tl.log2(tl.maximum(b_square, 1e-37)) * (0.5 * PER_OCTAVE) + UNIT, 255.0)
    if TRY:
        b_stored = _best_gain(b_ys, b_stored, lasts, coded, m_w)
    b_gain = _divisor(b_stored)
    if TRELLIS:  # searched channel by channel, so that tokens are neighbours in memory
        tl.debug_barrier()
        for f in tl.static_range(_BANDS):
            b_y = b_ys[f] / b_gain[:, None] + (2.0 * lasts[f] + 1.5)
            p_y = y + (f * W + o_w)[None, :] * BLOCK_T + o_t[:, None]
            tl.store(p_y, tl.minimum(tl.maximum(b_y, -1e4), 1e4), mask=m_w[None, :])
        tl.debug_barrier()
        b_product = b_gain * search(y + o_t, codes + own + o_t, fields, coded * W, W, BLOCK_T)
        tl.debug_barrier()
    b_bytes, b_bits = (), tl.zeros([BLOCK_T, BLOCK_W], tl.int32)
    b_square, b_products = tl.zeros([BLOCK_T, BLOCK_W], tl.float32), tl.zeros([BLOCK_T, BLOCK_W], tl.float32)
    for i in tl.static_range(_MOST_BYTES):
        b_bytes = b_bytes + (tl.zeros([BLOCK_T, BLOCK_W], tl.int32),)
    for f in tl.static_range(_BANDS):
        if TRELLIS:
            p_code = codes + own + (f * W + o_w)[None, :] * BLOCK_T + o_t[:, None]
            b_code = tl.load(p_code, mask=m_w[None, :] & (f < coded), other=0).to(tl.int32)
            b_bits |= (b_code >> 8) << f
            b_code &= 255
        else:
            b_level = rounded(b_ys[f] / b_gain[:, None] + lasts[f] * 0.5, lasts[f])
            b_code = b_level.to(tl.int32)
            b_products += tl.where(f < coded, b_ys[f] * (b_level - lasts[f] * 0.5), 0.0)
        b_square += tl.where(f < coded, b_ys[f] * b_ys[f], 0.0)
        b_code = b_code << tl.load(fields + COLUMNS * f + 1)
        place = tl.load(fields + COLUMNS * f)
        b_new = ()
        for i in tl.static_range(_MOST_BYTES):
            b_new = b_new + (tl.where(place == i, b_bytes[i] | b_code, b_bytes[i]),)
        b_bytes = b_new
    p_head, num_bytes = head_bytes(packed + i_b * p_batch + i_t * p_time, fields, W)
    p_byte = p_head[:, None] + o_w[None, :]
    for i in tl.static_range(_MOST_BYTES):
        b_byte = (b_bytes[i] | b_bits if i == 0 else b_bytes[i]).to(tl.uint8)
        tl.store(p_byte + i * W, b_byte, mask=m_n[:, None] & m_w[None, :] & (i < num_bytes))
    if UNBIASED:
        if not TRELLIS:
            b_product = tl.sum(b_products, axis=1)
        b_stored = _unbiased(tl.sum(b_square, axis=1), b_product, b_stored)
    tl.store(gain + i_b * g_batch + i_h * g_head + i_t * g_time, b_stored.to(tl.uint8), mask=m_n)


@triton.jit
def _bits_before(p_token, m_n, o_w, DISTANCE: tl.constexpr, bands, W: tl.constexpr):
    """Bits of the trellis of channels so many before o_w, int32 [tokens, BLOCK_W], from a head's first byte on."""
    wraps = tl.where(o_w < DISTANCE, (DISTANCE - o_w + W - 1) // W, 0)
    p_byte = p_token[:, None] + (o_w - DISTANCE + wraps * W)[None, :]
    bits = tl.load(p_byte, mask=m_n[:, None] & (o_w < W)[None, :], other=0).to(tl.int32) & ((1 << bands) - 1)
    turn = wraps[None, :] % bands
    return ((bits << turn) | (bits >> (bands - turn))) & ((1 << bands) - 1)


@triton.jit(do_not_specialize=["length", "total"], do_not_specialize_on_alignment=["packed", "gain"])
def _decode_kernel(
    packed, gain, basis, mean, fields, out,
    p_batch, p_time, g_batch, g_head, g_time, heads, length, total,
    D: tl.constexpr, W: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_T: tl.constexpr,
    JOINT: tl.constexpr, FP32_DOT: tl.constexpr, TRELLIS: tl.constexpr,
):  # fmt: skip
    """out = mean + B gain (c - l / 2), [batch, heads, length, D] float, written; the rest as in the kernels above.

    basis float32 [heads / JOINT, JOINT * D, JOINT * D], B. FP32_DOT: products in the precision of float32, else tf32.
    """
    i_h = tl.program_id(1).to(tl.int64)
    i_first = i_h // JOINT * JOINT
    m_n, i_b, i_t = _tokens(tl.program_id(0), length, total, BLOCK_T)
    o_d, o_w = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_W)
    m_d, m_w = o_d < D, o_w < W
    basis += i_h * (JOINT * D * D)
    b_x = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for i in range(JOINT):
        p_gain = gain + i_b * g_batch + (i_first + i) * g_head + i_t * g_time
        b_x += _decoded_share(
            packed + i_b * p_batch + i_t * p_time, p_gain, fields + (i_first + i) * FIELDS, basis + i * D, m_n,
            o_d, m_d, o_w, m_w, D, W, BLOCK_T, BLOCK_D, JOINT, FP32_DOT, TRELLIS,
        )  # fmt: skip
    b_x = b_x + tl.load(mean + i_h * D + o_d, mask=m_d, other=0.0)[None, :]
    p_out = out + ((i_b * heads + i_h) * length + i_t)[:, None] * D + o_d[None, :]
    tl.store(p_out, as_decoded(b_x, out), mask=m_n[:, None] & m_d[None, :])


@triton.jit
def _decoded_share(
    p_token, p_gain, fields, basis, m_n, o_d, m_d, o_w, m_w, D: tl.constexpr, W: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr, JOINT: tl.constexpr, FP32_DOT: tl.constexpr, TRELLIS: tl.constexpr,
):  # fmt: skip
    """What a head's codes add to channels o_d of a head, [BLOCK_T, BLOCK_D] float32."""
    p_head, _ = head_bytes(p_token, fields, W)
    bands = tl.load(fields + _BANDS * COLUMNS + 2)
    if TRELLIS:
        b_0 = _bits_before(p_head, m_n, o_w, 2, bands, W)
        b_1 = _bits_before(p_head, m_n, o_w, 0, bands, W) ^ _bits_before(p_head, m_n, o_w, 1, bands, W)
        b_1 ^= _bits_before(p_head, m_n, o_w, 4, bands, W)
    b_x = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for f in tl.static_range(_BANDS):
        p_byte = p_head[:, None] + tl.load(fields + COLUMNS * f) * W + o_w[None, :]
        b_c = tl.load(p_byte, mask=m_n[:, None] & m_w[None, :], other=0).to(tl.int32) >> tl.load(
            fields + COLUMNS * f + 1
        )
        last = tl.load(fields + COLUMNS * f + 2)
        b_c &= last
        if TRELLIS:
            b_c = 4 * b_c + 2 * ((b_1 >> f) & 1) + ((b_0 >> f) & 1)
            last = 4 * last + 3
        b_c = tl.where(f < bands, b_c.to(tl.float32) - last.to(tl.float32) * 0.5, 0.0)
        p_basis = basis + o_d[None, :] * (JOINT * D) + (f * W + o_w)[:, None]
        b_b = tl.load(p_basis, mask=m_w[:, None] & m_d[None, :], other=0.0)
        if FP32_DOT:
            b_x = tl.dot(b_c, b_b, b_x, input_precision="tf32x3")
        else:
            b_x = tl.dot(b_c, b_b, b_x, input_precision="tf32")
    return b_x * gains(tl.load(p_gain, mask=m_n, other=0))[:, None]


def _tile(head_dim: int, device: torch.device) -> dict[str, int]:
    return _TILES.on(device) if head_dim <= 128 else {**_WIDE_TILE, "num_warps": 4 if head_dim <= 256 else 8}


def encode_tokens(
    x: Tensor, inverse: Tensor, mean: Tensor, weights: Tensor, fields: Tensor, packed: Tensor, gain: Tensor,
    peak: Tensor | None, *, joint: int, trellis: bool, searches_gain: bool, unbiased: bool,
) -> None:  # fmt: skip
    """Writes packed and gain of `KLTCodes` of x [batch, heads, time, head_dim]; other tensors as in the kernel, choices
    as of the codec.
    """
    x = row_major(x)
    batch, heads, length, head_dim = x.shape
    width, tile = head_dim // BANDS, _tile(head_dim, x.device)
    encoded = tile if trellis else _WIDE_TILE
    blocks, most = cdiv(batch * length, tile["BLOCK_T"]), cdiv(_PROGRAMS, heads)
    y = torch.empty(heads, min(blocks, most) * tile["BLOCK_T"], head_dim, device=x.device)
    codes = torch.empty(y.shape, dtype=torch.int16, device=x.device) if trellis else y  # else not used
    sizes = {"D": head_dim, "W": width, "BLOCK_W": max(16, power_of_two(width))}
    parts = tile["BLOCK_T"] // encoded["BLOCK_T"]
    for first in range(0, blocks, most):
        count = min(most, blocks - first)
        _analyse_kernel[(count, BANDS, heads)](
            x, inverse, mean, y, *x.stride()[:3], first, length, batch * length,
            BLOCK_D=max(16, power_of_two(head_dim)), JOINT=joint, **sizes, **tile, **pdl_launch_options(),
        )  # fmt: skip
        _encode_kernel[(count * parts, heads)](
            y, weights, fields, packed, gain, x if peak is None else peak, codes, packed.stride(0), packed.stride(2),
            *gain.stride()[:3], first * parts, length, batch * length, TRELLIS=trellis, NOTE=peak is not None,
            TRY=searches_gain, UNBIASED=unbiased, **sizes, **encoded, **pdl_launch_options(),
        )  # fmt: skip


def decode_tokens(
    packed: Tensor, gain: Tensor, basis: Tensor, mean: Tensor, fields: Tensor, dtype: torch.dtype, trellis: bool
) -> Tensor:
    """As `decode` of KLT's codecs, with tf32 products unless the result is float32."""
    batch, heads, length, _ = gain.shape
    head_dim = mean.shape[-1]
    width = head_dim // BANDS
    out = packed.new_empty(batch, heads, length, head_dim, dtype=dtype)
    if out.numel():
        tile = _tile(head_dim, packed.device)
        _decode_kernel[(cdiv(batch * length, tile["BLOCK_T"]), heads)](
            packed, gain, basis, mean, fields, out, packed.stride(0), packed.stride(2), *gain.stride()[:3],
            heads, length, batch * length, D=head_dim, W=width, JOINT=heads // len(basis),
            FP32_DOT=dtype == torch.float32, TRELLIS=trellis,
            BLOCK_D=max(16, power_of_two(head_dim)), BLOCK_W=max(16, power_of_two(width)), **tile,
        )  # fmt: skip
    return out
