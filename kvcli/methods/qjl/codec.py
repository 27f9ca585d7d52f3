"""QJL's key codec: sign(S k) and |k|, from which scores are estimated without bias.

Zandieh et al., "QJL: 1-Bit Quantized JL Transform for KV Cache Quantization with Zero Overhead", 2024,
https://arxiv.org/abs/2406.03482
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor, nn

from kvcli.kernels.launch import FP16_MAX, norm_unit
from kvcli.methods.base import Codes, KeyCodec, State
from kvcli.methods.config import QJLConfig
from kvcli.methods.layer_codec import LayerCodec
from kvcli.methods.method import Method
from kvcli.methods.packing import byte_fields, pack_bits, packed_size, stream_to_fields, unpack_bits
from kvcli.methods.scalar.codec import PerTokenValue
from kvcli.rope import Rotation
from kvcli.spec import ModelSpec


@dataclass(frozen=True)
class QJLCodes(Codes):
    """Signs of projected keys, and the keys' norms; inlier and outlier channels apart.

    Attributes:
        signs: uint8 [batch, num_kv_heads, time, ceil(m / 8)], by `pack_bits`; bit 1 where a projection of the inlier
            channels is positive.
        norm: float16 [batch, num_kv_heads, time, 1], norm of the inlier channels divided by `norm_unit(head_dim)`.
        outlier_signs: uint8 [batch, num_kv_heads, time, ceil(m_out / 8)], the same for the outlier channels.
        outlier_norm: float16 [batch, num_kv_heads, time, 1], or 0 entries without outlier channels.
    """

    signs: Tensor
    norm: Tensor
    outlier_signs: Tensor
    outlier_norm: Tensor


@dataclass(frozen=True)
class QJLState(State):
    """The outlier channels of each sequence.

    Attributes:
        channels: float32 [batch, num_kv_heads, head_dim]; energy of each key channel until a sequence's first keys are
            encoded, 1 for outlier channels and 0 for others from then on.
    """

    channels: Tensor


class QJLKey(KeyCodec[QJLCodes, QJLState]):
    """Post-RoPE keys: score(q, k) = sqrt(pi/2)/m * |k| * <S q, sign(S k)> (QJL Definition 1 and 2).

    Unbiased for Gaussian S, with variance (pi/2 |q|^2 |k|^2 - <q, k>^2) / m. Rows orthogonalized in chunks of head_dim
    and scaled to norm sqrt(head_dim) have about a third of that at m = 2 head_dim, and a bias by the factor
    `sketch_bias`, which is divided out. `decode` returns the k_hat with <q, k_hat> = score(q, k).

    Buffers:
        sketch: float32 [m, head_dim].
        outlier_sketch: float32 [m_out, head_dim].
    Each layer has its own projections.

    ValueError: more outliers than channels.
    """

    def __init__(self, spec: ModelSpec, config: QJLConfig, layer_idx: int) -> None:
        super().__init__()
        if config.num_outliers > spec.head_dim:
            raise ValueError(f"num_outliers {config.num_outliers} exceeds head_dim {spec.head_dim}; choose fewer")
        self.spec, self.config = spec, config
        inliers, outliers = config.sketch_dims(spec, layer_idx)
        generator = torch.Generator().manual_seed(config.sketch_seed * 100_003 + layer_idx)
        orthogonal = config.sketch == "orthogonal"
        self.sketch: Tensor = nn.Buffer(random_sketch(inliers, spec.head_dim, orthogonal, generator))
        self.outlier_sketch: Tensor = nn.Buffer(random_sketch(outliers, spec.head_dim, orthogonal, generator))
        self.bias = sketch_bias(spec.head_dim) if orthogonal else 1.0
        # of a score, times m: without the sketch's bias, times the unit of stored norms
        self.norm_factor = math.sqrt(math.pi / 2) / self.bias * norm_unit(spec.head_dim)

    def bits_per_token(self) -> float:
        sketches = (self.sketch, self.outlier_sketch)[: 2 if self.config.num_outliers else 1]
        return float(self.spec.num_kv_heads * sum(8 * packed_size(len(sketch), 1) + 16 for sketch in sketches))

    def new_state(self, batch: int, device: torch.device) -> QJLState:
        return QJLState(torch.zeros(batch, self.spec.num_kv_heads, self.spec.head_dim, device=device))

    def observe(self, state: QJLState, queries: Tensor, keys: Tensor, counts: Tensor) -> None:
        state.channels.add_(keys.float().square().sum(2))

    def finalize_state(self, state: QJLState, rows: list[int]) -> None:
        mask = torch.zeros_like(state.channels[rows])
        if self.config.num_outliers:
            mask.scatter_(-1, state.channels[rows].topk(self.config.num_outliers, dim=-1).indices, 1.0)
        state.channels[rows] = mask

    def encode(self, x: Tensor, state: QJLState) -> QJLCodes:
        if self.fused:
            from kvcli.methods.qjl.encode_kernels import encode_keys

            return QJLCodes(*encode_keys(x, state.channels, self.sketch, self.outlier_sketch))
        outlier = state.channels.unsqueeze(2)
        x = x.float()
        signs, norm = _signs_and_norm(x * (1 - outlier), self.sketch)
        outlier_signs, outlier_norm = _signs_and_norm(x * outlier, self.outlier_sketch)
        return QJLCodes(signs, norm, outlier_signs, outlier_norm)

    def decode(self, codes: QJLCodes, state: QJLState) -> Tensor:
        outlier = state.channels.unsqueeze(2)
        inliers = self._estimate(codes.signs, codes.norm, self.sketch) * (1 - outlier)
        if not self.config.num_outliers:
            return inliers
        return inliers + self._estimate(codes.outlier_signs, codes.outlier_norm, self.outlier_sketch) * outlier

    def decode_to(self, codes: QJLCodes, state: QJLState, dtype: torch.dtype) -> Tensor:
        if not self.fused:
            return super().decode_to(codes, state, dtype)
        from kvcli.methods.qjl.decode_kernels import decode_keys

        sketches = self.sketch, self.outlier_sketch
        return decode_keys(vars(codes).values(), sketches, state.channels, self.norm_factor, dtype)

    def scores(self, query: Tensor, codes: QJLCodes, state: QJLState, rotation: Rotation | None) -> Tensor:
        outlier = state.channels.unsqueeze(2)
        inliers = self._scores(query * (1 - outlier), codes.signs, codes.norm, self.sketch)
        if not self.config.num_outliers:
            return inliers
        return inliers + self._scores(query * outlier, codes.outlier_signs, codes.outlier_norm, self.outlier_sketch)

    def _scores(self, query: Tensor, signs: Tensor, norm: Tensor, sketch: Tensor) -> Tensor:
        """sqrt(pi/2)/m * |k| * (S q) . sign(S k), [batch, heads, rows, time], without decoding the key."""
        sketched = query @ sketch.T
        bits = byte_fields(signs, 1).transpose(-1, -2)
        products = 2 * (stream_to_fields(sketched, 1) @ bits) - sketched.sum(-1, keepdim=True)
        return products * norm.float().transpose(-1, -2) * (self.norm_factor / len(sketch))

    def _estimate(self, signs: Tensor, norm: Tensor, sketch: Tensor) -> Tensor:
        """sqrt(pi/2)/m * |k| * S^T sign(S k), [batch, heads, time, head_dim]."""
        signed = 2 * unpack_bits(signs, 1, len(sketch)).float() - 1
        return signed @ sketch * norm.float() * (self.norm_factor / len(sketch))


def _signs_and_norm(x: Tensor, sketch: Tensor) -> tuple[Tensor, Tensor]:
    """Packed signs of S x and |x| in units as float16; both empty for a sketch without rows."""
    norm = (x.square().sum(-1, keepdim=True).sqrt() / norm_unit(x.shape[-1])).clamp(max=FP16_MAX).half()
    signs = pack_bits((x @ sketch.T > 0).int(), 1)
    return signs, norm[..., : 1 if len(sketch) else 0]


def random_sketch(rows: int, head_dim: int, orthogonal: bool, generator: torch.Generator) -> Tensor:
    """A Gaussian projection [rows, head_dim], or one orthogonalized in chunks with rows of norm sqrt(head_dim)."""
    chunks = []
    for start in range(0, rows, head_dim):
        chunk = torch.randn(head_dim, head_dim, generator=generator)
        if orthogonal:
            chunk = torch.linalg.qr(chunk.T)[0].T * math.sqrt(head_dim)
        chunks.append(chunk[: rows - start])
    return torch.cat(chunks) if chunks else torch.zeros(0, head_dim)


def sketch_bias(head_dim: int) -> float:
    """Factor of the estimate from rows of norm sqrt(d): sqrt(d/2) Gamma(d/2) / Gamma((d+1)/2)."""
    half = head_dim / 2
    return math.sqrt(half) * math.exp(math.lgamma(half) - math.lgamma(half + 0.5))


def _nominal_bits(spec: ModelSpec, config: QJLConfig) -> tuple[float, float]:
    """Sign bits per key value, averaged over the layers, without norms as in the paper; and bits per value code."""
    dims = [sum(config.sketch_dims(spec, layer_idx)) for layer_idx in range(spec.num_layers)]
    return sum(dims) / len(dims) / spec.head_dim, fmean(config.widths("v_bits", spec.num_layers))


METHOD = Method(
    name="qjl",
    summary="signs of a random projection for keys, per-token values",
    bits="about 3",
    paper="QJL, 2024",
    arxiv="2406.03482",
    config_cls=QJLConfig,
    build=lambda spec, config, layer_idx: LayerCodec(
        QJLKey(spec, config, layer_idx), PerTokenValue(spec, config.v_bits, config.group_size)
    ),
    nominal_bits=_nominal_bits,
    paper_settings={"qjl": {"sink_length": 0, "residual_length": 128}},
    attend_kernels="kvcli.methods.qjl.attend_kernels",
    bench=("qjl",),
    example_settings={"residual_length": 6, "flush_block": 1, "num_outliers": 2, "group_size": 8},
)
