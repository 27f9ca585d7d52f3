"""TurboQuant: a random rotation, then one scalar quantizer that is optimal for every rotated coordinate.

Zandieh, Daliri, Hadian, Mirrokni, "TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate", 2025,
https://arxiv.org/abs/2504.19874

Written from the definitions of the paper. Deviations:

- The paper's 2.5 and 3.5 bits (outlier channels with one bit more) are not implemented.
- The paper does not say on which side of RoPE keys are quantized: here, after it, one rotation per layer for the keys
  and one for the values.
- Channels of keys that a model normalizes are coded in units of their own (`LayerAttention.key_units`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from kvcli.kernels.launch import FP16_MAX, TINY, norm_unit
from kvcli.methods.base import Codes, KeyCodec, ValueCodec
from kvcli.methods.config import TurboQuantConfig
from kvcli.methods.layer_codec import LayerCodec
from kvcli.methods.method import Method
from kvcli.methods.packing import pack_bits, packed_size, unpack_bits
from kvcli.spec import ModelSpec

_GRID = 2**17
_TAIL = 12.0
_TOLERANCE = 1e-9
_MAX_ROUNDS = 20_000


@dataclass(frozen=True)
class TurboQuantCodes(Codes):
    """Coordinates of rotated unit vectors, and what restores their length.

    Attributes:
        packed: uint8 [batch, num_kv_heads, time, ceil(head_dim * b / 8)], by `pack_bits`: the index of the centroid of
            each rotated coordinate; b bits, one less in the prod variant.
        norm: float16 [batch, num_kv_heads, time, 1], the L2 norm divided by `norm_unit(head_dim)`.
        signs: uint8 [batch, num_kv_heads, time, ceil(head_dim / 8)], bit 1 where the projection of the residual is
            positive; 0 entries in the mse variant.
        residual_norm: float16 [batch, num_kv_heads, time, 1], the L2 norm of the unit vector's residual; 0 entries in
            the mse variant.
    """

    packed: Tensor
    norm: Tensor
    signs: Tensor
    residual_norm: Tensor


class TurboQuant(KeyCodec[TurboQuantCodes, None], ValueCodec[TurboQuantCodes]):
    """x_hat = |x| * Q^T c[idx], with idx_j the centroid nearest to (Q x / |x|)_j (Algorithm 1).

    With `residual_sign`, x / |x| = u is coded with one bit less to u_mse, r = u - u_mse, and
    u_hat = u_mse + sqrt(pi/2)/d * |r| * S^T sign(S r), for which E<y, u_hat> = <y, u> (Algorithm 2, Theorem 2).

    Buffers:
        rotation: float32 [head_dim, head_dim], Q: orthogonal, uniformly distributed; columns times units.
        units: None, or float32 [head_dim], those of channels: x / units is coded.
        centroids: float32 [2^b], ascending.
        projection: float32 [head_dim, head_dim], S: entries N(0, 1), columns times units; only with `residual_sign`.
    """

    def __init__(self, spec: ModelSpec, n_bits: int, residual_sign: bool, generator: torch.Generator) -> None:
        super().__init__()
        self.spec, self.residual_sign = spec, residual_sign
        self.n_bits = n_bits - residual_sign
        self.rotation: Tensor = nn.Buffer(random_rotation(spec.head_dim, generator))
        self.units: Tensor | None
        self.register_buffer("units", None)
        self.centroids: Tensor = nn.Buffer(torch.tensor(lloyd_max(spec.head_dim, self.n_bits), dtype=torch.float32))
        if residual_sign:
            self.projection: Tensor = nn.Buffer(torch.randn(spec.head_dim, spec.head_dim, generator=generator))

    def bits_per_token(self) -> float:
        widths = (self.n_bits, 1) if self.residual_sign else (self.n_bits,)
        return float(self.spec.num_kv_heads * sum(8 * packed_size(self.spec.head_dim, bits) + 16 for bits in widths))

    def use_units(self, units: Tensor) -> None:
        for matrix in (self.rotation, *([self.projection] if self.residual_sign else [])):
            matrix.mul_(units)
        self.units = units

    def in_units(self, x: Tensor) -> Tensor:
        """Vectors [..., head_dim] in the units of channels."""
        return x if self.units is None else x / self.units

    def encode(self, x: Tensor, state: None = None, out: tuple[Tensor, Tensor] | None = None) -> TurboQuantCodes:
        x, rotation = self.in_units(x), self.in_units(self.rotation)
        if self.fused and not self.residual_sign:
            from kvcli.methods.turboquant_kernels import encode_tokens

            packed, norm = encode_tokens(x, rotation, self.centroids, self.n_bits, out)
            return TurboQuantCodes(packed, norm, packed[..., :0], norm[..., :0])
        scaled = x.float() / norm_unit(self.spec.head_dim)
        length = scaled.square().sum(-1, keepdim=True).sqrt()
        direction = scaled / length.clamp_min(TINY)
        borders = (self.centroids[1:] + self.centroids[:-1]) / 2
        index = torch.bucketize(direction @ rotation.T, borders, out_int32=True)
        packed, norm = pack_bits(index, self.n_bits), length.clamp(max=FP16_MAX).half()
        if not self.residual_sign:
            return TurboQuantCodes(packed, norm, packed[..., :0], norm[..., :0])
        residual = direction - self.centroids[index] @ rotation
        signs = pack_bits((residual @ self.in_units(self.projection).T > 0).int(), 1)
        return TurboQuantCodes(packed, norm, signs, residual.square().sum(-1, keepdim=True).sqrt().half())

    def encode_into(self, x: Tensor, state: None, codes: TurboQuantCodes) -> None:
        if self.fused and not self.residual_sign:
            self.encode(x, state, (codes.packed, codes.norm))
        else:
            super().encode_into(x, state, codes)

    def decode(self, codes: TurboQuantCodes, state: None = None) -> Tensor:
        width = self.spec.head_dim
        direction = self.centroids[unpack_bits(codes.packed, self.n_bits, width)] @ self.rotation
        if self.residual_sign:
            signed = 2 * unpack_bits(codes.signs, 1, width).float() - 1
            factor = math.sqrt(math.pi / 2) / width
            direction = direction + signed @ self.projection * (factor * codes.residual_norm.float())
        return direction * (codes.norm.float() * norm_unit(width))

    def decode_to(self, codes: TurboQuantCodes, state: None, dtype: torch.dtype) -> Tensor:
        if not self.fused or self.residual_sign:
            return super().decode_to(codes, state, dtype)
        from kvcli.methods.turboquant_kernels import decode_tokens

        return decode_tokens(codes.packed, codes.norm, self.rotation, self.centroids, self.n_bits, dtype)


def random_rotation(width: int, generator: torch.Generator) -> Tensor:
    """A uniformly distributed orthogonal matrix [width, width]: Q of a Gaussian matrix's QR with R's diagonal > 0."""
    q, r = torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64))
    return (q * r.diagonal().sign()).float()


@lru_cache
def lloyd_max(width: int, n_bits: int) -> tuple[float, ...]:
    """Centroids of least squared error for a coordinate of a uniformly distributed unit vector (Eq. 4).

    The coordinate's density is proportional to (1 - x^2)^((width - 3) / 2) on [-1, 1] (Lemma 1), close to
    N(0, 1 / width) for large widths. Lloyd's iteration runs on the distribution itself: the mass below x is summed on a
    fine grid, the first moment below x is -(1 - x^2)^((width - 1) / 2) / (width - 1). Returns 2^n_bits centroids,
    ascending and symmetric about 0, also where tensors are made on the `meta` device.
    """
    # x = sin t has the density cos(t)^(width - 2) in t, which is finite for every width
    reach = math.asin(min(1.0, _TAIL / math.sqrt(width)))
    edges = torch.linspace(-reach, reach, _GRID + 1, dtype=torch.float64, device="cpu")
    middles = (edges[1:] + edges[:-1]) / 2
    mass = torch.cat((edges.new_zeros(1), middles.cos().pow(width - 2).cumsum(0)))
    mass *= 2 * reach / _GRID
    moment = -edges.cos().pow(width - 1) / (width - 1)
    quantiles = (torch.arange(2**n_bits, dtype=torch.float64, device="cpu") + 0.5) / 2**n_bits * mass[-1]
    centroids = edges[torch.searchsorted(mass, quantiles)].sin()
    for _ in range(_MAX_ROUNDS):
        borders = ((centroids[1:] + centroids[:-1]) / 2).asin()
        place = (borders + reach) * (_GRID / (2 * reach))
        low = place.long().clamp(0, _GRID - 1)
        part = place - low
        cells = [torch.cat((x[:1], x[low] + part * (x[low + 1] - x[low]), x[-1:])).diff() for x in (mass, moment)]
        moved = cells[1] / cells[0]
        moved = (moved - moved.flip(0)) / 2
        step = float((moved - centroids).abs().max()) * math.sqrt(width)
        centroids = moved
        if step < _TOLERANCE:
            break
    return tuple(centroids.tolist())


def _build(spec: ModelSpec, config: TurboQuantConfig, layer_idx: int) -> LayerCodec[TurboQuant, TurboQuant]:
    generator = torch.Generator().manual_seed(config.rotation_seed * 100_003 + layer_idx)
    return LayerCodec(
        TurboQuant(spec, config.k_bits, config.key_variant == "prod", generator),
        TurboQuant(spec, config.v_bits, False, generator),
    )


METHOD = Method(
    name="turboquant",
    summary="random rotation, Lloyd-Max scalar codes, a norm per token and head",
    bits="1, 2, 3, 4",
    paper="TurboQuant, 2025",
    arxiv="2504.19874",
    config_cls=TurboQuantConfig,
    build=_build,
    paper_settings={f"turboquant-{bits}": {"sink_length": 0, "residual_length": 0} for bits in (4, 3, 2)},
    attend_kernels="kvcli.methods.token_attend_kernels",
    example_settings={"residual_length": 6, "flush_block": 1},
)
