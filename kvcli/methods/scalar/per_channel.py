"""Per-channel quantization in groups of consecutive tokens: the keys of KIVI and SQuat."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcli.methods.base import Codes, KeyCodec, StateT
from kvcli.methods.config import ScalarBits
from kvcli.methods.scalar.affine import dequantize, max_magnitude, quantize
from kvcli.packing import byte_fields, pack_planes, planes_in_fields, planes_size, planes_to_fields, unpack_planes
from kvcli.rope import Rotation
from kvcli.spec import ModelSpec


@dataclass(frozen=True)
class PerChannelCodes(Codes):
    """Codes of keys quantized per channel.

    Attributes:
        packed: uint8 [batch, num_kv_heads, time, head_dim * bits / 8], by `pack_planes`.
        scale: float16 [batch, num_kv_heads, time / group_size, head_dim].
        zero: like scale.
    """

    packed: Tensor
    scale: Tensor
    zero: Tensor


class PerChannelCodec(KeyCodec[PerChannelCodes, StateT]):
    """Keys stored per channel in groups of `group_size` tokens; bits per value = b + 32 / group_size.

    Args:
        spec: the model's shapes.
        n_bits: bits per code.
        group_size: tokens per group.
    """

    def __init__(self, spec: ModelSpec, n_bits: ScalarBits, group_size: int) -> None:
        super().__init__()
        self.spec, self.n_bits, self.tokens_per_group = spec, n_bits, group_size
        self.max_magnitude = max_magnitude(n_bits)

    def bits_per_token(self) -> float:
        head = 8 * planes_size(self.spec.head_dim, self.n_bits) + 32 * self.spec.head_dim / self.tokens_per_group
        return self.spec.num_kv_heads * head

    def quantize_channels(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Quantizes whole groups of tokens.

        Args:
            x: [batch, heads, time, channels].

        Returns:
            codes int32 [batch, heads, time, channels]; scale and zero float16 [batch, heads, time / group, channels].
        """
        groups = x.unflatten(2, (-1, self.tokens_per_group)).transpose(-1, -2)
        codes, scale, zero = quantize(groups, self.n_bits)
        return codes.transpose(-1, -2).flatten(2, 3), scale.squeeze(-1), zero.squeeze(-1)

    def dequantize_channels(self, codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """Inverse of `quantize_channels`, float32."""
        groups = codes.unflatten(2, (-1, self.tokens_per_group))
        return dequantize(groups, scale.unsqueeze(3), zero.unsqueeze(3)).flatten(2, 3)

    def pack(self, codes: Tensor, scale: Tensor, zero: Tensor) -> PerChannelCodes:
        """Packs codes int32 [batch, num_kv_heads, time, head_dim] into bytes."""
        return PerChannelCodes(pack_planes(codes, self.n_bits), scale, zero)

    def decode(self, codes: PerChannelCodes, state: StateT | None = None) -> Tensor:
        unpacked = unpack_planes(codes.packed, self.n_bits, self.spec.head_dim)
        return self.dequantize_channels(unpacked, codes.scale, codes.zero)

    def scores(self, query: Tensor, codes: PerChannelCodes, state: StateT, rotation: Rotation | None) -> Tensor:
        if rotation is not None:
            return super().scores(query, codes, state, rotation)
        # q . (code * scale + zero) = (q * scale) . code + q . zero, with a scaled query per group of tokens
        scale = planes_in_fields(codes.scale, self.n_bits).float()
        scaled = planes_to_fields(query, self.n_bits).unsqueeze(2) * scale.unsqueeze(3)
        fields = byte_fields(codes.packed, self.n_bits).unflatten(2, (-1, self.tokens_per_group))
        products = scaled @ fields.transpose(-1, -2)
        zeros = query @ codes.zero.float().transpose(-1, -2)
        return products.add_(zeros.transpose(-1, -2).unsqueeze(-1)).transpose(2, 3).flatten(3)

    def decode_to(self, codes: PerChannelCodes, state: StateT, dtype: torch.dtype) -> Tensor:
        if not self.fused:
            return super().decode_to(codes, state, dtype)
        from kvcli.methods.scalar.decode_kernels import dequantize_planes

        return dequantize_planes(codes, self.n_bits, self.spec.head_dim, self.tokens_per_group, 1, dtype)


class PerChannelKey(PerChannelCodec[None]):
    """Post-RoPE keys, quantized per channel (KIVI section 3.2)."""

    def encode(self, x: Tensor, state: None = None) -> PerChannelCodes:
        if self.fused:
            from kvcli.methods.scalar.encode_kernels import quantize_per_channel

            return PerChannelCodes(*quantize_per_channel(x, self.n_bits, self.tokens_per_group))
        return self.pack(*self.quantize_channels(x))
