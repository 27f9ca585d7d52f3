"""Where a kernel finds the codes of a tile of tokens: in a row of the batch, or in pages that a block table lists.

PAGE is the tokens of a page, a power of two of at least 16, or 0: rows are contiguous then, `table` is None, and the
addresses are those of a row. A tensor of pages is [pages, heads, tokens, ...] as one of rows is [batch, heads, tokens,
...]: its stride of axis 0 is that of pages.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_table(table, i_b, table_row, PAGE: tl.constexpr):
    """Pointer to the pages of row i_b of a block table, int32 [batch, max_pages]."""
    return table + i_b * table_row if PAGE > 0 else table


@triton.jit
def head_start(base, i_b, i_h, first, batch_stride, head_stride, time_stride, PAGE: tl.constexpr):
    """Pointer to token `first` of a row's head; in pages, to the head in page 0."""
    if PAGE == 0:
        base = base + i_b * batch_stride + i_h * head_stride + first * time_stride
    else:
        base += i_h * head_stride
    return base


@triton.jit
def tile_start(
    base, table, first, n, last, page_stride, time_stride, PAGE: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Pointers to the beginning of a tile: token first + n of a head is at that + n * time_stride.

    One pointer, or where a tile is larger than a page one for each n. An entry of the table below 0 is read as page 0.

    Args:
        base: pointer to the head, as `head_start` has it.
        table: of `row_table`.
        first: token where the tile begins, counted as `base` is; in pages, a multiple of PAGE or of TILE.
        n: tokens of the tile, at least 0, less than TILE, and at most `last`.
        last: the tile's last token that exists, at least 0: pages beyond it are not looked up.
    """
    offset = first * time_stride
    if PAGE > 0:
        page = first // PAGE
        offset = tl.maximum(tl.load(table + page), 0).to(tl.int64) * page_stride
        if PAGE > TILE:
            offset += first % PAGE * time_stride
        for i in tl.static_range(1, (TILE + PAGE - 1) // PAGE):
            number = tl.maximum(tl.load(table + tl.minimum(page + i, (first + last) // PAGE)), 0).to(tl.int64)
            offset = tl.where(n >= i * PAGE, number * page_stride - i * PAGE * time_stride, offset)
    return base + offset
