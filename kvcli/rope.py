"""Rotary position embedding as complex multiplication.

Channels j and j + rotary_dim/2 form the complex number k_j = x_j + i*y_j; RoPE at position m multiplies it by
e^{i*m*theta_j} (CommVQ Eq. 5-6 in the rotate-half layout). YaRN's attention scaling is a real factor of cos and sin.
This module does not know where angles come from: `Rope` asks the model's own rotary module.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Protocol, Self

import torch
from torch import Tensor, nn

from kvcli.errors import CacheError

Layout = Literal["halves", "pairs", "neighbours", "complex"]
"""Channels of a rotary module's output: each pair twice, half by half, or once, or twice side by side; or complex."""


ROPE_TILE = 256
"""Positions of a tile: keys of codecs in the space `tile` are rotated by their position within it."""

OFFSET_BLOCK = 16
"""Positions of a tile that have one offset."""


@dataclass(frozen=True)
class Rotation:
    """The rotation of a set of tokens: cos and sin [batch or 1, 1, time, rotary_dim/2].

    One that `Rope.rotation` made also knows the rotary embedding and the positions, integers [batch or 1, time].
    """

    cos: Tensor
    sin: Tensor
    rope: Rope | None = None
    positions: Tensor | None = None

    @cached_property
    def tile(self) -> Rotation:
        """The rotation of the first of the ROPE_TILE positions among which each token's lies."""
        return self._first_of(ROPE_TILE)

    @cached_property
    def block(self) -> Rotation:
        """The rotation of the first of the OFFSET_BLOCK positions among which each token's lies."""
        return self._first_of(OFFSET_BLOCK)

    def _first_of(self, count: int) -> Rotation:
        assert self.rope is not None
        assert self.positions is not None
        first = self.positions.div(count, rounding_mode="floor") * count
        return self.rope.rotation(first, self.cos.dtype)

    @classmethod
    def from_model(cls, output: Any, layout: Layout = "halves") -> Rotation:
        """A rotation from a rotary module's (cos, sin), or for `complex` cos + i sin, [batch or 1, time, channels]."""
        if layout == "complex":
            return cls(output.real.unsqueeze(1), output.imag.unsqueeze(1))
        cos, sin = (x.unsqueeze(1) for x in output)
        half = cos.shape[-1] // 2
        if layout == "halves":
            return cls(cos[..., :half], sin[..., :half])
        return cls(cos, sin) if layout == "pairs" else cls(cos[..., ::2], sin[..., ::2])

    @classmethod
    def none(cls, like: Rotation) -> Rotation:
        """The rotation by 0 of as many tokens and pairs."""
        rope = None if like.rope is None else NoRope(2 * like.cos.shape[-1], like.cos.device)
        return cls(torch.ones_like(like.cos), torch.zeros_like(like.sin), rope, like.positions)

    def to(self, device: torch.device) -> Rotation:
        """The same on a device."""
        if self.cos.device == device:
            return self
        positions = None if self.positions is None else self.positions.to(device)
        return replace(self, cos=self.cos.to(device), sin=self.sin.to(device), positions=positions)

    def contiguous(self) -> Rotation:
        """A contiguous copy, for tables that are kept."""
        return replace(self, cos=self.cos.contiguous(), sin=self.sin.contiguous())

    def apply(self, x: Tensor) -> Tensor:
        """Rotates x [batch, heads, time, head_dim]; channels beyond rotary_dim pass through."""
        half = self.cos.shape[-1]
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        rotated = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return torch.cat((*rotated, rest), dim=-1)

    def at_each_position(self, x: Tensor) -> Tensor:
        """A vector [batch or 1, heads, 1, head_dim] rotated to each position: [batch or 1, heads, time, head_dim]."""
        batch, _, time, _ = self.cos.shape
        return self.apply(x.expand(max(batch, x.shape[0]), -1, time, -1))

    def unapply(self, x: Tensor) -> Tensor:
        """Inverse of `apply` on x [batch, heads, time, head_dim]; also divides out the attention scaling."""
        return self._inverse.apply(x)

    @cached_property
    def _inverse(self) -> Rotation:
        scale = self.cos * self.cos + self.sin * self.sin
        return Rotation(self.cos / scale, -self.sin / scale)

    def last(self, count: int) -> Rotation:
        """The last `count` tokens, one or more."""
        if count == self.cos.shape[2]:
            return self
        positions = None if self.positions is None else self.positions[:, -count:]
        part = Rotation(self.cos[:, :, -count:], self.sin[:, :, -count:], self.rope, positions)
        for name in ("tile", "block"):
            if name in vars(self):  # it is not computed again in every layer
                vars(part)[name] = getattr(self, name).last(count)
        return part

    def at(self, tokens: Tensor) -> Rotation:
        """Some tokens, indices [count]."""
        positions = None if self.positions is None else self.positions[:, tokens]
        return Rotation(self.cos[:, :, tokens], self.sin[:, :, tokens], self.rope, positions)

    def select(self, rows: list[int]) -> Rotation:
        """Some rows of the batch."""
        positions = None if self.positions is None else self.positions[rows]
        return Rotation(self.cos[rows], self.sin[rows], self.rope, positions)


