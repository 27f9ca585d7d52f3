"""Kernels of KLT's tokens: a launch encodes keys or values, and a launch decodes them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.launch import Tiles, cdiv, power_of_two, row_major
from kvcli.kernels.words import as_decoded
from kvcli.methods.klt.field_kernels import COLUMNS, FIELDS, PER_OCTAVE, UNIT, gains, head_bytes
from kvcli.methods.klt.fields import BANDS, GAINS_PER_OCTAVE, MOST_BYTES, UNIT_GAIN
from kvcli.methods.klt.search_kernels import rounded, search

# tuned on one H100, torch 2.11, triton 3.6, for heads of 128 channels
_WIDE_TILE = {"BLOCK_T": 16, "num_warps": 4, "num_stages": 1}
_TILES = Tiles(hopper={"BLOCK_T": 64, "num_warps": 4, "num_stages": 1}, smaller=_WIDE_TILE)

_SEARCH_PROGRAMS = 1056
"""Of which each has memory for the search of a block of tokens."""

_BANDS = tl.constexpr(BANDS)
_NEAR = tl.constexpr(2.0 ** ((250 - UNIT_GAIN) / GAINS_PER_OCTAVE))
"""The gain from which on one is noted."""
_MOST_BYTES = tl.constexpr(MOST_BYTES)


@triton.jit
def _tokens(block, length, total, BLOCK_T: tl.constexpr):
    """Tokens of a block, counted over sequences: which exist, sequences and places."""
    n = (block * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    return n < total, n // length, n % length


@triton.jit
def _band(b_x, inverse, f, o_d, o_w, m_w, D: tl.constexpr, W: tl.constexpr):
    """Transformed channels of band f, float32 [tokens, BLOCK_W], of b_x [tokens, BLOCK_D] less its mean."""
    p_rows = inverse + (f * W + o_w)[None, :] * D + o_d[:, None]
    b_rows = tl.load(p_rows, mask=(o_d < D)[:, None] & m_w[None, :], other=0.0)
    return tl.dot(b_x, b_rows, input_precision="tf32x3")  # has the precision of float32


@triton.jit
def _encode_block(
    block, i_h, x, inverse, mean, weights, fields, packed, gain, peak, scratch, codes,
    x_batch, x_head, x_time, p_batch, p_time, g_batch, g_head, g_time, length, total,
    D: tl.constexpr, W: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_T: tl.constexpr,
    TRELLIS: tl.constexpr, NOTE: tl.constexpr,
):  # fmt: skip
    """Codes and gains of BLOCK_T tokens of head i_h; `inverse`, `fields`, `scratch` and `codes` are its own."""
    o_d, o_w, o_t = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_T)
    m_d, m_w = o_d < D, o_w < W
    coded = tl.load(fields + _BANDS * COLUMNS + 2)
    m_n, i_b, i_t = _tokens(block, length, total, BLOCK_T)
    p_x = (x + i_b * x_batch + i_h * x_head + i_t * x_time)[:, None] + o_d[None, :]
    b_x = tl.load(p_x, mask=m_n[:, None] & m_d[None, :], other=0.0).to(tl.float32)
    b_x = b_x - tl.load(mean + i_h * D + o_d, mask=m_d, other=0.0)[None, :]
    b_square = tl.zeros([BLOCK_T], tl.float32)
    for f in tl.static_range(_BANDS):
        b_y = _band(b_x, inverse, f, o_d, o_w, m_w, D, W)
        b_weight = tl.load(weights + i_h * D + f * W + o_w, mask=m_w, other=0.0)
        b_square += tl.sum(b_y * b_y * b_weight[None, :], axis=1)
    b_stored = rounded(tl.log2(tl.maximum(b_square, 1e-37)) * (0.5 * PER_OCTAVE) + UNIT, 255.0)
    b_gain = tl.where(b_stored > 0, tl.exp2((b_stored - UNIT) / PER_OCTAVE), 1e-30)
    tl.store(gain + i_b * g_batch + i_h * g_head + i_t * g_time, b_stored.to(tl.uint8), mask=m_n)
    if NOTE:
        largest = tl.max(tl.where(m_n, b_square, 0.0), 0)
        tl.atomic_max(peak, tl.sqrt(largest), mask=largest > _NEAR * _NEAR)
    if TRELLIS:
        for f in tl.static_range(_BANDS):
            last = 4 * tl.load(fields + COLUMNS * f + 2) + 3
            b_y = _band(b_x, inverse, f, o_d, o_w, m_w, D, W) / b_gain[:, None] + last.to(tl.float32) * 0.5
            p_y = scratch + (f * W + o_w)[None, :] * BLOCK_T + o_t[:, None]
            tl.store(p_y, tl.minimum(tl.maximum(b_y, -1e4), 1e4), mask=m_w[None, :] & (f < coded))
        tl.debug_barrier()
        search(scratch + o_t, codes + o_t, fields, coded * W, W, BLOCK_T)
        tl.debug_barrier()
    b_bytes, b_bits = (), tl.zeros([BLOCK_T, BLOCK_W], tl.int32)
    for i in tl.static_range(_MOST_BYTES):
        b_bytes = b_bytes + (tl.zeros([BLOCK_T, BLOCK_W], tl.int32),)
    for f in tl.static_range(_BANDS):
        if TRELLIS:
            p_code = codes + (f * W + o_w)[None, :] * BLOCK_T + o_t[:, None]
            b_code = tl.load(p_code, mask=m_w[None, :] & (f < coded), other=0).to(tl.int32)
            b_bits |= (b_code >> 8) << f
            b_code &= 255
        else:
            levels = tl.load(fields + COLUMNS * f + 2).to(tl.float32)
            b_y = _band(b_x, inverse, f, o_d, o_w, m_w, D, W) / b_gain[:, None] + levels * 0.5
            b_code = rounded(b_y, levels).to(tl.int32)
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


@triton.jit(do_not_specialize=["length", "total", "blocks"], do_not_specialize_on_alignment=["packed", "gain", "peak"])
def _encode_kernel(
    x, inverse, mean, weights, fields, packed, gain, peak, scratch, codes,
    x_batch, x_head, x_time, p_batch, p_time, g_batch, g_head, g_time, length, total, blocks,
    D: tl.constexpr, W: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_T: tl.constexpr,
    TRELLIS: tl.constexpr, NOTE: tl.constexpr,
):  # fmt: skip
    """Codes and gains of `total` = batch * length tokens of a head, in `blocks` of BLOCK_T; grid (programs, heads).

    x [batch, heads, length, D] float, strides x_*; inverse float32 [heads, D, D], B^-1; mean and weights float32
    [heads, D]; fields int32 [heads, BANDS + 1, 6]; packed uint8 [batch, 1, length, bytes] and gain uint8 [batch, heads,
    length, 1], strides p_* and g_*, are written. If TRELLIS, scratch float32 and codes int16 [heads, programs, D,
    BLOCK_T] are, too. NOTE: peak, float32 [], grows to the largest gain if that is near the largest that is stored.
    """
    i_h = tl.program_id(1).to(tl.int64)
    inverse += i_h * (D * D)
    fields += i_h * FIELDS
    if TRELLIS:
        scratch += (i_h * tl.num_programs(0) + tl.program_id(0)) * (D * BLOCK_T)
        codes += (i_h * tl.num_programs(0) + tl.program_id(0)) * (D * BLOCK_T)
        for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
            _encode_block(
                block, i_h, x, inverse, mean, weights, fields, packed, gain, peak, scratch, codes, x_batch, x_head,
                x_time, p_batch, p_time, g_batch, g_head, g_time, length, total, D, W, BLOCK_D, BLOCK_W, BLOCK_T, True,
                NOTE,
            )  # fmt: skip
            tl.debug_barrier()
    else:
        _encode_block(
            tl.program_id(0), i_h, x, inverse, mean, weights, fields, packed, gain, peak, scratch, codes, x_batch,
            x_head, x_time, p_batch, p_time, g_batch, g_head, g_time, length, total, D, W, BLOCK_D, BLOCK_W, BLOCK_T,
            False, NOTE,
        )  # fmt: skip


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
    FP32_DOT: tl.constexpr, TRELLIS: tl.constexpr,
):  # fmt: skip
    """out = mean + gain B (c - l / 2), [batch, heads, length, D] float, written; the rest as in `_encode_kernel`.

    basis float32 [heads, D, D], B. FP32_DOT: products in the precision of float32, else of tf32.
    """
    i_h = tl.program_id(1).to(tl.int64)
    m_n, i_b, i_t = _tokens(tl.program_id(0), length, total, BLOCK_T)
    o_d, o_w = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_W)
    m_d, m_w = o_d < D, o_w < W
    fields += i_h * FIELDS
    p_head, _ = head_bytes(packed + i_b * p_batch + i_t * p_time, fields, W)
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
        p_basis = basis + i_h * (D * D) + o_d[None, :] * D + (f * W + o_w)[:, None]
        b_b = tl.load(p_basis, mask=m_w[:, None] & m_d[None, :], other=0.0)
        if FP32_DOT:
            b_x = tl.dot(b_c, b_b, b_x, input_precision="tf32x3")
        else:
            b_x = tl.dot(b_c, b_b, b_x, input_precision="tf32")
    b_g = tl.load(gain + i_b * g_batch + i_h * g_head + i_t * g_time, mask=m_n, other=0)
    b_x = b_x * gains(b_g)[:, None]
    b_x = b_x + tl.load(mean + i_h * D + o_d, mask=m_d, other=0.0)[None, :]
    p_out = out + ((i_b * heads + i_h) * length + i_t)[:, None] * D + o_d[None, :]
    tl.store(p_out, as_decoded(b_x, out), mask=m_n[:, None] & m_d[None, :])


def _tile(head_dim: int, device: torch.device) -> dict[str, int]:
    return _TILES.on(device) if head_dim <= 128 else {**_WIDE_TILE, "num_warps": 4 if head_dim <= 256 else 8}


def encode_tokens(
    x: Tensor, inverse: Tensor, mean: Tensor, weights: Tensor, fields: Tensor, packed: Tensor, gain: Tensor,
    trellis: bool, peak: Tensor | None = None,
) -> None:  # fmt: skip
    """Writes packed and gain of `KLTCodes` of x [batch, heads, time, head_dim]; other tensors as in the kernel."""
    x = row_major(x)
    batch, heads, length, head_dim = x.shape
    width = head_dim // BANDS
    if x.numel():
        tile = _tile(head_dim, x.device)
        programs = blocks = cdiv(batch * length, tile["BLOCK_T"])
        scratch = x, x  # not used
        if trellis:
            programs = min(blocks, cdiv(_SEARCH_PROGRAMS, heads))
            shape = (heads, programs, head_dim, tile["BLOCK_T"])
            scratch = torch.empty(shape, device=x.device), torch.empty(shape, dtype=torch.int16, device=x.device)
        _encode_kernel[(programs, heads)](
            x, inverse, mean, weights, fields, packed, gain, x if peak is None else peak, *scratch,
            *x.stride()[:3], packed.stride(0), packed.stride(2), *gain.stride()[:3], length, batch * length, blocks,
            D=head_dim, W=width, BLOCK_D=max(16, power_of_two(head_dim)), BLOCK_W=max(16, power_of_two(width)),
            TRELLIS=trellis, NOTE=peak is not None, **tile,
        )  # fmt: skip


def decode_tokens(
    packed: Tensor, gain: Tensor, basis: Tensor, mean: Tensor, fields: Tensor, dtype: torch.dtype, trellis: bool
) -> Tensor:
    """As `decode` of KLT's codecs, with tf32 products unless the result is float32."""
    batch, heads, length, _ = gain.shape
    head_dim = basis.shape[-1]
    width = head_dim // BANDS
    out = packed.new_empty(batch, heads, length, head_dim, dtype=dtype)
    if out.numel():
        tile = _tile(head_dim, packed.device)
        _decode_kernel[(cdiv(batch * length, tile["BLOCK_T"]), heads)](
            packed, gain, basis, mean, fields, out, packed.stride(0), packed.stride(2), *gain.stride()[:3],
            heads, length, batch * length, D=head_dim, W=width, FP32_DOT=dtype == torch.float32, TRELLIS=trellis,
            BLOCK_D=max(16, power_of_two(head_dim)), BLOCK_W=max(16, power_of_two(width)), **tile,
        )  # fmt: skip
    return out
