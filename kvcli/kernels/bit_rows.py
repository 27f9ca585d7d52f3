"""Triton product of packed bits with a matrix: for each token the sum of those of its rows whose bit is 1."""

from __future__ import annotations

import triton
import triton.language as tl


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
