"""What CommVQ's key kernels share: codes out of the bit stream, and the sum of their codewords (arXiv 2506.18879).

Codebook entries are bytes, four per word (`pack_codebook`), so two integer sums do for R words: one of the words and
one of their odd bytes, from which the even ones follow exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvcli.kernels.words import odd_bytes

MAX_STAGES = 128
"""Most stages whose sum of two bytes each fits 16 bits."""


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

    Args:
        packed: pointer to token 0, of int32 words if ALIGNED, else of bytes; PITCH bytes per token, `p_time` elements.
        t: [T] or [1, T], tokens; those from `count` on read as 0.
        first: first word, a number or [G, 1].
    """
    words = ()
    for i in tl.static_range(WORDS + 1):
        words = words + (_code_word(packed, t * p_time, first, i, t < count, PITCH, ALIGNED),)
    return words


@triton.jit
def codeword_sums(
    raws, shift, p_table, PART: tl.constexpr, R: tl.constexpr, N: tl.constexpr, CODE_BITS: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """sum_r (u_a + i u_b) of R codes: int32 [..., W] real and imaginary parts, two 16-bit numbers each.

    Args:
        raws: of `code_words`, [...].
        shift: uint32, a number or [G, 1], bits of the first word before the first code.
        p_table: pointers [1, W] or [G, 1, W] to words of row 0 of the first stage; PART words per row, N rows per
            stage.

    Returns:
        Both with a bias that `half_of_sums` subtracts.
    """
    MASK: tl.constexpr = (1 << CODE_BITS) - 1
    # the group's codes, aligned to its first bit: WORDS tensors [...]
    b_words = ()
    for i in tl.static_range(WORDS):
        b_words = b_words + ((raws[i] >> shift) | ((raws[i + 1] << 1) << (31 - shift)),)
    # sums of whole words, and of their odd bytes
    all_a = tl.expand_dims(raws[0], -1).to(tl.int32) * 0 + tl.zeros([p_table.shape[-1]], tl.int32)
    odd_a, all_b, odd_b = all_a, all_a, all_a
    for r in tl.static_range(R):
        code = b_words[(r * CODE_BITS) // 32] >> ((r * CODE_BITS) % 32)
        if (r * CODE_BITS) % 32 + CODE_BITS > 32:
            code |= b_words[(r * CODE_BITS) // 32 + 1] << (32 - (r * CODE_BITS) % 32)
        code = (code & MASK).to(tl.int32)
        a = tl.load(p_table + tl.expand_dims((code // N) * PART + r * N * PART, -1))
        b = tl.load(p_table + tl.expand_dims((code % N) * PART + r * N * PART, -1))
        all_a += a
        odd_a += odd_bytes(a)
        all_b += b
        odd_b += odd_bytes(b)
    # two pairs per word; the bias keeps the low half from borrowing from the high one
    real = all_a - (odd_a << 8) - odd_b + R * 255 * 0x10001
    imag = all_b - (odd_b << 8) + odd_a
    return real, imag


@triton.jit
def half_of_sums(real, imag, half: tl.constexpr, R: tl.constexpr):
    """Number `half` (0 or 1) of each word of `codeword_sums`, without bias: float32, real and imaginary parts."""
    b_re = _float_of_16_bits(real >> (16 * half)) - (8388608.0 + R * 255)
    b_im = _float_of_16_bits(imag >> (16 * half)) - (8388608.0 + 2 * R * 128)
    return b_re, b_im


@triton.jit
def _float_of_16_bits(x):
    """The low 16 bits of int32 x as a number, plus 2^23: float32, exact, in one instruction instead of a conversion."""
    return ((x & 0xFFFF) | 0x4B000000).to(tl.float32, bitcast=True)
