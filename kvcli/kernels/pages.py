"""Where a kernel finds the codes of a tile of tokens: in a row of the batch, or in pages that a block table lists.

PAGE is the tokens of a page, a power of two of at least 16, or 0: rows are contiguous then, the table is None, and
addresses are those of a row. A tensor of pages is [pages, heads, tokens, ...] as one of rows is [batch, heads, tokens,
...]: its stride of axis 0 is that of pages.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def origin(i_b, first, PAGE: tl.constexpr):
    """Row and token that the pointers of a program begin at whose tokens begin with `first` of row i_b of the batch.

    Returns:
        i_b and `first`, in pages 0 and 0; and `first`, counted from there.
    """
    begin = first * 0
    if PAGE > 0:
        i_b, first, begin = i_b * 0, begin, first
    return i_b, first, begin.to(tl.int32)


@triton.jit
def tile_start(
    base, table, first, n, end, page_stride, time_stride, PAGE: tl.constexpr, TILE: tl.constexpr, UNIT: tl.constexpr
):  # fmt: skip
    """Pointers to the beginning of a tile: token first + n of a head is at that + n * time_stride.

    One pointer, or where several pages are looked up, which is cheaper than one for each token, one for each n.

    Args:
        base: pointer to the head, from `origin` on.
        table: pointer to the row's pages, int32; an entry below 0 is read as page 0.
        first: token where the tile begins, counted from `origin`, as is `end`.
        n: tokens of the tile, at least 0, less than TILE, and at most the last that exists.
        end: the first token that does not exist: what is beyond is not looked up, unless it is `first`.

    Constexprs: UNIT: `first` is a multiple of UNIT or of PAGE.
    """
    offset = first * time_stride
    if PAGE > 0:
        STEP: tl.constexpr = UNIT if UNIT < PAGE else PAGE
        for i in tl.static_range((TILE + STEP - 1) // STEP):
            at = tl.maximum(tl.minimum(first + i * STEP, end - 1), first) if i > 0 else first
            start = tl.maximum(tl.load(table + at // PAGE), 0).to(tl.int64) * page_stride
            if PAGE > STEP:
                start += (at % PAGE - i * STEP) * time_stride
            elif i > 0:
                start -= i * STEP * time_stride
            offset = tl.where(n >= i * STEP, start, offset) if i > 0 else start
    return base + offset


@triton.jit
def token_offsets(table, first, n, end, page_stride, time_stride, PAGE: tl.constexpr):
    """Offsets of tokens first + n of a head, each of which looks up its page; those from `end` on are read as that
    before it.
    """
    offsets = n * time_stride
    if PAGE > 0:
        at = tl.maximum(tl.minimum(first + n, end - 1), 0)
        offsets = tl.maximum(tl.load(table + at // PAGE), 0).to(tl.int64) * page_stride + at % PAGE * time_stride
    return offsets
