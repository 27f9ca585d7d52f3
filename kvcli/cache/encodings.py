"""Which keys, or values, a pass encodes: of rows that the host counts, or from where tensors of the device say."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvcli.cache.window import ALL_ROWS, Rows, WindowLayout


@dataclass(frozen=True)
class Encoding:
    """Rows that encode the keys, or the values, of their tokens [start, start + count), counted after the sinks.

    Attributes:
        rows: of the batch.
        whole: whether these are all rows.
        start: first of the tokens.
        count: how many.
        kept: the last of them that stay in the window, as what their codes decode to.
    """

    rows: list[int]
    whole: bool
    start: int
    count: int
    kept: int

    @property
    def is_first(self) -> bool:
        """Whether the rows held no codes before."""
        return not self.start

    @cached_property
    def index(self) -> Rows:
        """The rows, as an index that gives views where it can."""
        return ALL_ROWS if self.whole else self.rows

    def positions(self, positions: Tensor, sinks: int) -> Tensor:
        """Positions of the tokens, [rows, count], of those of all tokens of a row [batch, capacity]."""
        first = sinks + self.start
        return positions[self.index, first : first + self.count]

    def take(self, window: Tensor, layout: WindowLayout) -> Tensor:
        """The tokens in a window buffer, [rows, num_kv_heads, count, head_dim]; a view if it can be."""
        first = layout.sinks + self.start
        return layout.take(window, first, first + self.count, self.index)

    def replace(self, window: Tensor, layout: WindowLayout, tokens: Tensor) -> None:
        """Overwrites those that stay in a window buffer by tokens [rows, num_kv_heads, kept, head_dim]."""
        layout.put(window, layout.sinks + self.start + self.count - self.kept, tokens, self.index)


@dataclass(frozen=True)
class DeviceEncoding:
    """As `Encoding`, of as many tokens in every row, from where a tensor of the device says.

    Attributes:
        start: first token of each row, int32 [batch, 1].
        count: how many.
        kept: the last of them that stay in the window, as what their codes decode to.
    """

    start: Tensor
    count: int
    kept: int
    whole = True
    is_first = False

    def positions(self, positions: Tensor, sinks: int) -> Tensor:
        """Positions of the tokens, [batch, count], of those of all tokens of a row [batch, capacity]."""
        tokens = self.start + torch.arange(sinks, sinks + self.count, device=positions.device)
        return positions.gather(1, tokens.long())

    def take(self, window: Tensor, layout: WindowLayout) -> Tensor:
        """The tokens in a window buffer, [batch, num_kv_heads, count, head_dim]."""
        return layout.gathered(window, layout.sinks + self.start, self.count)

    def replace(self, window: Tensor, layout: WindowLayout, tokens: Tensor) -> None:
        """Overwrites those that stay in a window buffer by tokens [batch, num_kv_heads, kept, head_dim]."""
        layout.scatter(window, layout.sinks + self.start + self.count - self.kept, tokens)


AnyEncoding = Encoding | DeviceEncoding
