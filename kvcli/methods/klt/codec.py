"""The codes of transform coding: a gain per token and head, and a uniform scalar code of each transformed channel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvcli.methods.base import CachedFromBuffers, Codec, Codes, KeyCodec, Space, ValueCodec
from kvcli.methods.klt.fields import BANDS, STEPS, Fields, places
from kvcli.spec import ModelSpec

_GAINS_PER_OCTAVE = 16
_UNIT_GAIN = 128
_LARGEST_GAIN = 2.0 ** ((255 - _UNIT_GAIN) / _GAINS_PER_OCTAVE)


@dataclass(frozen=True)
class KLTCodes(Codes):
    """Codes and gains of tokens.

    Attributes:
        packed: uint8 [batch, 1, time, bytes], of one head after the other: for each of its bytes, `head_dim / 8`
            channels; byte and bits of a band's codes are those of `fields.places`.
        gain: uint8 [batch, num_kv_heads, time, 1], 0 for a gain of 0, else 128 + 16 log2 of it, rounded.
    """

    packed: Tensor
    gain: Tensor


class _KLT(Codec[KLTCodes, None]):
    """x_hat = mean + B (g (c - (2^b - 1) / 2)): codes c of b bits, gain g of the token, basis B of the head.

    y = B^-1 (x - mean) is in units of the steps of codes; g is the root mean square of what is coded of it, in units
    of its standard deviation in the calibration samples.

    Args:
        fields: of each kv head.

    Buffers:
        basis: float32 [num_kv_heads, head_dim, head_dim], B; columns of bands without code are there for its inverse.
        mean: float32 [num_kv_heads, head_dim].

    Raises:
        ValueError: a head_dim that is no multiple of 8, or fields that do not fill bytes.
    """

    calibrated_range = True
    max_magnitude = 0.99 * _LARGEST_GAIN

    def __init__(self, spec: ModelSpec, fields: Sequence[Fields]) -> None:
        super().__init__()
        if spec.head_dim % BANDS:
            raise ValueError(f"head_dim {spec.head_dim} is no multiple of {BANDS}, the bands of channels")
        self.spec, self.fields, self.width = spec, tuple(fields), spec.head_dim // BANDS
        self.num_bytes = [sum(of_head) // 8 * self.width for of_head in self.fields if places(of_head)]
        self.basis: Tensor
        self.mean: Tensor
        self.register_buffer("basis", torch.zeros(spec.num_kv_heads, spec.head_dim, spec.head_dim))
        self.register_buffer("mean", torch.zeros(spec.num_kv_heads, spec.head_dim))
        self._inverse: CachedFromBuffers[Tensor] = CachedFromBuffers()

    def bits_per_token(self) -> float:
        return float(8 * (sum(self.num_bytes) + self.spec.num_kv_heads))

    def randomize_(self, generator: torch.Generator) -> None:
        """Random bases that can be inverted: an orthogonal one for all heads, as in `turboquant.random_rotation`."""
        square = torch.randn(self.basis.shape[1:], generator=generator, device=self.basis.device)
        self.set_basis(torch.linalg.qr(square)[0].expand_as(self.basis))

    def set_basis(self, basis: Tensor) -> None:
        """Takes a basis [num_kv_heads, head_dim, head_dim] of components of unit variance."""
        self.basis.copy_(basis * self._steps().unsqueeze(1))

    @cached_property
    def _bits(self) -> Tensor:
        """Bits of each channel, int32 [num_kv_heads, head_dim], on the CPU."""
        rows = [(*of_head, *[0] * (BANDS - len(of_head))) for of_head in self.fields]
        with torch.inference_mode(False):
            return torch.tensor(rows, dtype=torch.int32, device="cpu").repeat_interleave(self.width, 1)

    @cached_property
    def _at(self) -> tuple[Tensor, Tensor]:
        """Byte of the token and bit of it where each channel's code begins, int64 [num_kv_heads, head_dim], CPU."""
        byte, bit, first = torch.zeros_like(self._bits, dtype=torch.long), torch.zeros_like(self._bits), 0
        for head, of_head in enumerate(self.fields):
            for band, (place, start) in enumerate(places(of_head)):
                channels = slice(band * self.width, (band + 1) * self.width)
                byte[head, channels] = first + place * self.width + torch.arange(self.width, device="cpu")
                bit[head, channels] = start
            first += self.num_bytes[head]
        return byte, bit

    def _steps(self) -> Tensor:
        """Step of each channel, in standard deviations, 1 without a code: float32 [num_kv_heads, head_dim]."""
        steps = torch.tensor((1.0, *STEPS[1:]), device=self.basis.device)
        return steps[self._bits.to(self.basis.device)]

    def analyse(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Transformed channels in units of steps, and gains: float32 shaped like x and [batch, heads, time, 1]."""
        inverse = self._inverse.get(lambda: torch.linalg.inv(self.basis), self.basis)
        y = (x.float() - self.mean.unsqueeze(1)) @ inverse.mT
        coded = self._bits.to(x.device) > 0
        weight = (self._steps() * coded).square() / coded.sum(-1, keepdim=True)
        return y, (y.square() * weight.unsqueeze(1)).sum(-1, keepdim=True).sqrt()

    def peak(self, x: Tensor, codes: KLTCodes) -> Tensor:
        return self.analyse(x)[1].amax()

    def encode(self, x: Tensor, state: None = None) -> KLTCodes:
        y, exact = self.analyse(x)
        stored = (_UNIT_GAIN + _GAINS_PER_OCTAVE * exact.log2()).round().nan_to_num(255.0).clamp(0, 255)
        gain = _decoded(stored)
        levels = (2.0 ** self._bits.to(x.device) - 1).unsqueeze(1)
        codes = (y / gain.clamp_min(1e-30) + levels / 2).round().maximum(levels.new_zeros(())).minimum(levels)
        byte, bit = (z.to(x.device) for z in self._at)
        shifted = codes.int() << bit.unsqueeze(1)
        # fields of a byte share no bit, so the sum joins them
        packed = shifted.new_zeros(x.shape[0], x.shape[2], sum(self.num_bytes))
        index = byte.flatten().expand(*packed.shape[:2], -1)
        packed.scatter_add_(2, index, shifted.transpose(1, 2).flatten(2))
        return KLTCodes(packed.unsqueeze(1).to(torch.uint8), stored.to(torch.uint8))

    def decode(self, codes: KLTCodes, state: None = None) -> Tensor:
        return (self._coded(codes) * _decoded(codes.gain)) @ self.basis.mT + self.mean.unsqueeze(1)

    def _coded(self, codes: KLTCodes) -> Tensor:
        """c - (2^b - 1) / 2 of each channel: float32 [batch, num_kv_heads, time, head_dim]."""
        device = codes.packed.device
        byte, bit = (z.to(device) for z in self._at)
        levels = (2 ** self._bits.to(device) - 1).unsqueeze(1)
        taken = codes.packed[:, 0][..., byte.flatten()].unflatten(-1, byte.shape).transpose(1, 2).int()
        return ((taken >> bit.unsqueeze(1)) & levels) - levels / 2


class KLTKey(_KLT, KeyCodec[KLTCodes, None]):
    """Keys, rotated by their position within a tile: the transform of a score's query is that of the tile's start."""

    space: Space = "tile"


class KLTValue(_KLT, ValueCodec[KLTCodes]):
    """Values."""

    def weighted_sum(self, weights: Tensor, codes: KLTCodes) -> Tensor:
        # the basis is applied to sums of codes
        sums = (weights * _decoded(codes.gain).transpose(-1, -2)) @ self._coded(codes)
        return sums @ self.basis.mT + weights.sum(-1, keepdim=True) * self.mean.unsqueeze(1)


def _decoded(stored: Tensor) -> Tensor:
    """Gains as they are stored, as numbers: float32 of the same shape."""
    x = stored.float()
    return torch.where(x > 0, torch.exp((x - _UNIT_GAIN) * (math.log(2) / _GAINS_PER_OCTAVE)), 0.0)
