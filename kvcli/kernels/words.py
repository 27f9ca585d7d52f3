"""Small integers taken out of 16-bit words as floats, without converting them.

A field of at most 8 bits in the low byte of a 16-bit word, masked but not shifted, reads as a subnormal float16 of
value code * 2^(shift - 24), and tensor cores multiply subnormals exactly. So one AND for two words is all that
dequantization costs; the power of two goes into the other operand.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvcli.kernels.launch import interpreted

INTERPRETED = tl.constexpr(interpreted())

EVICT_FIRST = tl.constexpr("evict_first")
"""Eviction policy of codes and scales, which are read once: the scores between two kernels then stay in L2."""


@triton.jit
def fields_as_fp16(words, MASK: tl.constexpr):
    """int16 words [A, B] & MASK, read as float16.

    On a GPU one instruction serves two words: the compiler would unpack, mask and pack them again.
    """
    if INTERPRETED:
        return (words & MASK).to(tl.float16, bitcast=True)
    return tl.inline_asm_elementwise(
        "and.b32 $0, $1, $2;",
        "=r,r,r",
        [words, tl.full([1, 1], MASK, tl.int16)],
        dtype=tl.float16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def fma2(a, b, c):
    """a * b + c on float16 tensors, two elements an instruction."""
    if INTERPRETED:
        return (a.to(tl.float32) * b.to(tl.float32) + c.to(tl.float32)).to(tl.float16)
    return tl.inline_asm_elementwise(
        "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.float16, is_pure=True, pack=2
    )


@triton.jit
def pow2_above(x):
    """The smallest power of two that is larger than positive float32 x, times at most 2."""
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
def layout_barrier(x):
    """Identity on float32 that stops Triton's layout propagation.

    Without it the producer is recomputed once per layout that a consumer needs.
    """
    if INTERPRETED:
        return x
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=False, pack=1)


@triton.jit
def layout_barrier_fp16(x):
    """`layout_barrier` for float16; without it the convert_layout is hoisted above a reduction and paid per term."""
    if INTERPRETED:
        return x
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float16, is_pure=False, pack=2)
