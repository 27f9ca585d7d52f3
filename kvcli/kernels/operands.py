"""Operands of products on tensor cores, loaded into the registers that take them.

A product of one warp (mma.m16n8k16) takes in thread 4 i + t row i of the first operand and column i of the second one,
and of the sixteen columns and rows that are summed over 2 t, 2 t + 1, 2 t + 8 and 2 t + 9; or 4 t to 4 t + 3 if a
`tl.join` made the operand, as Triton then has it. Triton loads a tensor into
registers as its addresses suggest, and where a product takes it in others it goes through shared memory, which costs
more than the product. So axes are split into these parts, loaded, and put together, which moves nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def in_thread_order(base, offsets, BYTES: tl.constexpr):
    """Pointers base + offsets [.., A, B, V] whose loads give threads to B, then A, and neighbours along V to a thread.

    With two axes, they are A and B.

    Triton gives threads to axes in the order of their contiguity, and to equal ones in an order that changed between
    its versions 3.6 and 3.7; so the three are said to be contiguous, which matters for nothing else.

    Args:
        base, offsets: pointers and integers of shapes that broadcast to 2, 4 or 5 axes.
        BYTES: what the first pointer along V is a multiple of, and so the size of a thread's load.
    """
    pointers = base + offsets
    if len(pointers.shape) == 2:
        pointers = tl.max_contiguous(tl.multiple_of(pointers, [BYTES, BYTES]), [4, 8])
    elif len(pointers.shape) == 4:
        pointers = tl.max_contiguous(tl.multiple_of(pointers, [BYTES, BYTES, BYTES, BYTES]), [1, 4, 8, 16])
    else:
        pointers = tl.max_contiguous(tl.multiple_of(pointers, [BYTES, BYTES, BYTES, BYTES, BYTES]), [1, 1, 4, 8, 16])
    return pointers


@triton.jit
def words_as_columns(words):
    """Words [N, K] of codes as a first operand, columns in the order of `words_as_rows`.

    Word t K / 4 + 2 v + i becomes column 8 v + 2 t + i, so that a thread's words are neighbours in memory.
    """
    N: tl.constexpr = words.shape[0]
    K: tl.constexpr = words.shape[1]
    return tl.reshape(tl.permute(tl.reshape(words, [N, 4, K // 8, 2]), [0, 2, 1, 3]), [N, K])


@triton.jit
def words_as_rows(x):
    """x [K, C] with words of codes along K as a second operand, rows in the order of `words_as_columns`."""
    K: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    return tl.reshape(tl.permute(tl.reshape(x, [4, K // 8, 2, C]), [1, 0, 2, 3]), [K, C])


@triton.jit
def tokens_as_rows(x):
    """x [N / 4 J, C, 4, J] with tokens 4 J i + J t + j at [i, :, t, j] as a second operand [N, C]."""
    return tl.reshape(tl.permute(x, [0, 2, 3, 1]), [x.shape[0] * 4 * x.shape[3], x.shape[1]])


@triton.jit
def eight_tokens_as_rows(x):
    """x [N / 32, C, 4, 8] with tokens 32 i + 8 t + 4 a + 2 b + j at [i, :, t, 4 a + 2 b + j] as a second operand.

    The rows of the result, [N, C], are in the order i, b, t, a, j: what a product takes at once is loaded together.
    """
    x = tl.reshape(x, [x.shape[0], x.shape[1], 4, 2, 2, 2])
    return tl.reshape(tl.permute(x, [0, 4, 2, 3, 5, 1]), [x.shape[0] * 32, x.shape[1]])


@triton.jit
def tokens_as_columns(x):
    """x [N / 4 J, J, R, 4, V] with tokens 4 J i + J t + j at [i, j, :, t, :] as a first operand [V R, N]."""
    return tl.reshape(tl.permute(x, [4, 2, 0, 3, 1]), [x.shape[4] * x.shape[2], x.shape[0] * 4 * x.shape[1]])