class Unrotate(Protocol):
    """Inverse RoPE to float32."""

    def __call__(self, rotation: Rotation, x: Tensor, offset: tuple[Tensor, Rotation] | None = None) -> Tensor:
        """Inverse RoPE of keys x [batch, heads, time, head_dim], less an offset, as of `Rotation.at_each_position`."""


def unrotate(rotation: Rotation, x: Tensor, offset: tuple[Tensor, Rotation] | None = None) -> Tensor:
    """The `Unrotate` of PyTorch."""
    x = x.float()
    return rotation.unapply(x if offset is None else x - offset[1].at_each_position(offset[0]))


class Rope:
    """A model's own rotary module, asked for rotations, so that every RoPE type gives the model's angles.

    The `module` is called with a tensor that tells the dtype, positions and `arguments`, such as the type of layers.

    Attributes:
        switch: the longest text that has the angles of short ones, where those of longer ones differ (longrope, arXiv
            2402.13753; dynamic NTK scaling); None: angles do not depend on the length of a text.
        length: of the text whose angles these are; None: not known yet, or of no importance.
        axes: how many equal positions the module takes of each token (M-RoPE); 0: one, without an axis for it.
    """

    switch: int | None = None
    length: int | None = None
    axes = 0

    def __init__(self, module: nn.Module, layout: Layout = "halves", arguments: tuple[Any, ...] = ()) -> None:
        self.module, self.layout, self.arguments = module, layout, arguments

    def for_length(self, length: int) -> Rope:
        """The rotation of all tokens of a text of so many; itself where that is of no importance."""
        if self.switch is None:
            return self
        found = copy.copy(self)
        found.length = self.switch if length <= self.switch else self._longer(length)
        return found

    def _longer(self, length: int) -> int:
        """A length whose angles are those of a text longer than `switch`."""
        return int(self.switch or 0) + 1

    def changes(self, length: int) -> bool:
        """Whether a text that has grown to so many tokens has other angles than these."""
        return self.length is not None and (self.for_length(length).length or 0) > self.length

    def frequencies(self) -> dict[str, Any]:
        """Angle per position of each pair, in radians, and the factor of cos and sin, as plain JSON values."""
        module: Any = self.module
        scaling = getattr(module, "attention_scaling", None)
        if scaling is None or self.switch is not None:
            scaling = self._at(0).cos.flatten()[0]
        return {"inv_freq": self.inv_freq.tolist(), "scaling": float(scaling)}

    @property
    def inv_freq(self) -> Tensor:
        """Angle per position of each pair, in radians: float32 [rotary_dim/2]."""
        stored: Tensor | None = getattr(self.module, "inv_freq", None)
        if stored is not None and self.switch is None:
            return stored.float()
        at_one = self._at(1)
        return torch.atan2(at_one.sin, at_one.cos).flatten()

    def _at(self, position: int) -> Rotation:
        device = next(iter(self.module.buffers())).device
        return self.rotation(torch.full((1, 1), position, device=device), torch.float32)

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """The rotation at integer positions [batch, time], computed in float32 and rounded once to `dtype`."""
        probe = torch.empty(0, dtype=dtype, device=positions.device)
        rotation = Rotation.from_model(self.output(probe, positions), self.layout)
        cos, sin = (x.to(positions.device, dtype).contiguous() for x in (rotation.cos, rotation.sin))
        return Rotation(cos, sin, self, positions)

    def output(self, like: Tensor, positions: Tensor) -> Any:
        """What the module returns at integer positions [batch, time], with the angles of a text of `length`."""
        if self.length is None or self.switch is None:
            return self._called(like, positions)
        if self.length <= self.switch:  # tables of kernels end beyond the last token
            return self._called(like, positions.clamp(max=self.switch - 1))
        x = self._called(like, torch.cat((positions, torch.full_like(positions[:, :1], self.switch)), dim=1))
        return x[:, :-1] if isinstance(x, Tensor) else tuple(y[:, :-1] for y in x)

    def _called(self, like: Tensor, positions: Tensor) -> Any:
        positions = positions.expand(self.axes, -1, -1) if self.axes else positions
        return self.module(like, positions, *self.arguments)


