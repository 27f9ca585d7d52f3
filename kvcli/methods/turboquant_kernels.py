"""Kernels of TurboQuant without signs of residuals: a launch decodes tokens, and a launch encodes them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.launch import cdiv, norm_unit, power_of_two, row_major
from kvcli.kernels.words import FP16_MAX, TINY, as_decoded
from kvcli.methods.packing import packed_size

# compiled for 8.6 and 9.0, and not timed
_DECODE_TILE = {"BLOCK_T": 32, "BLOCK_K": 32, "num_warps": 8, "num_stages": 2}
_ENCODE_TILE = {"BLOCK_T": 16, "BLOCK_K": 32, "num_warps": 4, "num_stages": 1}
_OF_LENGTHS = ["length", "total", "p_batch", "p_head", "n_batch", "n_head"]


@triton.jit
def _tokens(heads, length, total, BLOCK_T: tl.constexpr):
    """The program's tokens, counted over sequences and heads: numbers, which exist, sequences, heads and places."""
    n = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    return n, n < total, n // length // heads, n // length % heads, n % length


@triton.jit(do_not_specialize=_OF_LENGTHS)
def _decode_kernel(
    packed, norm, rotation, centroids, out, p_batch, p_head, p_time, n_batch, n_head, n_time, r_row, r_column,
    heads, length, total, unit,
    B: tl.constexpr, D: tl.constexpr, BYTES: tl.constexpr, FP32_DOT: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out = unit * norm * Q^T c[index], BLOCK_T of `total` = batch * heads * length tokens.

    Grid (ceil(total / BLOCK_T),). packed uint8 [batch, heads, length, BYTES], strides p_*, B-bit indices by
    `pack_bits`; norm float16 [batch, heads, length, 1], strides n_*; rotation float32 [D, D], Q, strides r_*; centroids
    float32 [2^B]; out [batch, heads, length, D] float, written, clamped to the range of float16 if it is that. BLOCK_D
    is D padded; BLOCK_K coordinates at a time; FP32_DOT: products in the precision of float32, else of float16 numbers.
    """
    n, m_n, i_b, i_h, i_t = _tokens(heads, length, total, BLOCK_T)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    p_packed = packed + i_b * p_batch + i_h * p_head + i_t * p_time
    b_x = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for start in range(0, D, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        m_k, byte = k < D, k * B // 8
        p_index, mask = p_packed[:, None] + byte[None, :], m_n[:, None] & m_k[None, :]
        index = tl.load(p_index, mask=mask, other=0).to(tl.int32)
        if 8 % B:  # an index may lie in two bytes
            index |= tl.load(p_index + 1, mask=mask & (byte + 1 < BYTES)[None, :], other=0).to(tl.int32) << 8
        b_c = tl.load(centroids + ((index >> (k * B % 8)[None, :]) & ((1 << B) - 1)))
        p_r = rotation + k[:, None] * r_row + o_d[None, :] * r_column
        b_r = tl.load(p_r, mask=m_k[:, None] & m_d[None, :], other=0.0)
        if FP32_DOT:
            b_x = tl.dot(b_c, b_r, b_x, input_precision="tf32x3")
        else:
            b_x = tl.dot(b_c.to(tl.float16), b_r.to(tl.float16), b_x)
    b_n = tl.load(norm + i_b * n_batch + i_h * n_head + i_t * n_time, mask=m_n, other=0.0).to(tl.float32) * unit
    tl.store(out + n[:, None] * D + o_d[None, :], as_decoded(b_x * b_n[:, None], out), mask=m_n[:, None] & m_d[None, :])


@triton.jit(do_not_specialize=_OF_LENGTHS, do_not_specialize_on_alignment=["packed", "norm"])
def _encode_kernel(
    x, packed, norm, rotation, centroids,
    x_batch, x_head, x_time, p_batch, p_head, p_time, n_batch, n_head, n_time, r_row, r_column,
    heads, length, total, per_unit,
    B: tl.constexpr, D: tl.constexpr, BYTES: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """norm = per_unit |x| and the indices of the centroids nearest to the coordinates of Q x / |x|.

    x [batch, heads, length, D] float, strides x_*; packed and norm are written; the rest is as in `_decode_kernel`.
    """
    _n, m_n, i_b, i_h, i_t = _tokens(heads, length, total, BLOCK_T)
    o_d, o_8, o_y = tl.arange(0, BLOCK_D), tl.arange(0, 8)[None, None, :], tl.arange(0, BLOCK_K // 8)
    m_d = o_d < D
    p_x = (x + i_b * x_batch + i_h * x_head + i_t * x_time)[:, None] + o_d[None, :]
    b_x = tl.load(p_x, mask=m_n[:, None] & m_d[None, :], other=0.0).to(tl.float32) * per_unit
    b_n = tl.sqrt_rn(tl.sum(b_x * b_x, axis=1))
    p_norm = norm + i_b * n_batch + i_h * n_head + i_t * n_time
    tl.store(p_norm, tl.minimum(b_n, FP16_MAX).to(tl.float16), mask=m_n)
    b_x = b_x / tl.maximum(b_n, TINY)[:, None]
    p_packed = packed + i_b * p_batch + i_h * p_head + i_t * p_time
    for start in range(0, D, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        p_r = rotation + k[None, :] * r_row + o_d[:, None] * r_column
        b_r = tl.load(p_r, mask=(k < D)[None, :] & m_d[:, None], other=0.0)
        b_y = tl.dot(b_x, b_r, input_precision="tf32x3")  # has the precision of float32
        index = tl.zeros(b_y.shape, tl.int32)
        for i in tl.static_range((1 << B) - 1):
            index += (b_y > (tl.load(centroids + i + 1) + tl.load(centroids + i)) / 2).to(tl.int32)
        index = tl.reshape(tl.where((k < D)[None, :], index, 0), (BLOCK_T, BLOCK_K // 8, 8))
        words = tl.sum(index << (o_8 * B), axis=2)
        for part in tl.static_range(B):  # 8 indices are B bytes
            byte = (start // 8 + o_y) * B + part
            p_byte, mask = p_packed[:, None] + byte[None, :], m_n[:, None] & (byte < BYTES)[None, :]
            tl.store(p_byte, (words >> (8 * part)).to(tl.uint8), mask=mask)


def decode_tokens(
    packed: Tensor, norm: Tensor, rotation: Tensor, centroids: Tensor, n_bits: int, dtype: torch.dtype
) -> Tensor:
    """As `TurboQuant.decode` from fields of `TurboQuantCodes`, with float16 products unless the result is float32."""
    batch, heads, length, size = packed.shape
    width, total = len(rotation), batch * heads * length
    out = packed.new_empty(batch, heads, length, width, dtype=dtype)
    if total:
        _decode_kernel[(cdiv(total, _DECODE_TILE["BLOCK_T"]),)](
            packed, norm, rotation, centroids, out, *packed.stride()[:3], *norm.stride()[:3], *rotation.stride(),
            heads, length, total, norm_unit(width), B=n_bits, D=width, BYTES=size, FP32_DOT=dtype == torch.float32,
            BLOCK_D=max(16, power_of_two(width)), **_DECODE_TILE,
        )  # fmt: skip
    return out


def encode_tokens(
    x: Tensor, rotation: Tensor, centroids: Tensor, n_bits: int, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """packed and norm of `TurboQuantCodes` of x [batch, heads, time, head_dim]; written to `out` if it is given."""
    x = row_major(x)
    batch, heads, length, width = x.shape
    size, total = packed_size(width, n_bits), batch * heads * length
    packed, norm = out or [x.new_empty(*x.shape[:3], n, dtype=t) for n, t in ((size, torch.uint8), (1, torch.float16))]
    if total:
        _encode_kernel[(cdiv(total, _ENCODE_TILE["BLOCK_T"]),)](
            x, packed, norm, rotation, centroids,
            *x.stride()[:3], *packed.stride()[:3], *norm.stride()[:3], *rotation.stride(),
            heads, length, total, 1 / norm_unit(width), B=n_bits, D=width, BYTES=size,
            BLOCK_D=max(16, power_of_two(width)), **_ENCODE_TILE,
        )  # fmt: skip
    return packed, norm
