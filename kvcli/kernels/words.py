"""Fields of 16-bit words as floats, without conversion: how kernels read packed codes; and products with packed bits.

A word of `pack_planes` has 16 // B fields of B bits, B in 1, 2, 4, 8. A field in the low byte, masked but not shifted,
reads as a subnormal float16 of value code * 2^(shift - 24), and tensor cores multiply subnormals exactly. So one AND
for two words is all that dequantization costs; the power of two goes into the other operand.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvcli.kernels import launch

INTERPRETED = tl.constexpr(launch.interpreted())

PACKED_MINIMUM = tl.constexpr(launch.all_gpus_have((9, 0)))
"""Whether GPUs take minima of two 16-bit numbers in one instruction."""

FP16_MAX = tl.constexpr(launch.FP16_MAX)
TINY = tl.constexpr(launch.TINY)

FIELD_SCALE = tl.constexpr(16777216.0)
"""2^24: a masked field in the lowest bits reads as code / FIELD_SCALE."""

EVICT_FIRST = tl.constexpr("evict_first")
"""Eviction policy of codes and scales, which are read once: the scores between two kernels then stay in L2."""


@triton.jit
def fields_as_fp16(words, MASK: tl.constexpr, HIGH: tl.constexpr = False):
    """int16 words [A, C] & MASK, read as float16; HIGH: of their high bytes, with MASK as in the low ones.

    On a GPU one instruction serves two words: the compiler would unpack, mask and pack them again.
    """
    if INTERPRETED:
        return ((words >> 8 if HIGH else words) & MASK).to(tl.float16, bitcast=True)
    return tl.inline_asm_elementwise(
        "{ .reg .b32 x; shr.b32 x, $1, 8; and.b32 $0, x, $2; }" if HIGH else "and.b32 $0, $1, $2;",
        "=r,r,r",
        [words, tl.full([1, 1], MASK, tl.int16)],
        dtype=tl.float16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def low_halves(a, b):
    """The low 16 bits of int32 a, and above them those of b."""
    if INTERPRETED:
        return (a & 0xFFFF) | (b << 16)
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def high_halves(a, b):
    """The high 16 bits of int32 a, and above them those of b."""
    if INTERPRETED:
        return ((a >> 16) & 0xFFFF) | (b & -65536)
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def min_sum_of_halves(a, b, c):
    """min(a, b + c) of the low and of the high 16 bits of int32 tensors, as unsigned numbers; no sum may overflow."""
    if PACKED_MINIMUM:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 x; add.u16x2 x, $2, $3; min.u16x2 $0, $1, x; }",
            "=r,r,r,r",
            [a, b, c],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    x = b + c
    high = tl.minimum(a.to(tl.uint32, bitcast=True), x.to(tl.uint32, bitcast=True)).to(tl.int32, bitcast=True)
    return (high & -65536) | tl.minimum(a & 0xFFFF, x & 0xFFFF)


@triton.jit
def masked_pairs(x, MASK: tl.constexpr):
    """Both halves of int32 x [...], each & MASK, read as float16 [..., 2]."""
    if INTERPRETED:
        low = (x & MASK).to(tl.int16).to(tl.float16, bitcast=True)
        high = ((x >> 16) & MASK).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        low, high = tl.inline_asm_elementwise(
            "{ .reg .b32 x; and.b32 x, $2, $3; mov.b32 {$0, $1}, x; }",
            "=h,=h,r,r",
            [x, tl.full([1], MASK * 0x10001, tl.int32)],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=1,
        )
    return tl.join(low, high)


@triton.jit
def field_fp32(words, f: tl.constexpr, B: tl.constexpr):
    """Field f of integer words: its code as float32."""
    return ((words >> (B * f)) & ((1 << B) - 1)).to(tl.float32)


@triton.jit
def field_fp16(words, f: tl.constexpr, B: tl.constexpr):
    """Field f of int16 words [A, C], masked in its byte: code * 2^(B (f mod 8/B)) / FIELD_SCALE as float16."""
    LOW: tl.constexpr = 8 // B
    return fields_as_fp16(words, ((1 << B) - 1) << (B * (f % LOW)), f >= LOW)


@triton.jit
def field_dot(words, b_x, acc, f: tl.constexpr, B: tl.constexpr, FP32_DOT: tl.constexpr):
    """acc + field @ b_x for field f of int16 words [A, K], b_x [K, C] and acc float32 [A, C].

    The field is `field_fp32` if FP32_DOT, with b_x float32, else `field_fp16`, with b_x float16.
    """
    if FP32_DOT:
        acc = tl.dot(field_fp32(words, f, B), b_x, acc, input_precision="ieee")
    else:
        acc = tl.dot(field_fp16(words, f, B), b_x, acc)
    return acc


@triton.jit
def query_fields(
    p_query, m_m, o_w, F_STRIDE: tl.constexpr, W_STRIDE: tl.constexpr, W: tl.constexpr, D: tl.constexpr,
    B: tl.constexpr, FP32_DOT: tl.constexpr,
):  # fmt: skip
    """Query rows as the other operand of `field_dot`: for each field the channels that it holds in words o_w.

    Args:
        p_query: pointers [M] to rows of D channels; field f of word w holds channel f F_STRIDE + w W_STRIDE.
        m_m: bool [M], rows that exist.
        o_w: words [BLOCK_W], of which the first W exist.

    Returns:
        16 // B tensors float32 [BLOCK_W, M], 0 where there is no channel, and float32 [M]: a power of two above each
        row's largest magnitude, 1 if FP32_DOT.
    """
    b_qs = ()
    b_top = tl.zeros([o_w.shape[0], p_query.shape[0]], tl.float32)
    for f in tl.static_range(16 // B):
        channel = f * F_STRIDE + o_w * W_STRIDE
        m_c = (o_w < W) & (channel < D) if (16 // B) * W > D else o_w < W
        b_q = tl.load(p_query[None, :] + channel[:, None], mask=m_m[None, :] & m_c[:, None], other=0.0).to(tl.float32)
        b_top = tl.maximum(b_top, tl.abs(b_q))
        b_qs = b_qs + (b_q,)
    unit = pow2_above(tl.maximum(tl.max(b_top, 0), TINY))
    if FP32_DOT:
        unit = tl.full([p_query.shape[0]], 1.0, tl.float32)
    return b_qs, unit


@triton.jit
def query_in_units(b_qs, unit, B: tl.constexpr, FP32_DOT: tl.constexpr):
    """`query_fields` divided by each row's unit, and by the power of two by which `field_fp16` reads field f too large.

    The products of all fields then add up; their sum times unit (and FIELD_SCALE unless FP32_DOT) is the score.
    """
    b_units = ()
    for f in tl.static_range(16 // B):
        b_q = b_qs[f] if FP32_DOT else (b_qs[f] / (unit * (1 << (B * (f % (8 // B)))))[None, :]).to(tl.float16)
        b_units = b_units + (b_q,)
    return b_units


@triton.jit
def mul2(a, b):
    """a * b on float16 tensors of one shape, two elements per instruction."""
    if INTERPRETED:
        return a * b
    return tl.inline_asm_elementwise(
        "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.float16, is_pure=True, pack=2
    )


@triton.jit
def fma2(a, b, c):
    """a * b + c on float16 tensors, two elements per instruction."""
    if INTERPRETED:
        return (a.to(tl.float32) * b.to(tl.float32) + c.to(tl.float32)).to(tl.float16)
    return tl.inline_asm_elementwise(
        "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.float16, is_pure=True, pack=2
    )


@triton.jit
def pow2_above(x):
    """A power of two in (x, 2 x] for positive float32 x."""
    return ((x.to(tl.int32, bitcast=True) & 0x7F800000) + 0x00800000).to(tl.float32, bitcast=True)


@triton.jit
def odd_bytes(words):
    """Bytes 1 and 3 of int32 words as two 16-bit numbers: (words >> 8) & 0x00FF00FF in one instruction."""
    if INTERPRETED:
        return (words >> 8) & 0x00FF00FF
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0, 0x4341;", "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def as_decoded(x, out):
    """float32 x in the dtype that `out` points to, clamped to the range of float16 if it is that; NaN stays."""
    if out.dtype.element_ty == tl.float16:
        x = tl.where(x > FP16_MAX, FP16_MAX, tl.where(x < -FP16_MAX, -FP16_MAX, x))
    return x.to(out.dtype.element_ty)


@triton.jit
def bit_rows(
    p_bits, m_t, rows, o_c, m_c, row_stride,
    COUNT: tl.constexpr, BYTES: tl.constexpr, BLOCK_Y: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sums of rows, float32 [BLOCK_T, BLOCK_C]: bits of `pack_bits`, as zeros and ones, times rows.

    The bits of equal place in their bytes are one product on tensor cores, so a byte is loaded once.

    Args:
        p_bits: pointers [BLOCK_T] to BYTES bytes of a token, which hold COUNT bits.
        m_t: bool [BLOCK_T], tokens that exist.
        rows: [COUNT, columns] float16 or float32, which is the dtype of the product; stride `row_stride`.
        o_c, m_c: columns [BLOCK_C], and which of them exist.

    Constexprs: BLOCK_Y bytes at a time, at least 16.
    """
    o_y = tl.arange(0, BLOCK_Y)
    total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for start in range(0, BYTES, BLOCK_Y):
        y = start + o_y
        b_bytes = tl.load(p_bits[:, None] + y[None, :], mask=m_t[:, None] & (y < BYTES)[None, :], other=0)
        for place in tl.static_range(8):
            bit = 8 * y + place
            p_rows = rows + bit.to(tl.int64)[:, None] * row_stride + o_c[None, :]
            b_rows = tl.load(p_rows, mask=(bit < COUNT)[:, None] & m_c[None, :], other=0.0)
            b_bits = ((b_bytes >> place) & 1).to(rows.dtype.element_ty)
            total = tl.dot(b_bits, b_rows, total, input_precision="ieee")
    return total
