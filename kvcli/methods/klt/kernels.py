"""Kernels of KLT's tokens: a launch encodes keys or values, and a launch decodes them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.launch import cdiv, power_of_two, row_major
from kvcli.kernels.words import as_decoded
from kvcli.methods.klt.fields import BANDS, GAINS_PER_OCTAVE, MOST_BYTES, UNIT_GAIN

# tuned on one H100, torch 2.11, triton 3.6, for heads of 128 channels
_TILE = {"BLOCK_T": 64, "num_warps": 4, "num_stages": 1}
_WIDE_TILE = {"BLOCK_T": 16, "num_warps": 4, "num_stages": 1}

_BANDS = tl.constexpr(BANDS)
_MOST_BYTES = tl.constexpr(MOST_BYTES)
_UNIT = tl.constexpr(float(UNIT_GAIN))
_PER_OCTAVE = tl.constexpr(float(GAINS_PER_OCTAVE))


@triton.jit
def gains(p_gain, mask):
    """Gains as numbers from where they are stored: float32, 0 where the mask is off."""
    b_g = tl.load(p_gain, mask=mask, other=0).to(tl.float32)
    return tl.where(b_g > 0, tl.exp2((b_g - _UNIT) / _PER_OCTAVE), 0.0)


@triton.jit
def band_bytes(p_token, m_n, p_field, o_w, m_w, W: tl.constexpr):
    """The bytes in which codes of a band lie, uint8 [tokens, BLOCK_W].

    p_token [tokens] points to the bytes of tokens; p_field to the band's byte, bit and 2^b - 1.
    """
    first = tl.multiple_of(tl.load(p_field), W & -W)
    return tl.load(p_token[:, None] + first + o_w[None, :], mask=m_n[:, None] & m_w[None, :], other=0)


@triton.jit
def band_codes(p_token, m_n, p_field, o_w, m_w, W: tl.constexpr):
    """Codes c of a band, int32 [tokens, BLOCK_W]; arguments are those of `band_bytes`."""
    code = band_bytes(p_token, m_n, p_field, o_w, m_w, W).to(tl.int32) >> tl.load(p_field + 1)
    return code & tl.load(p_field + 2)


@triton.jit
def _tokens(length, total, BLOCK_T: tl.constexpr):
    """The program's tokens, counted over sequences: which exist, sequences and places."""
    n = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    return n < total, n // length, n % length


@triton.jit
def _band(b_x, inverse, f, o_d, o_w, m_w, D: tl.constexpr, W: tl.constexpr):
    """Transformed channels of band f, float32 [tokens, BLOCK_W], of b_x [tokens, BLOCK_D] less its mean."""
    p_rows = inverse + (f * W + o_w)[None, :] * D + o_d[:, None]
    b_rows = tl.load(p_rows, mask=(o_d < D)[:, None] & m_w[None, :], other=0.0)
    return tl.dot(b_x, b_rows, input_precision="tf32x3")  # has the precision of float32


@triton.jit
def _rounded(x, most):
    """x rounded, halves to even, and clamped to 0 and `most`: int32."""
    x = tl.minimum(tl.maximum(x, 0.0), most)
    low = x.to(tl.int32)
    part = x - low.to(tl.float32)
    return low + ((part > 0.5) | ((part == 0.5) & (low % 2 == 1))).to(tl.int32)


