"""Rotary position embedding as complex multiplication.

Channels j and j + rotary_dim/2 form the complex number k_j = x_j + i*y_j; RoPE at position m multiplies it by
e^{i*m*theta_j} (CommVQ Eq. 5-6 in the rotate-half layout). YaRN's attention scaling is a real factor of cos and sin.
This module does not know where angles come from: `Rope` asks the model's own rotary module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Rotation:
    """The rotation of a set of tokens.

    Attributes:
        cos: [batch or 1, 1, time, rotary_dim/2].
        sin: same shape.
    """

    cos: Tensor
    sin: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """Rotates x [batch, heads, time, head_dim]; channels beyond rotary_dim pass through."""
        half = self.cos.shape[-1]
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        rotated = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return torch.cat((*rotated, rest), dim=-1)

    def unapply(self, x: Tensor) -> Tensor:
        """Inverse of `apply`, including the attention scaling cos^2 + sin^2."""
        scale = self.cos * self.cos + self.sin * self.sin
        return Rotation(self.cos / scale, -self.sin / scale).apply(x)

    def to(self, device: torch.device, dtype: torch.dtype) -> Rotation:
        """The same rotation on another device and in another dtype."""
        return Rotation(self.cos.to(device, dtype), self.sin.to(device, dtype))

    def slice(self, start: int, stop: int) -> Rotation:
        """Tokens [start, stop)."""
        return Rotation(self.cos[:, :, start:stop], self.sin[:, :, start:stop])


class Rope:
    """Asks a model's own rotary module for rotations, so that every RoPE type gives the model's angles."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def frequencies(self) -> dict[str, Any]:
        """Angle a position of each pair, in radians, and the factor of cos and sin, as plain JSON values."""
        module: Any = self.module
        return {"inv_freq": module.inv_freq.float().tolist(), "scaling": float(module.attention_scaling)}

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """The rotation at given positions.

        Args:
            positions: [batch, time] integers.
            dtype: dtype of cos and sin, computed in float32 and rounded once.
        """
        probe = torch.empty(0, dtype=dtype, device=positions.device)
        cos, sin = self.module(probe, positions)
        half = cos.shape[-1] // 2
        return Rotation(cos[..., :half].unsqueeze(1), sin[..., :half].unsqueeze(1))


def to_pairs(x: Tensor, rotary_dim: int) -> Tensor:
    """Splits channels into the pairs that RoPE rotates.

    Args:
        x: [..., head_dim], real.
        rotary_dim: rotated channels; the rest is paired the same way among itself.

    Returns:
        [..., head_dim/2, 2], last axis (real, imaginary).
    """
    rotated = x[..., :rotary_dim].unflatten(-1, (2, -1))
    if rotary_dim == x.shape[-1]:
        return rotated.transpose(-1, -2)
    rest = x[..., rotary_dim:].unflatten(-1, (2, -1))
    return torch.cat((rotated, rest), dim=-1).transpose(-1, -2)


def from_pairs(pairs: Tensor, rotary_dim: int) -> Tensor:
    """Inverse of `to_pairs`: [..., head_dim/2, 2] to [..., head_dim]."""
    half = rotary_dim // 2
    rotated = pairs[..., :half, :].transpose(-1, -2).flatten(-2)
    if half == pairs.shape[-2]:
        return rotated
    return torch.cat((rotated, pairs[..., half:, :].transpose(-1, -2).flatten(-2)), dim=-1)
