"""Kernels of KLT's tokens: a launch encodes keys or values, and a launch decodes them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.launch import Tiles, cdiv, power_of_two, row_major
from kvcli.kernels.operands import in_thread_order
from kvcli.kernels.words import INTERPRETED, as_decoded
from kvcli.methods.klt.fields import BANDS, GAINS_PER_OCTAVE, MOST_BYTES, UNIT_GAIN

# tuned on one H100, torch 2.11, triton 3.6, for heads of 128 channels
_WIDE_TILE = {"BLOCK_T": 16, "num_warps": 4, "num_stages": 1}
_TILES = Tiles(hopper={"BLOCK_T": 64, "num_warps": 4, "num_stages": 1}, smaller=_WIDE_TILE)

_BANDS = tl.constexpr(BANDS)
_MOST_BYTES = tl.constexpr(MOST_BYTES)
COLUMNS = tl.constexpr(6)
FIELDS = tl.constexpr((BANDS + 1) * 6)
"""Numbers of a head in `Tables.fields`."""
_UNIT = tl.constexpr(float(UNIT_GAIN))
_PER_OCTAVE = tl.constexpr(float(GAINS_PER_OCTAVE))


@triton.jit
def gains(b_g):
    """Gains as numbers, float32, from how they are stored, uint8."""
    b_g = b_g.to(tl.float32)
    return tl.where(b_g > 0, tl.exp2((b_g - _UNIT) / _PER_OCTAVE), 0.0)


@triton.jit
def head_bytes(packed, fields, W: tl.constexpr):
    """Where the bytes of a head begin in the token that `packed` points to, and how many a channel of each band has.

    `fields` points to the head's row of `Tables.fields`.
    """
    first = tl.multiple_of(tl.load(fields + _BANDS * COLUMNS), W & -W)
    return packed + first, tl.load(fields + _BANDS * COLUMNS + 1)


@triton.jit
def head_bands(fields, FP32_DOT: tl.constexpr):
    """What `band_columns` and `band_rows` need of each band: a tuple of three numbers each."""
    FIRST: tl.constexpr = 0 if FP32_DOT or INTERPRETED else 3
    bands = ()
    for f in tl.static_range(_BANDS):
        p_field = fields + f * COLUMNS + FIRST
        bands = bands + ((tl.load(p_field), tl.load(p_field + 1), tl.load(p_field + 2)),)
    return bands


@triton.jit
def lane_words(p_word, lane, mask, PLANE: tl.constexpr, COUNT: tl.constexpr, W: tl.constexpr):
    """Byte PLANE of COUNT neighbouring channels of a band as one number, int16 or int32; bytes beyond W are 0.

    p_word points to byte 0 of channel `lane` and tokens, of one shape with it; `mask` is a scalar. W is even.
    """
    if W % COUNT == 0:
        words = _load_words(p_word, lane, mask, PLANE, COUNT, W)
    else:  # Triton takes operands that were loaded byte by byte for those of another product
        low = _load_words(p_word, lane, mask, PLANE, 2, W).to(tl.int32) & 0xFFFF
        words = low | (_load_words(p_word + 2, lane + 2, mask, PLANE, 2, W).to(tl.int32) << 16)
    return words


@triton.jit
def _load_words(p_word, lane, mask, PLANE: tl.constexpr, COUNT: tl.constexpr, W: tl.constexpr):
    dtype: tl.constexpr = tl.int16 if COUNT == 2 else tl.int32
    p_word = p_word.to(tl.pointer_type(dtype))
    if PLANE > 0:
        p_word = in_thread_order(p_word, PLANE * W // COUNT, COUNT)
    if W % 16 > 0:
        words = tl.load(p_word, mask=mask & (lane < W), other=0)
    elif PLANE > 0:
        words = tl.load(p_word, mask=mask)  # any numbers where there is no such byte, of which no band takes one
    else:
        words = tl.load(p_word)
    return words


@triton.jit
def head_planes(p_word, lane, num_bytes, PLANES: tl.constexpr, COUNT: tl.constexpr, W: tl.constexpr):
    """`lane_words` of the head's first PLANES bytes, a tuple."""
    planes = ()
    for i in tl.static_range(PLANES):
        planes = planes + (lane_words(p_word, lane, i < num_bytes, i, COUNT, W),)
    return planes