class NoRope(Rope):
    """The rotation by 0 at every position, of layers without RoPE; `rotary_dim` channels are paired all the same."""

    def __init__(self, rotary_dim: int, device: torch.device) -> None:
        self.angles = torch.zeros(rotary_dim // 2, device=device)

    def frequencies(self) -> dict[str, Any]:
        return {"inv_freq": self.angles.tolist(), "scaling": 1.0}

    @property
    def inv_freq(self) -> Tensor:
        return self.angles

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        shape = positions.shape[0], 1, positions.shape[1], len(self.angles)
        sin = torch.zeros(shape, dtype=dtype, device=positions.device)
        return Rotation(torch.ones_like(sin), sin, self, positions)

    def _longer(self, length: int) -> int:
        return length


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

    @classmethod
    def first(cls, rope: Rope, length: int, device: torch.device) -> Self:
        """Of positions 0 to length - 1, whose order is not looked at, which would wait for a GPU."""
        rotations = cls(rope, torch.arange(length, device=device).unsqueeze(0))
        rotations.consecutive = True
        return rotations

    @cached_property
    def consecutive(self) -> bool:
        """Whether the positions of each row are; waits for a GPU, once."""
        consecutive = self.positions.diff(dim=1) == 1
        if self._lengths is not None:
            place = torch.arange(1, self.positions.shape[1], device=self.positions.device)
            consecutive |= place >= self._lengths.unsqueeze(1)
        return bool(consecutive.all())

    def tokens(self, start: int, stop: int) -> Rotation:
        """Rotation of tokens [start, stop), float32."""
        return self._once(("tokens", start, stop), lambda: self._at(self.positions[:, start:stop]))

    def tiles(self, size: int) -> Rotation:
        """Rotation of the first token of every `size`, [batch or 1, 1, ceil(length / size), rotary_dim/2].

        With `offsets`, this gives every token's rotation from two small tables, because e^{i(m+n)theta} is a product.
        CacheError: positions that are not consecutive.
        """

        def make() -> Rotation:
            if not self.consecutive:
                raise CacheError("a row's position_ids are not consecutive, which tables of tiles need")
            return self._at(self.positions[:, ::size])

        return self._once(("tiles", size, 0), make)

    def rope_tiles(self) -> Rotation:
        """Rotation of the first position of every tile that tokens can lie in, as `Rotation.tile`, in their order.

        [batch or 1, 1, length // ROPE_TILE + 2, rotary_dim/2]. CacheError: positions that are not consecutive.
        """

        def make() -> Rotation:
            self.tiles(ROPE_TILE)
            first = self.positions[:, :1].div(ROPE_TILE, rounding_mode="floor")
            count = torch.arange(self.positions.shape[1] // ROPE_TILE + 2, device=first.device)
            return self._at((first + count) * ROPE_TILE)

        return self._once(("rope_tiles", ROPE_TILE, 0), make)

    def offsets(
        self, count: int, dtype: torch.dtype = torch.float32, num_groups: int = 1, num_parts: int = 1
    ) -> Rotation:
        """Rotation by 0 to count - 1 positions, without the attention scaling.

        Pair j is in group j % num_groups, and each group is divided into parts; group after group, they are
        [1, num_groups * num_parts, count, rotary_dim / 2 / num_groups / num_parts].
        """

        def make() -> Rotation:
            frequencies = self.rope.inv_freq.to(self.positions.device).unflatten(0, (-1, num_groups)).T
            frequencies = frequencies.reshape(1, num_groups * num_parts, 1, -1)
            angle = torch.arange(count, device=self.positions.device).unsqueeze(1) * frequencies
            return Rotation(angle.cos().to(dtype), angle.sin().to(dtype))

        return self._once((f"offsets {dtype} {num_parts}", count, num_groups), make)

    def _at(self, positions: Tensor) -> Rotation:
        return self.rope.rotation(positions.long(), torch.float32)

    def _once(self, name: tuple[str, int, int], make: Callable[[], Rotation]) -> Rotation:
        if name not in self._tables:
            self._tables[name] = make()
        return self._tables[name]


def to_pairs(x: Tensor, rotary_dim: int) -> Tensor:
    """Splits x [..., head_dim] into the pairs that RoPE rotates: [..., head_dim/2, 2], last axis (real, imaginary).

    Channels beyond `rotary_dim` are paired the same way among themselves.
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
