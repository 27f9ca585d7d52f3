"""Shared by CommVQ's key kernels: codes out of the bit stream, and the sum of their codewords (arXiv 2506.18879).

Codebook entries are bytes, four per word (`pack_codebook`), so two integer sums do for R words: one of the words and
one of their odd bytes, from which the even ones follow exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvcli.kernels.words import INTERPRETED, odd_bytes

MAX_STAGES = 90
"""Most stages whose sum of two bytes each, plus 0x4B00, fits 16 bits."""

_MAGIC = tl.constexpr(0x4B000000)
"""2^23 as float32: the integers up to 2^23 added to its bits are added to its value."""


@triton.jit
def _code_word(packed, at, first, i: tl.constexpr, m_n, PITCH: tl.constexpr, ALIGNED: tl.constexpr):
    """Word `first` + i of each token's code stream: uint32 of the shape that first, offsets `at` and m_n make."""
    if ALIGNED:
        word = tl.load(packed + at + (first + i), mask=(first + i < PITCH // 4) & m_n, other=0)
        return word.to(tl.uint32, bitcast=True)
    word = (at + first).to(tl.uint32) * 0
    for k in tl.static_range(4):
        byte = 4 * (first + i) + k
        word |= tl.load(packed + at + byte, mask=(byte < PITCH) & m_n, other=0).to(tl.uint32) << (8 * k)
    return word


@triton.jit
def code_words(packed, t, p_time, first, count, PITCH: tl.constexpr, ALIGNED: tl.constexpr, WORDS: tl.constexpr):
    """WORDS + 1 words of the code streams of tokens t, from word `first` on: uint32 [...] each.

    packed: pointer to token 0, of int32 words if ALIGNED, else of bytes; PITCH bytes per token, `p_time` elements. t:
    [T] or [1, T], tokens, those from `count` on read as 0; first: a number or [G, 1].
    """
    words = ()
    for i in tl.static_range(WORDS + 1):
        words = words + (_code_word(packed, t * p_time, first, i, t < count, PITCH, ALIGNED),)
    return words


@triton.jit
def four_per_thread(base, at):
    """Pointers base + at, uint32 [..., W], of which a thread loads four neighbours, if W is a multiple of four.

    The cast of the pointer drops what Triton knows of contiguous elements, so four are declared again.
    """
    BYTES: tl.constexpr = base.dtype.scalar.element_ty.primitive_bitwidth // 8
    pointers = (base.to(tl.pointer_type(tl.int8)) + at * BYTES).to(base.dtype.scalar)
    if len(at.shape) == 2 and at.shape[-1] % 4 == 0:
        pointers = tl.max_contiguous(tl.multiple_of(pointers, [1, 4 * BYTES]), [1, 4])
    return pointers


@triton.jit
def _words_of_row(row, o_w, PART: tl.constexpr):
    """Offsets of words o_w [W] of rows uint32 [...], [..., W]."""
    first = tl.expand_dims(row * PART, -1)
    # shift, mask and this are two instructions together
    return first | o_w.to(tl.uint32) if PART & (PART - 1) == 0 else first + o_w.to(tl.uint32)


@triton.jit
def codeword_sums(
    raws, shift, table, o_w, PART: tl.constexpr, R: tl.constexpr, N: tl.constexpr, CODE_BITS: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """sum_r (u_a + i u_b) of R codes: int32 [..., W] real and imaginary parts, two 16-bit numbers each, with a bias
    that `halves_of_sums` subtracts.

    raws are those of `code_words`, [...]; shift: uint32, a number or [G, 1], bits of the first word before the first
    code; table: pointer, or pointers [G, 1, 1], to row 0 of the first stage; PART words per row, N rows per stage; o_w:
    words [W] of a row.
    """
    MASK: tl.constexpr = (1 << CODE_BITS) - 1
    # the group's codes, aligned to its first bit: WORDS tensors [...]
    b_words = ()
    for i in tl.static_range(WORDS):
        b_words = b_words + ((raws[i] >> shift) | ((raws[i + 1] << 1) << (31 - shift)),)
    # sums of whole words, and of their odd bytes
    all_a = tl.expand_dims(raws[0], -1).to(tl.int32) * 0 + tl.zeros([o_w.shape[-1]], tl.int32)
    odd_a, all_b, odd_b = all_a, all_a, all_a
    for r in tl.static_range(R):
        code = b_words[(r * CODE_BITS) // 32] >> ((r * CODE_BITS) % 32)
        if (r * CODE_BITS) % 32 + CODE_BITS > 32:
            code |= b_words[(r * CODE_BITS) // 32 + 1] << (32 - (r * CODE_BITS) % 32)
        code = code & MASK
        stage = table + r * N * PART
        a = tl.load(four_per_thread(stage, _words_of_row(code // N, o_w, PART)))
        b = tl.load(four_per_thread(stage, _words_of_row(code % N, o_w, PART)))
        all_a += a
        odd_a += odd_bytes(a)
        all_b += b
        odd_b += odd_bytes(b)
    # two pairs per word; the bias keeps the low half from borrowing from the high one
    real = all_a - (odd_a << 8) - odd_b + R * 255 * 0x10001 + _MAGIC
    imag = all_b - (odd_b << 8) + odd_a + _MAGIC
    return real, imag


@triton.jit
def halves_of_sums(real, imag, R: tl.constexpr):
    """Both numbers of each word of `codeword_sums`, without bias: float32, each a real and an imaginary part."""
    low_re, high_re = _floats_of_16_bits(real)
    low_im, high_im = _floats_of_16_bits(imag)
    RE: tl.constexpr = 8388608.0 + R * 255
    IM: tl.constexpr = 8388608.0 + 2 * R * 128
    return (low_re - RE, low_im - IM), (high_re - RE, high_im - IM)


@triton.jit
def _floats_of_16_bits(x):
    """The low and the high 16 bits of int32 x - _MAGIC as numbers, plus 2^23: float32, exact.

    One instruction each, of different units, instead of a shift, a mask and a conversion.
    """
    high = (x.to(tl.uint32, bitcast=True) >> 16).to(tl.int32, bitcast=True) + (_MAGIC - (_MAGIC >> 16))
    if INTERPRETED:
        low = x - (high << 16)
    else:
        low = tl.inline_asm_elementwise(
            "mad.lo.s32 $0, $1, -65536, $2;", "=r,r,r", [high, x], dtype=tl.int32, is_pure=True, pack=1
        )
    return low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)