@triton.jit(do_not_specialize=["length", "total"], do_not_specialize_on_alignment=["packed", "gain"])
def _encode_kernel(
    x, inverse, mean, weights, fields, packed, gain,
    x_batch, x_head, x_time, p_batch, p_time, g_batch, g_head, g_time, length, total,
    D: tl.constexpr, W: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Codes and gains of BLOCK_T of `total` = batch * length tokens of a head; grid (ceil(total / BLOCK_T), heads).

    x [batch, heads, length, D] float, strides x_*; inverse float32 [heads, D, D], B^-1; mean and weights float32
    [heads, D]; fields int32 [heads, BANDS, 3]; packed uint8 [batch, 1, length, bytes] and gain uint8 [batch, heads,
    length, 1], strides p_* and g_*, are written.
    """
    i_h = tl.program_id(1).to(tl.int64)
    m_n, i_b, i_t = _tokens(length, total, BLOCK_T)
    o_d, o_w = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_W)
    m_d, m_w = o_d < D, o_w < W
    inverse += i_h * (D * D)
    fields += i_h * (_BANDS * 3)
    p_x = (x + i_b * x_batch + i_h * x_head + i_t * x_time)[:, None] + o_d[None, :]
    b_x = tl.load(p_x, mask=m_n[:, None] & m_d[None, :], other=0.0).to(tl.float32)
    b_x = b_x - tl.load(mean + i_h * D + o_d, mask=m_d, other=0.0)[None, :]
    b_square = tl.zeros([BLOCK_T], tl.float32)
    for f in tl.static_range(_BANDS):
        b_y = _band(b_x, inverse, f, o_d, o_w, m_w, D, W)
        b_weight = tl.load(weights + i_h * D + f * W + o_w, mask=m_w, other=0.0)
        b_square += tl.sum(b_y * b_y * b_weight[None, :], axis=1)
    b_log = _UNIT + _PER_OCTAVE * 0.5 * tl.log2(tl.maximum(b_square, 1e-37))
    b_stored = _rounded(b_log, 255.0).to(tl.float32)
    b_gain = tl.where(b_stored > 0, tl.exp2((b_stored - _UNIT) / _PER_OCTAVE), 1e-30)
    tl.store(gain + i_b * g_batch + i_h * g_head + i_t * g_time, b_stored.to(tl.uint8), mask=m_n)
    first = tl.load(fields)
    for f in tl.static_range(1, _BANDS):
        has_code = tl.load(fields + 3 * f + 2) > 0
        first = tl.minimum(first, tl.where(has_code, tl.load(fields + 3 * f), first))
    b_bytes = ()
    for i in tl.static_range(_MOST_BYTES):
        b_bytes = b_bytes + (tl.zeros([BLOCK_T, BLOCK_W], tl.int32),)
    for f in tl.static_range(_BANDS):
        levels = tl.load(fields + 3 * f + 2)
        b_y = _band(b_x, inverse, f, o_d, o_w, m_w, D, W) / b_gain[:, None] + levels.to(tl.float32) * 0.5
        b_c = _rounded(b_y, levels.to(tl.float32)) << tl.load(fields + 3 * f + 1)
        place = (tl.load(fields + 3 * f) - first) // W
        b_new = ()
        for i in tl.static_range(_MOST_BYTES):
            b_new = b_new + (tl.where(place == i, b_bytes[i] | b_c, b_bytes[i]),)
        b_bytes = b_new
    used = 0
    for f in tl.static_range(_BANDS):
        has_code = tl.load(fields + 3 * f + 2) > 0
        used = tl.maximum(used, tl.where(has_code, (tl.load(fields + 3 * f) - first) // W + 1, 0))
    p_packed = (packed + i_b * p_batch + i_t * p_time)[:, None] + first + o_w[None, :]
    for i in tl.static_range(_MOST_BYTES):
        mask = m_n[:, None] & m_w[None, :] & (i < used)
        tl.store(p_packed + i * W, b_bytes[i].to(tl.uint8), mask=mask)


@triton.jit(do_not_specialize=["length", "total"], do_not_specialize_on_alignment=["packed", "gain"])
def _decode_kernel(
    packed, gain, basis, mean, fields, out,
    p_batch, p_time, g_batch, g_head, g_time, heads, length, total,
    D: tl.constexpr, W: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_T: tl.constexpr,
    FP32_DOT: tl.constexpr,
):  # fmt: skip
    """out = mean + gain B (c - (2^b - 1) / 2), [batch, heads, length, D] float, written; the rest as `_encode_kernel`.

    basis float32 [heads, D, D], B. FP32_DOT: products in the precision of float32, else of tf32.
    """
    i_h = tl.program_id(1).to(tl.int64)
    m_n, i_b, i_t = _tokens(length, total, BLOCK_T)
    o_d, o_w = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_W)
    m_d, m_w = o_d < D, o_w < W
    fields += i_h * (_BANDS * 3)
    b_x = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for f in tl.static_range(_BANDS):
        b_c = band_codes(packed + i_b * p_batch + i_t * p_time, m_n, fields + 3 * f, o_w, m_w, W).to(tl.float32)
        b_c = b_c - tl.load(fields + 3 * f + 2).to(tl.float32) * 0.5
        p_basis = basis + i_h * (D * D) + o_d[None, :] * D + (f * W + o_w)[:, None]
        b_b = tl.load(p_basis, mask=m_w[:, None] & m_d[None, :], other=0.0)
        if FP32_DOT:
            b_x = tl.dot(b_c, b_b, b_x, input_precision="tf32x3")
        else:
            b_x = tl.dot(b_c, b_b, b_x, input_precision="tf32")
    b_x = b_x * gains(gain + i_b * g_batch + i_h * g_head + i_t * g_time, m_n)[:, None]
    b_x = b_x + tl.load(mean + i_h * D + o_d, mask=m_d, other=0.0)[None, :]
    p_out = out + ((i_b * heads + i_h) * length + i_t)[:, None] * D + o_d[None, :]
    tl.store(p_out, as_decoded(b_x, out), mask=m_n[:, None] & m_d[None, :])


def encode_tokens(
    x: Tensor, inverse: Tensor, mean: Tensor, weights: Tensor, fields: Tensor, packed: Tensor, gain: Tensor
) -> None:
    """Writes packed and gain of `KLTCodes` of x [batch, heads, time, head_dim]; other tensors as in the kernel."""
    x = row_major(x)
    batch, heads, length, head_dim = x.shape
    width = head_dim // BANDS
    if x.numel():
        tile = _TILE if head_dim <= 128 else _WIDE_TILE
        _encode_kernel[(cdiv(batch * length, tile["BLOCK_T"]), heads)](
            x, inverse, mean, weights, fields, packed, gain, *x.stride()[:3],
            packed.stride(0), packed.stride(2), *gain.stride()[:3], length, batch * length, D=head_dim, W=width,
            BLOCK_D=max(16, power_of_two(head_dim)), BLOCK_W=max(16, power_of_two(width)), **tile,
        )  # fmt: skip


def decode_tokens(
    packed: Tensor, gain: Tensor, basis: Tensor, mean: Tensor, fields: Tensor, dtype: torch.dtype
) -> Tensor:
    """As `decode` of KLT's codecs, with tf32 products unless the result is float32."""
    batch, heads, length, _ = gain.shape
    head_dim = basis.shape[-1]
    width = head_dim // BANDS
    out = packed.new_empty(batch, heads, length, head_dim, dtype=dtype)
    if out.numel():
        tile = _TILE if head_dim <= 128 else _WIDE_TILE
        _decode_kernel[(cdiv(batch * length, tile["BLOCK_T"]), heads)](
            packed, gain, basis, mean, fields, out, packed.stride(0), packed.stride(2), *gain.stride()[:3],
            heads, length, batch * length, D=head_dim, W=width, FP32_DOT=dtype == torch.float32,
            BLOCK_D=max(16, power_of_two(head_dim)), BLOCK_W=max(16, power_of_two(width)), **tile,
        )  # fmt: skip
    return out
