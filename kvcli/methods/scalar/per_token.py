"""Per-token quantization in groups of channels: the values of KIVI, SQuat and QJL, and all of RTN."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kvcli.methods.base import Codec, Codes, KeyCodec, ValueCodec
from kvcli.methods.config import ScalarBits
from kvcli.methods.scalar.affine import dequantize, max_magnitude, quantize
from kvcli.packing import byte_fields, fields_to_planes, pack_planes, planes_size, planes_to_fields, unpack_planes
from kvcli.rope import Rotation
from kvcli.spec import ModelSpec


@dataclass(frozen=True)
class PerTokenCodes(Codes):
    """Codes of tokens quantized in groups of channels.

    Attributes:
        packed: uint8 [batch, num_kv_heads, time, head_dim * bits / 8], by `pack_planes`.
        scale: float16 [batch, num_kv_heads, time, head_dim / group_size].
        zero: like scale.
    """

    packed: Tensor
    scale: Tensor
    zero: Tensor


class PerTokenCodec(Codec[PerTokenCodes, None]):
    """Asymmetric quantization of each token in groups of channels (KIVI section 3.1; also round-to-nearest).

    Args:
        spec: the model's shapes.
        n_bits: bits per code.
        group_size: channels per group; a head narrower than that is one group.

    Raises:
        ValueError: `group_size` does not divide `head_dim`.
    """

    def __init__(self, spec: ModelSpec, n_bits: ScalarBits, group_size: int) -> None:
        super().__init__()
        self.spec, self.n_bits = spec, n_bits
        self.group_size = min(group_size, spec.head_dim)
        self.max_magnitude = max_magnitude(n_bits)
        if spec.head_dim % self.group_size:
            raise ValueError(f"group_size {group_size} does not divide head_dim {spec.head_dim}; choose one that does")

    def bits_per_token(self) -> float:
        head = 8 * planes_size(self.spec.head_dim, self.n_bits) + 32 * self.spec.head_dim // self.group_size
        return float(self.spec.num_kv_heads * head)

    def encode(self, x: Tensor, state: None = None) -> PerTokenCodes:
        if self.fused:
            from kvcli.methods.scalar.encode_kernels import quantize_per_token

            return PerTokenCodes(*quantize_per_token(x, self.n_bits, self.group_size))
        codes, scale, zero = quantize(x.unflatten(-1, (-1, self.group_size)), self.n_bits)
        return PerTokenCodes(pack_planes(codes.flatten(-2), self.n_bits), scale.squeeze(-1), zero.squeeze(-1))

    def encode_into(self, x: Tensor, state: None, codes: PerTokenCodes) -> None:
        if not self.fused:
            super().encode_into(x, state, codes)
            return
        from kvcli.methods.scalar.encode_kernels import quantize_per_token

        quantize_per_token(x, self.n_bits, self.group_size, (codes.packed, codes.scale, codes.zero))

    def decode(self, codes: PerTokenCodes, state: None = None) -> Tensor:
        unpacked = unpack_planes(codes.packed, self.n_bits, self.spec.head_dim).unflatten(-1, (-1, self.group_size))
        return dequantize(unpacked, codes.scale.unsqueeze(-1), codes.zero.unsqueeze(-1)).flatten(-2)

    def decode_to(self, codes: PerTokenCodes, state: None, dtype: torch.dtype) -> Tensor:
        if not self.fused:
            return super().decode_to(codes, state, dtype)
        from kvcli.methods.scalar.decode_kernels import dequantize_planes

        return dequantize_planes(codes, self.n_bits, self.spec.head_dim, 1, self.group_size, dtype)


class PerTokenKey(PerTokenCodec, KeyCodec[PerTokenCodes, None]):
    """Post-RoPE keys, quantized per token."""

    def scores(self, query: Tensor, codes: PerTokenCodes, state: None, rotation: Rotation | None) -> Tensor:
        # q . (code * scale + zero) = sum over groups of (q in the group . code) * scale + sum(q in the group) * zero
        parts = query.unsqueeze(2) * _group_mask(self.spec.head_dim, self.group_size, query.device).unsqueeze(1)
        fields = byte_fields(codes.packed, self.n_bits).transpose(-1, -2)
        products = (planes_to_fields(parts.flatten(2, 3), self.n_bits) @ fields).unflatten(2, parts.shape[2:4])
        zeros = query.unflatten(-1, (-1, self.group_size)).sum(-1) @ _by_group(codes.zero)
        return (products * _by_group(codes.scale).unsqueeze(3)).sum(2) + zeros


class PerTokenValue(PerTokenCodec, ValueCodec[PerTokenCodes]):
    """Values, quantized per token."""

    def round_in_place(
        self, window: Tensor, sinks: int, first: Tensor, count: int, codes: PerTokenCodes, peak: Tensor | None = None
    ) -> bool:
        if not self.fused:
            return False
        from kvcli.methods.scalar.encode_kernels import round_per_token

        out = codes.packed, codes.scale, codes.zero
        round_per_token(window, sinks, first, count, self.n_bits, self.group_size, out, peak)
        return True

    def weighted_sum(self, weights: Tensor, codes: PerTokenCodes) -> Tensor:
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
