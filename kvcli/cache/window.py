"""Full-precision tokens of a cache as attention reads them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class WindowTokens:
    """Keys, rotated, or values of each row in order: its sinks, decoded tokens, its residual window.

    Attributes:
        buffer: [batch, num_kv_heads, capacity, head_dim]: sinks, `gap` unused slots, residual window.
        length: tokens of the row that has most.
        sinks: tokens before the gap.
        gap: unused slots.
        decoded: [batch, num_kv_heads, count, head_dim], between sinks and residual window; None when there are none.
    """

    buffer: Tensor
    length: int
    sinks: int = 0
    gap: int = 0
    decoded: Tensor | None = None

    @classmethod
    def of(cls, x: Tensor) -> WindowTokens:
        """Contiguous tokens [batch, num_kv_heads, length, head_dim]."""
        return cls(x, x.shape[2])

    @property
    def num_decoded(self) -> int:
        """Tokens of `decoded`."""
        return 0 if self.decoded is None else self.decoded.shape[2]

    def joined(self) -> Tensor:
        """One tensor [batch, num_kv_heads, length, head_dim]; a view where the tokens are adjacent."""
        if self.decoded is None and not self.gap:
            return self.buffer[:, :, : self.length]
        first = self.sinks + self.gap
        window = self.buffer[:, :, first : self.length - self.num_decoded + self.gap]
        between = [] if self.decoded is None else [self.decoded]
        return torch.cat((self.buffer[:, :, : self.sinks], *between, window), dim=2)
