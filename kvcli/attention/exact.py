"""Tokens that attention sees as they are, wherever they lie."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ExactTokens:
    """Keys, rotated, or values of the tokens of each row in order: its sinks, decoded tokens, its window.

    Attributes:
        buffer: [batch, num_kv_heads, capacity, head_dim]: sinks, `gap` unused slots, window.
        length: tokens of the row that has most.
        sinks: tokens before the gap.
        gap: unused slots.
        decoded: [batch, num_kv_heads, count, head_dim], between sinks and window; None when there are none.
    """

    buffer: Tensor
    length: int
    sinks: int = 0
    gap: int = 0
    decoded: Tensor | None = None

    @classmethod
    def of(cls, x: Tensor) -> ExactTokens:
        """Tokens [batch, num_kv_heads, length, head_dim] side by side."""
        return cls(x, x.shape[2])

    @property
    def num_decoded(self) -> int:
        """Tokens of `decoded`."""
        return 0 if self.decoded is None else self.decoded.shape[2]

    def joined(self) -> Tensor:
        """[batch, num_kv_heads, length, head_dim]."""
        if self.decoded is None and not self.gap:
            return self.buffer[:, :, : self.length]
        first = self.sinks + self.gap
        window = self.buffer[:, :, first : self.length - self.num_decoded + self.gap]
        between = [] if self.decoded is None else [self.decoded]
        return torch.cat((self.buffer[:, :, : self.sinks], *between, window), dim=2)
