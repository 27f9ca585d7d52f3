"""Rotary position embedding as complex multiplication.

Channels j and j + rotary_dim/2 form the complex number k_j = x_j + i*y_j; RoPE at position m multiplies it by
e^{i*m*theta_j} (CommVQ Eq. 5-6 in the rotate-half layout). YaRN's attention scaling is a real factor of cos and sin.
This module does not know where angles come from: `Rope` asks the model's own rotary module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvcli.errors import CacheError


@dataclass(frozen=True)
class Rotation:
    """The rotation of a set of tokens.

    Attributes:
        cos: [batch or 1, 1, time, rotary_dim/2].
        sin: same shape.
    """

    cos: Tensor
    sin: Tensor

    @classmethod
    def from_model(cls, cos: Tensor, sin: Tensor) -> Rotation:
        """From what a model's rotary module returns, [batch or 1, time, rotary_dim] with both halves equal."""
        half = cos.shape[-1] // 2
        return cls(cos[..., :half].unsqueeze(1), sin[..., :half].unsqueeze(1))

    def contiguous(self) -> Rotation:
        """A contiguous copy, for tables that are kept."""
        return Rotation(self.cos.contiguous(), self.sin.contiguous())

    def apply(self, x: Tensor) -> Tensor:
        """Rotates x [batch, heads, time, head_dim]; channels beyond rotary_dim pass through."""
        half = self.cos.shape[-1]
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        rotated = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return torch.cat((*rotated, rest), dim=-1)

    def at_each_position(self, x: Tensor) -> Tensor:
        """One vector [1, heads, 1, head_dim] rotated to each position: [batch or 1, heads, time, head_dim]."""
        batch, _, time, _ = self.cos.shape
        return self.apply(x.expand(batch, -1, time, -1))

    def unapply(self, x: Tensor) -> Tensor:
        """Inverse of `apply` on x [batch, heads, time, head_dim]; also divides out the attention scaling."""
        scale = self.cos * self.cos + self.sin * self.sin
        return Rotation(self.cos / scale, -self.sin / scale).apply(x)

    def last(self, count: int) -> Rotation:
        """The last `count` tokens, one or more."""
        return Rotation(self.cos[:, :, -count:], self.sin[:, :, -count:])

    def select(self, rows: list[int]) -> Rotation:
        """Some rows of the batch."""
        return Rotation(self.cos[rows], self.sin[rows])


Unrotate = Callable[[Rotation, Tensor], Tensor]
"""Inverse RoPE to float32, as `kvcli.attention.reference.unrotate`."""


class Rope:
    """A model's own rotary module, asked for rotations, so that every RoPE type gives the model's angles."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def frequencies(self) -> dict[str, Any]:
        """Angle per position of each pair, in radians, and the factor of cos and sin, as plain JSON values."""
        module: Any = self.module
        return {"inv_freq": self.inv_freq.tolist(), "scaling": float(module.attention_scaling)}

    @property
    def inv_freq(self) -> Tensor:
        """Angle per position of each pair, in radians: float32 [rotary_dim/2]."""
        module: Any = self.module
        return module.inv_freq.float()

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """The rotation at given positions.

        Args:
            positions: [batch, time] integers.
            dtype: dtype of cos and sin, computed in float32 and rounded once.

        Returns:
            cos and sin [batch, 1, time, rotary_dim/2].
        """
        probe = torch.empty(0, dtype=dtype, device=positions.device)
        return Rotation.from_model(*self.module(probe, positions)).contiguous()


class TokenRotations:
    """Rotations of tokens that a cache holds, computed on first use and kept.

    Args:
        rope: the model's rotary embedding.
        positions: integers [batch or 1, length]; `tiles` needs consecutive ones.
        lengths: tokens of each row, int32 [batch]; None when all are full.
    """

    def __init__(self, rope: Rope, positions: Tensor, lengths: Tensor | None = None) -> None:
        self.rope, self.positions, self._lengths = rope, positions, lengths
        self._tables: dict[tuple[str, int, int], Rotation] = {}

    def tokens(self, start: int, stop: int) -> Rotation:
        """Rotation of tokens [start, stop), float32."""
        return self._once(("tokens", start, stop), lambda: self._at(self.positions[:, start:stop]))

    def tiles(self, size: int) -> Rotation:
        """Rotation of the first token of every `size`, [batch or 1, 1, ceil(length / size), rotary_dim/2].

        With `offsets`, this gives every token's rotation from two small tables, because e^{i(m+n)theta} is a product.

        Raises:
            CacheError: positions that are not consecutive.
        """

        def make() -> Rotation:
            self._check_consecutive()
            return self._at(self.positions[:, ::size])

        return self._once(("tiles", size, 0), make)

    def offsets(self, count: int, dtype: torch.dtype = torch.float32, num_groups: int = 1) -> Rotation:
        """Rotation by 0 to count - 1 positions, [1, 1, count, rotary_dim/2], without the attention scaling.

        Args:
            count: positions.
            dtype: of the table.
            num_groups: pair j is in group j % num_groups, and the last axis is group after group.
        """

        def make() -> Rotation:
            frequencies = self.rope.inv_freq.unflatten(0, (-1, num_groups)).T.flatten()
            angle = torch.arange(count, device=self.positions.device).unsqueeze(1) * frequencies
            return Rotation(angle.cos()[None, None].to(dtype), angle.sin()[None, None].to(dtype))

        return self._once((f"offsets {dtype}", count, num_groups), make)

    @property
    def nbytes(self) -> int:
        """Bytes of the tables and lengths kept."""
        lengths = self._lengths.nbytes if self._lengths is not None else 0
        return lengths + sum(table.cos.nbytes + table.sin.nbytes for table in self._tables.values())

    def _at(self, positions: Tensor) -> Rotation:
        return self.rope.rotation(positions.long(), torch.float32)

    def _once(self, name: tuple[str, int, int], make: Callable[[], Rotation]) -> Rotation:
        if name not in self._tables:
            self._tables[name] = make()
        return self._tables[name]

    def _check_consecutive(self) -> None:
        consecutive = self.positions.diff(dim=1) == 1
        if self._lengths is not None:
            place = torch.arange(1, self.positions.shape[1], device=self.positions.device)
            consecutive |= place >= self._lengths.unsqueeze(1)
        if not bool(consecutive.all()):
            raise CacheError("a row's position_ids are not consecutive, which this kernel needs; use impl='reference'")


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
