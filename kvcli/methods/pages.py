"""Codes in pages: tensors [pages, heads, entries of a page, width], and a block table that says which page is whose.

A page is a small tensor of codes as a row of a batch is: what reads rows reads pages, too. Here is what gathers
them; kernels find them by `kvcli.kernels.pages`, and `kvcli.paged.pages` writes them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcli.errors import UsageError
from kvcli.methods.base import Codes, CodesT

ALIGNMENT = 16
"""Bytes that fields, and pages of them, begin at multiples of."""


def check_page_size(page_size: int) -> None:
    """UsageError: tokens of a page that are no power of two, or below 16."""
    if page_size < 16 or page_size & (page_size - 1):
        raise UsageError(f"pages of {page_size} tokens are not supported; choose a power of two, 16 or more")


@dataclass(frozen=True)
class PageTable:
    """Which pages hold the codes of each row. Pages are read fastest if they begin at multiples of 64 bytes.

    Attributes:
        table: int32 [batch, max_pages]: tokens [p * page_size, (p + 1) * page_size) of a row are in page table[row, p].
            Entries after a row's last token are not used: any page, or below 0.
        page_size: tokens of a page.

    Raises:
        UsageError: a page size that is no power of two or below 16, or a table of other kind.
    """

    table: Tensor
    page_size: int

    def __post_init__(self) -> None:
        check_page_size(self.page_size)
        if self.table.dtype != torch.int32 or self.table.dim() != 2 or self.table.stride(1) != 1:
            raise UsageError("a block table is int32 [batch, max_pages], each row contiguous")

    @property
    def length(self) -> int:
        """Tokens of a row that has all pages of the table."""
        return self.table.shape[1] * self.page_size

    def check(self, codes: Codes) -> None:
        """UsageError unless codes are pages of this size, as kernels read them; it takes microseconds."""
        if codes.num_tokens != self.page_size:
            raise UsageError(f"pages of {codes.num_tokens} tokens with a block table of pages of {self.page_size}")
        for name, x in vars(codes).items():
            (_, heads, entries, width), (page, head, entry, channel) = x.shape, x.stride()
            starts = x.data_ptr() | (page | (head if heads > 1 else 0)) * x.element_size()
            contiguous = (entry == width or entries == 1) and (channel == 1 or width == 1)
            if width and not (contiguous and starts % ALIGNMENT == 0):
                raise UsageError(f"{name}: tokens of a page must be contiguous, and begin at multiples of 16 bytes")

    def gather(self, codes: CodesT, start: int, stop: int, lengths: Tensor | None = None) -> CodesT:
        """Codes of tokens [start, stop) of each row, [batch, heads, entries, width], from pages of codes.

        Args:
            start, stop: multiples of the page size.
            lengths: tokens of each row, int32 [batch]; codes after them are 0. None: they have any value.
        """
        pages = self.table[:, start // self.page_size : stop // self.page_size].clamp_min(0)

        def rows(x: Tensor) -> Tensor:
            tokens = self.page_size // x.shape[2]  # of an entry
            if x.device.type == "cpu":  # two plain copies: the one of a GPU takes several times as long here
                out = x[pages].transpose(1, 2).flatten(2, 3)
                for row, length in zip(out, [] if lengths is None else lengths.tolist(), strict=lengths is not None):
                    row[:, max(0, -(-(length - start) // tokens)) :] = 0
                return out
            # eight bytes at once, in one copy: axes of the batch and of pages are put into order by strides
            words = x.flatten(2).view(torch.int64) if x.shape[3] else x.flatten(2)
            found = words.transpose(0, 1).index_select(1, pages.flatten()).view(x.dtype)
            out = found.view(x.shape[1], *pages.shape, *x.shape[2:]).transpose(0, 1).flatten(2, 3)
            if lengths is None:
                return out
            entries = torch.arange(start, stop, tokens, device=x.device)
            return out.masked_fill_((entries >= lengths.unsqueeze(1))[:, None, :, None], 0)

        return codes.map(rows)
