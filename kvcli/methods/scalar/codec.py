"""Asymmetric uniform quantization of groups: x = code * scale + zero, with 16-bit scale and zero.

scale = (max - min) / (2^b - 1) and zero = min of each group, as in KIVI (arXiv 2402.02750) section 3.1. Codes are
chosen for scale and zero as stored, so that their rounding adds no second error; a group of equal values has scale 0
and decodes to its zero, exactly if it is float16. A scale cannot exceed 65504: at one bit, a group of a larger range
loses half of the excess at either end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvcli.kernels.launch import FP16_MAX
from kvcli.methods.base import Codec, Codes, KeyCodec, StateT, ValueCodec
from kvcli.methods.config import ScalarBits
from kvcli.methods.packing import (
    byte_fields,
    fields_to_planes,
    pack_planes,
    planes_in_fields,
    planes_size,
    planes_to_fields,
    unpack_planes,
)
from kvcli.rope import Rotation
from kvcli.spec import ModelSpec


def quantize(groups: Tensor, n_bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantizes [..., group_size] along the last axis; values beyond the range of float16 are clamped to it.

    Returns codes int32 [..., group_size], scale and zero float16 [..., 1].
    """
    groups = groups.float().clamp(-FP16_MAX, FP16_MAX)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    levels = 2**n_bits - 1
    if levels == 1:
        excess = (high - low - FP16_MAX).clamp_min(0) * 0.5
        low, high = low + excess, high - excess
    zero = low.half()
    # divided by a tensor: CUDA multiplies by the rounded inverse of a number, and codes would differ from the CPU's
    scale = ((high - low) / torch.full_like(low, levels)).half()
    # a range too small for float16 is stored as scale 0: the quotients are infinite or 0 / 0, and all codes are 0 then
    codes = ((groups - zero.float()) / scale.float()).nan_to_num_(0.0, 0.0, 0.0)
    return codes.round_().clamp_(0, levels).int(), scale, zero


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Inverse of `quantize`: float32 of the codes' shape; scale and zero broadcast against the codes."""
    return codes.float() * scale.float() + zero.float()


@dataclass(frozen=True)
class ScalarCodes(Codes):
    """Codes of which t tokens times c channels share a scale and a zero: (t, 1) per channel, or (1, c) per token.

    Attributes:
        packed: uint8 [batch, num_kv_heads, time, head_dim * bits / 8], by `pack_planes`.
        scale: float16 [batch, num_kv_heads, time / t, head_dim / c].
        zero: like scale.
    """

    packed: Tensor
    scale: Tensor
    zero: Tensor