@triton.jit
def _byte_of(x, band, i: tl.constexpr, FP32: tl.constexpr):
    """Byte i of the words of the band's plane among x: its code in float32, or masked and read as float16."""
    plane, bit, levels = band
    words = tl.where(plane == 0, x[0], x[1])
    if len(x) > 2:
        words = tl.where(plane < 2, words, tl.where(plane == 2, x[2], x[3]))
    code = (words.to(tl.int32) >> (8 * i + bit)) & levels
    return code.to(tl.float32) if FP32 else (code << bit).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _operands(band, PLANES: tl.constexpr):
    """Operands of inline assembly: selectors of one register among two, of its bytes 0 and 2, 1 and 3; and the mask."""
    first, even, mask = band
    if PLANES == 2:  # both selections are one
        even += first - 0x3210
    b_none = tl.zeros([1, 1], tl.int32)
    return b_none + first, b_none + even, b_none + (even + 0x1111), b_none + mask


@triton.jit
def band_columns(x, band, FP32_DOT: tl.constexpr):
    """A band as a first operand [tokens, channels], its columns in the order of `channels_as_rows`.

    Codes in float32, or in float16 c * 2^bit / FIELD_SCALE: bytes masked and read as such. A thread has the four
    channels of a word.

    Args:
        x: the head's bytes in two or four planes, int32 [tokens, channels / 4] each.
        band: of `head_bands`.
    """
    if FP32_DOT or INTERPRETED:
        b_0, b_1 = _byte_of(x, band, 0, FP32_DOT), _byte_of(x, band, 1, FP32_DOT)
        b_2, b_3 = _byte_of(x, band, 2, FP32_DOT), _byte_of(x, band, 3, FP32_DOT)
    else:
        first, even, odd, mask = _operands(band, len(x))
        if len(x) == 2:
            b_0, b_2, b_1, b_3 = tl.inline_asm_elementwise(
                "{ .reg .b32 x; prmt.b32 x, $4, $5, $6; and.b32 x, x, $8; mov.b32 {$0, $1}, x;"
                " prmt.b32 x, $4, $5, $7; and.b32 x, x, $8; mov.b32 {$2, $3}, x; }",
                "=h,=h,=h,=h,r,r,r,r,r",
                [x[0], x[1], even, odd, mask],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
                is_pure=True,
                pack=1,
            )
        else:
            b_0, b_2, b_1, b_3 = tl.inline_asm_elementwise(
                "{ .reg .b32 a, b, x; prmt.b32 a, $4, $5, $8; prmt.b32 b, $6, $7, $8;"
                " prmt.b32 x, a, b, $9; and.b32 x, x, $11; mov.b32 {$0, $1}, x;"
                " prmt.b32 x, a, b, $10; and.b32 x, x, $11; mov.b32 {$2, $3}, x; }",
                "=h,=h,=h,=h,r,r,r,r,r,r,r,r",
                [x[0], x[1], x[2], x[3], first, even, odd, mask],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
                is_pure=True,
                pack=1,
            )
    N: tl.constexpr = x[0].shape[0]
    WORDS: tl.constexpr = x[0].shape[1]
    b_c = tl.reshape(tl.join(tl.join(b_0, b_2), tl.join(b_1, b_3)), [N, 4, WORDS // 4, 2, 2])
    return tl.reshape(tl.permute(b_c, [0, 2, 1, 4, 3]), [N, 4 * WORDS])


@triton.jit
def channels_as_rows(b_x):
    """x [channels, C] as a second operand, rows in the order of `band_columns`."""
    K: tl.constexpr = b_x.shape[0]
    C: tl.constexpr = b_x.shape[1]
    return tl.reshape(tl.permute(tl.reshape(b_x, [4, K // 16, 2, 2, C]), [1, 0, 3, 2, 4]), [K, C])


@triton.jit
def band_rows(x, band, FP32_DOT: tl.constexpr):
    """As `band_columns`, of planes int16 [channels / 2, tokens]: [channels, tokens], first even, then odd channels."""
    if FP32_DOT or INTERPRETED:
        b_even, b_odd = _byte_of(x, band, 0, FP32_DOT), _byte_of(x, band, 1, FP32_DOT)
    else:
        first, even, odd, mask = _operands(band, len(x))  # two registers each, of equal content
        if len(x) == 2:
            b_even, b_odd = tl.inline_asm_elementwise(
                "{ .reg .b32 x; prmt.b32 x, $2, $3, $4; and.b32 $0, x, $8;"
                " prmt.b32 x, $2, $3, $6; and.b32 $1, x, $8; }",
                "=r,=r,r,r,r,r,r,r,r,r",
                [x[0], x[1], even, odd, mask],
                dtype=(tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
        else:
            b_even, b_odd = tl.inline_asm_elementwise(
                "{ .reg .b32 a, b, x; prmt.b32 a, $2, $3, $6; prmt.b32 b, $4, $5, $6;"
                " prmt.b32 x, a, b, $8; and.b32 $0, x, $12; prmt.b32 x, a, b, $10; and.b32 $1, x, $12; }",
                "=r,=r,r,r,r,r,r,r,r,r,r,r,r,r",
                [x[0], x[1], x[2], x[3], first, even, odd, mask],
                dtype=(tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
    return tl.reshape(tl.permute(tl.join(b_even, b_odd), [2, 0, 1]), [2 * x[0].shape[0], x[0].shape[1]])


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
    [heads, D]; fields int32 [heads, BANDS + 1, 6]; packed uint8 [batch, 1, length, bytes] and gain uint8 [batch, heads,
    length, 1], strides p_* and g_*, are written.
    """
    i_h = tl.program_id(1).to(tl.int64)
    m_n, i_b, i_t = _tokens(length, total, BLOCK_T)
    o_d, o_w = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_W)
    m_d, m_w = o_d < D, o_w < W
    inverse += i_h * (D * D)
    fields += i_h * FIELDS
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
    b_bytes = ()
    for i in tl.static_range(_MOST_BYTES):
        b_bytes = b_bytes + (tl.zeros([BLOCK_T, BLOCK_W], tl.int32),)
    for f in tl.static_range(_BANDS):
        levels = tl.load(fields + COLUMNS * f + 2)
        b_y = _band(b_x, inverse, f, o_d, o_w, m_w, D, W) / b_gain[:, None] + levels.to(tl.float32) * 0.5
        b_c = _rounded(b_y, levels.to(tl.float32)) << tl.load(fields + COLUMNS * f + 1)
        place = tl.load(fields + COLUMNS * f)
        b_new = ()
        for i in tl.static_range(_MOST_BYTES):
            b_new = b_new + (tl.where(place == i, b_bytes[i] | b_c, b_bytes[i]),)
        b_bytes = b_new
    p_head, num_bytes = head_bytes(packed + i_b * p_batch + i_t * p_time, fields, W)
    p_byte = p_head[:, None] + o_w[None, :]
    for i in tl.static_range(_MOST_BYTES):
        tl.store(p_byte + i * W, b_bytes[i].to(tl.uint8), mask=m_n[:, None] & m_w[None, :] & (i < num_bytes))


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
    fields += i_h * FIELDS
    p_head, _ = head_bytes(packed + i_b * p_batch + i_t * p_time, fields, W)
    b_x = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for f in tl.static_range(_BANDS):
        p_byte = p_head[:, None] + tl.load(fields + COLUMNS * f) * W + o_w[None, :]
        b_c = tl.load(p_byte, mask=m_n[:, None] & m_w[None, :], other=0).to(tl.int32) >> tl.load(
            fields + COLUMNS * f + 1
        )
        b_c = (b_c & tl.load(fields + COLUMNS * f + 2)).to(tl.float32)
        b_c = b_c - tl.load(fields + COLUMNS * f + 2).to(tl.float32) * 0.5
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
    x: Tensor, inverse: Tensor, mean: Tensor, weights: Tensor, fields: Tensor, packed: Tensor, gain: Tensor
) -> None:
    """Writes packed and gain of `KLTCodes` of x [batch, heads, time, head_dim]; other tensors as in the kernel."""
    x = row_major(x)
    batch, heads, length, head_dim = x.shape
    width = head_dim // BANDS
    if x.numel():
        tile = _tile(head_dim, x.device)
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
        tile = _tile(head_dim, packed.device)
        _decode_kernel[(cdiv(batch * length, tile["BLOCK_T"]), heads)](
            packed, gain, basis, mean, fields, out, packed.stride(0), packed.stride(2), *gain.stride()[:3],
            heads, length, batch * length, D=head_dim, W=width, FP32_DOT=dtype == torch.float32,
            BLOCK_D=max(16, power_of_two(head_dim)), BLOCK_W=max(16, power_of_two(width)), **tile,
        )  # fmt: skip
    return out