class ScalarCodec(Codec[ScalarCodes, StateT]):
    """The scalar format; bits per value = `n_bits` + 32 / group.

    Attributes:
        tokens_per_group: consecutive tokens that share a scale.
        group_size: consecutive channels that share a scale.
    """

    def __init__(self, spec: ModelSpec, n_bits: ScalarBits, tokens: int, channels: int) -> None:
        super().__init__()
        self.spec, self.n_bits, self.tokens_per_group, self.group_size = spec, n_bits, tokens, channels
        # every group is then in the range of scale and zero
        self.max_magnitude = FP16_MAX / 2 if n_bits == 1 else FP16_MAX

    def bits_per_token(self) -> float:
        head_dim, group = self.spec.head_dim, self.tokens_per_group * self.group_size
        return self.spec.num_kv_heads * (8 * planes_size(head_dim, self.n_bits) + 32 * head_dim / group)

    def dequantize(self, codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """Decodes codes int32 [batch, heads, time, channels] to float32 of that shape."""
        groups = codes.unflatten(2, (-1, self.tokens_per_group)).unflatten(-1, (-1, self.group_size))
        at = (slice(None), slice(None), slice(None), None, slice(None), None)
        return dequantize(groups, scale[at], zero[at]).flatten(4).flatten(2, 3)

    def decode(self, codes: ScalarCodes, state: StateT | None = None) -> Tensor:
        unpacked = unpack_planes(codes.packed, self.n_bits, self.spec.head_dim)
        return self.dequantize(unpacked, codes.scale, codes.zero)

    def encode_noted(self, x: Tensor, peak: Tensor) -> ScalarCodes:
        encode: Any = self.encode
        return encode(x, None, peak) if self.fused else super().encode_noted(x, peak)

    def decode_to(self, codes: ScalarCodes, state: StateT, dtype: torch.dtype) -> Tensor:
        if not self.fused:
            return super().decode_to(codes, state, dtype)
        from kvcli.methods.scalar.decode_kernels import dequantize_planes

        fields, group = (codes.packed, codes.scale, codes.zero), (self.tokens_per_group, self.group_size)
        return dequantize_planes(*fields, self.n_bits, self.spec.head_dim, group, dtype)


class PerChannelCodec(ScalarCodec[StateT], KeyCodec[ScalarCodes, StateT]):
    """Keys stored per channel in groups of `group_size` tokens."""

    def __init__(self, spec: ModelSpec, n_bits: ScalarBits, group_size: int) -> None:
        super().__init__(spec, n_bits, group_size, 1)

    def quantize_channels(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Quantizes x [batch, heads, time, channels] in whole groups of tokens.

        Returns codes int32 shaped like x; scale and zero float16 [batch, heads, time / group, channels].
        """
        groups = x.unflatten(2, (-1, self.tokens_per_group)).transpose(-1, -2)
        codes, scale, zero = quantize(groups, self.n_bits)
        return codes.transpose(-1, -2).flatten(2, 3), scale.squeeze(-1), zero.squeeze(-1)

    def encode(self, x: Tensor, state: StateT | None = None, peak: Tensor | None = None) -> ScalarCodes:
        if self.fused:
            from kvcli.methods.scalar.encode_kernels import quantize_per_channel

            return ScalarCodes(*quantize_per_channel(x, self.n_bits, self.tokens_per_group, peak))
        codes, scale, zero = self.quantize_channels(x)
        return ScalarCodes(pack_planes(codes, self.n_bits), scale, zero)

    def scores(self, query: Tensor, codes: ScalarCodes, state: StateT, rotation: Rotation | None) -> Tensor:
        if rotation is not None:
            return super().scores(query, codes, state, rotation)
        # q . (code * scale + zero) = (q * scale) . code + q . zero, with a scaled query per group of tokens
        scale = planes_in_fields(codes.scale, self.n_bits).float()
        scaled = planes_to_fields(query, self.n_bits).unsqueeze(2) * scale.unsqueeze(3)
        fields = byte_fields(codes.packed, self.n_bits).unflatten(2, (-1, self.tokens_per_group))
        products = scaled @ fields.transpose(-1, -2)
        zeros = query @ codes.zero.float().transpose(-1, -2)
        return products.add_(zeros.transpose(-1, -2).unsqueeze(-1)).transpose(2, 3).flatten(3)


class PerChannelKey(PerChannelCodec[None]):
    """Post-RoPE keys, quantized per channel (KIVI section 3.2)."""


class PerTokenCodec(ScalarCodec[None]):
    """Asymmetric quantization of each token in groups of channels (KIVI section 3.1; also round-to-nearest).

    A head narrower than `group_size` is one group. Where `group_size` does not divide `head_dim`, a group has their
    greatest common divisor of channels: 16 of heads of 80 or 112, for 32.

    Raises:
        ValueError: that divisor is below 8, so that scales and zeros would take more than 4 bits per value.
    """

    def __init__(self, spec: ModelSpec, n_bits: ScalarBits, group_size: int) -> None:
        head_dim = spec.head_dim
        super().__init__(spec, n_bits, 1, head_dim if head_dim <= group_size else math.gcd(group_size, head_dim))
        if self.group_size < min(8, group_size):
            raise ValueError(
                f"group_size {group_size} and head_dim {head_dim} have no common divisor of 8 or more; choose a "
                "group_size that divides head_dim"
            )

    def encode(self, x: Tensor, state: None = None, peak: Tensor | None = None) -> ScalarCodes:
        if self.fused:
            from kvcli.methods.scalar.encode_kernels import quantize_per_token

            return ScalarCodes(*quantize_per_token(x, self.n_bits, self.group_size, peak))
        codes, scale, zero = quantize(x.unflatten(-1, (-1, self.group_size)), self.n_bits)
        return ScalarCodes(pack_planes(codes.flatten(-2), self.n_bits), scale.squeeze(-1), zero.squeeze(-1))

    def encode_into(self, x: Tensor, state: None, codes: ScalarCodes) -> None:
        if self.fused:
            from kvcli.methods.scalar.encode_kernels import encode_per_token

            encode_per_token(x, x.shape[2], self.n_bits, self.group_size, (codes.packed, codes.scale, codes.zero))
        else:
            super().encode_into(x, state, codes)


class PerTokenKey(PerTokenCodec, KeyCodec[ScalarCodes, None]):
    """Post-RoPE keys, quantized per token."""

    def scores(self, query: Tensor, codes: ScalarCodes, state: None, rotation: Rotation | None) -> Tensor:
        # q . (code * scale + zero) = sum over groups of (q in the group . code) * scale + sum(q in the group) * zero
        parts = query.unsqueeze(2) * _group_mask(self.spec.head_dim, self.group_size, query.device).unsqueeze(1)
        fields = byte_fields(codes.packed, self.n_bits).transpose(-1, -2)
        products = (planes_to_fields(parts.flatten(2, 3), self.n_bits) @ fields).unflatten(2, parts.shape[2:4])
        zeros = query.unflatten(-1, (-1, self.group_size)).sum(-1) @ _by_group(codes.zero)
        return (products * _by_group(codes.scale).unsqueeze(3)).sum(2) + zeros


class PerTokenValue(PerTokenCodec, ValueCodec[ScalarCodes]):
    """Values, quantized per token."""

    def round_in_place(
        self, window: Tensor, sinks: int, first: Tensor, count: int, codes: ScalarCodes, peak: Tensor | None = None
    ) -> bool:
        if not self.fused:
            return False
        from kvcli.methods.scalar.encode_kernels import encode_per_token

        out, place = (codes.packed, codes.scale, codes.zero), (first, sinks, window.shape[2] - sinks)
        encode_per_token(window, count, self.n_bits, self.group_size, out, place, peak)
        return True

    def weighted_sum(self, weights: Tensor, codes: ScalarCodes) -> Tensor:
        # sum of w * (code * scale + zero): weights times scales for each group, of whose sum its channels are taken
        scaled = weights.unsqueeze(2) * _by_group(codes.scale).unsqueeze(3)
        sums = scaled.flatten(2, 3) @ byte_fields(codes.packed, self.n_bits)
        sums = fields_to_planes(sums, self.n_bits, self.spec.head_dim).unflatten(-1, (-1, self.group_size))
        of_groups = sums.unflatten(2, scaled.shape[2:4]).diagonal(dim1=2, dim2=4).transpose(-1, -2)
        zeros = weights @ _by_group(codes.zero).transpose(-1, -2)
        return (of_groups + zeros.unsqueeze(-1)).flatten(-2)


def _by_group(x: Tensor) -> Tensor:
    """Scales or zeros [batch, num_kv_heads, time, groups] as contiguous float32 [batch, num_kv_heads, groups, time]."""
    return x.transpose(-1, -2).contiguous().float()


@cache
def _group_mask(head_dim: int, group_size: int, device: torch.device) -> Tensor:
    """1 where a channel is in a group, else 0: float32 [head_dim / group_size, head_dim]."""
    with torch.inference_mode(False):
        groups = torch.arange(head_dim // group_size, device=device).unsqueeze(1)
        return (torch.arange(head_dim, device=device) // group_size == groups).float()
