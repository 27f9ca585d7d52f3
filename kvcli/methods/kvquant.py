"""KVQuant: keys per channel before RoPE, values per token, non-uniform levels, and the largest values kept apart.

Hooper et al., "KVQuant: Towards 10 Million Context Length LLM Inference with KV Cache Quantization", NeurIPS 2024,
https://arxiv.org/abs/2401.18079

- Keys (sections 3.1, 3.2): before RoPE, normalized by a range of each channel that is fitted offline.
- Values: normalized by the range of each token over all kv heads, computed when the token is encoded.
- Levels (section 3.3, nuqX): 2^b levels per layer for keys and for values, by k-means on normalized calibration data
  with sensitivity weights, argmin sum F_ii (x_i - Q(x_i))^2.
- Outliers (section 3.4): 1 % of the values of each vector stay in float16 with 16-bit indices; ranges and levels are
  those of the rest.

Deviations:

- The paper's F is the Fisher information, from gradients. Here F is the mean squared query of the key's channel pair,
  which is what an error of the key costs in scores, and 1 for values.
- Keys have a fixed number of outliers per token, those farthest out of their channel's range (the paper's thresholds
  give a varying number, its code offers a cap), so that a token has a fixed size.
- The number of outliers is even and at least 2: 1 % of 192 channels are 2 of them, 1.04 %.
- Q-Norm, a correction of 2-bit levels in earlier versions of the paper, is not implemented.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvcli.errors import ConfigError
from kvcli.kernels.launch import FP16_MAX, TINY
from kvcli.methods.base import Codec, Codes, KeyCodec, Space, ValueCodec
from kvcli.methods.config import KVQuantConfig
from kvcli.methods.layer_codec import LayerCodec
from kvcli.methods.method import FitReport, Method
from kvcli.methods.oscar import relative_error
from kvcli.methods.packing import pack_bits, packed_size, unpack_bits
from kvcli.methods.samples import LayerSamples
from kvcli.rope import from_pairs, to_pairs
from kvcli.spec import ModelSpec

_FIT_TOKENS = 32768
_ERROR_TOKENS = 8192
_KMEANS_ROUNDS = 100
_MAX_CHANNELS = 2**15


@dataclass(frozen=True)
class KVQuantCodes(Codes):
    """Codes over the D channels of all kv heads.

    Attributes:
        packed: uint8 [batch, 1, time, ceil(D * bits / 8)], by `pack_bits`: the index of each channel's level.
        outliers: float16 [batch, 1, time, n], values that replace the decoded ones.
        channels: int16 [batch, 1, time, n], which channels those are.
        span: float16 [batch, 1, time, 2], middle and half width of the token's range; 0 entries for keys.
    """

    packed: Tensor
    outliers: Tensor
    channels: Tensor
    span: Tensor


class _KVQuant(Codec[KVQuantCodes, None]):
    """x = middle + half * level[code] in all channels but the outliers.

    Buffers:
        levels: float32 [2^bits], ascending, in [-1, 1].
    """

    has_span: bool

    def __init__(self, spec: ModelSpec, n_bits: int, outlier_fraction: float) -> None:
        super().__init__()
        if spec.kv_dim > _MAX_CHANNELS:
            raise ValueError(f"KVQuant's outliers have 16-bit indices, too few for {spec.kv_dim} channels")
        self.spec, self.n_bits, self.outlier_fraction = spec, n_bits, outlier_fraction
        pairs = max(1, round(outlier_fraction * spec.kv_dim / 2)) if outlier_fraction else 0
        self.num_outliers = 2 * min(pairs, (spec.kv_dim - 1) // 2)
        self.levels: Tensor = nn.Buffer(torch.zeros(2**n_bits))

    def bits_per_token(self) -> float:
        return 8.0 * packed_size(self.spec.kv_dim, self.n_bits) + 32 * (self.num_outliers + self.has_span)

    def quantize(self, x: Tensor, unit: Tensor, channels: Tensor, span: Tensor) -> KVQuantCodes:
        """Codes of flat tokens x, float32 [batch, 1, time, D], normalized `unit`; `channels` int64 are the outliers."""
        borders = (self.levels[1:] + self.levels[:-1]) / 2
        packed = pack_bits(torch.bucketize(unit.contiguous(), borders, out_int32=True), self.n_bits)
        outliers = x.gather(-1, channels).clamp(-FP16_MAX, FP16_MAX).half()
        return KVQuantCodes(packed, outliers, channels.to(torch.int16), span)

    def dequantize(self, codes: KVQuantCodes, middle: Tensor, half: Tensor) -> Tensor:
        """Inverse of `quantize`, [batch, num_kv_heads, time, head_dim]; middle and half broadcast to [..., D]."""
        x = self.levels[unpack_bits(codes.packed, self.n_bits, self.spec.kv_dim)] * half + middle
        x = x.scatter(-1, codes.channels.long(), codes.outliers.float())
        return x.squeeze(1).unflatten(-1, (self.spec.num_kv_heads, -1)).transpose(1, 2)


class _KVQuantKey(_KVQuant, KeyCodec[KVQuantCodes, None]):
    """Keys before RoPE.

    Buffers:
        middle: float32 [D], of each channel's range.
        half_width: float32 [D], half of the range's width.
    """

    space: Space = "pre_rope"
    has_span = False

    def __init__(self, spec: ModelSpec, n_bits: int, outlier_fraction: float) -> None:
        super().__init__(spec, n_bits, outlier_fraction)
        self.middle: Tensor = nn.Buffer(torch.zeros(spec.kv_dim))
        self.half_width: Tensor = nn.Buffer(torch.zeros(spec.kv_dim))

    def normalize(self, x: Tensor) -> Tensor:
        """Flat keys [..., D] in units of their channels' ranges; beyond 1 are those out of range."""
        return (x - self.middle) / self.half_width.clamp_min(TINY)

    def encode(self, x: Tensor, state: None = None) -> KVQuantCodes:
        x = flat(x)
        unit = self.normalize(x)
        channels = unit.abs().topk(self.num_outliers, dim=-1).indices
        return self.quantize(x, unit, channels, x.new_empty(*x.shape[:3], 0, dtype=torch.float16))

    def decode(self, codes: KVQuantCodes, state: None = None) -> Tensor:
        return self.dequantize(codes, self.middle, self.half_width)


class _KVQuantValue(_KVQuant, ValueCodec[KVQuantCodes]):
    has_span = True

    def normalize(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Splits flat values [..., D] into outliers at both ends and a rest that spans [-1, 1].

        Returns the values in units of the rest's range [..., D], the outliers' channels int64 [..., n], and middle and
        half width of the range, float16 [..., 2].
        """
        most = self.num_outliers // 2
        high, low = (x.topk(most + 1, dim=-1, largest=largest) for largest in (True, False))
        top, bottom = high.values[..., -1:], low.values[..., -1:]
        # halved first: the sum of two numbers that float16 holds may not be one
        span = torch.cat((top / 2 + bottom / 2, top / 2 - bottom / 2), -1).clamp(-FP16_MAX, FP16_MAX).half()
        middle, half = span.float().split(1, dim=-1)
        unit = torch.where(half > 0, (x - middle) / half.clamp_min(TINY), 0.0)
        return unit, torch.cat((high.indices[..., :-1], low.indices[..., :-1]), -1), span

    def encode(self, x: Tensor, state: None = None) -> KVQuantCodes:
        x = flat(x)
        return self.quantize(x, *self.normalize(x))

    def decode(self, codes: KVQuantCodes, state: None = None) -> Tensor:
        return self.dequantize(codes, *codes.span.float().split(1, dim=-1))


def flat(x: Tensor) -> Tensor:
    """Tokens over all heads: [batch, heads, time, head_dim] to float32 [batch, 1, time, D]."""
    return x.float().transpose(1, 2).flatten(2).unsqueeze(1)


def weighted_levels(x: Tensor, weight: Tensor, count: int) -> Tensor:
    """Weighted k-means in one dimension: argmin sum_i w_i (x_i - Q(x_i))^2 over `count` levels.

    Lloyd's iteration from the weighted quantiles, on sums of the sorted data x [n] with weights [n], not negative.
    Returns float32 [count], ascending.
    """
    x, order = x.double().sort()
    weight = weight.double()[order]
    mass, moment = (torch.cat((y.new_zeros(1), y.cumsum(0))) for y in (weight, weight * x))
    quantiles = (torch.arange(count, dtype=mass.dtype, device=x.device) + 0.5) / count * mass[-1]
    levels = x[(torch.searchsorted(mass, quantiles) - 1).clamp(0, len(x) - 1)]
    for _ in range(_KMEANS_ROUNDS):
        ends = torch.searchsorted(x, (levels[1:] + levels[:-1]) / 2)
        ends = torch.cat((ends.new_zeros(1), ends, ends.new_full((1,), len(x))))
        inside = mass[ends].diff()
        moved = torch.where(inside > 0, moment[ends].diff() / inside.clamp_min(TINY), levels)
        if torch.equal(moved, levels):
            break
        levels = moved
    return levels.float()


def _fit(
    codec: LayerCodec[_KVQuantKey, _KVQuantValue],
    train: LayerSamples,
    heldout: LayerSamples,
    config: KVQuantConfig,
    generator: torch.Generator,
) -> FitReport:
    """Fits channel ranges of the keys and the levels of keys and values, in place.

    Returns:
        `key_error`: of each head, the held-out squared error of the keys over their squares, weighted by the queries.
        `value_error`: of each head, the same of the values, without weights.

    ConfigError: a recording without queries.
    """
    if not train.q.shape[1]:
        raise ConfigError("sensitivities come from recorded queries; calibrate with --query-tokens above 0")
    key, value = codec.key, codec.value
    sensitivity = query_energy(train.q, key.spec)
    some = torch.arange(0, train.num_tokens, -(-train.num_tokens // _FIT_TOKENS))
    keys, values = (flat(x.at(some)[None])[0, 0] for x in (train.keys, train.values))
    ordered = keys.sort(0).values
    cut = round(config.outlier_fraction / 2 * (len(keys) - 1))
    low, high = ordered[cut], ordered[-1 - cut]
    key.middle.copy_((low + high) / 2)
    key.half_width.copy_((high - low) / 2)
    unit = key.normalize(keys)
    inside = unit.abs() <= 1
    weight = (sensitivity.flatten() * key.half_width.square()).expand_as(unit)
    key.levels.copy_(weighted_levels(unit[inside], weight[inside], len(key.levels)))
    unit, outliers, span = value.normalize(values)
    inside = torch.ones_like(unit, dtype=torch.bool).scatter(-1, outliers, False)
    weight = span[..., 1:].float().square().expand_as(unit)
    value.levels.copy_(weighted_levels(unit[inside], weight[inside], len(value.levels)))
    keys, values = (x.first(_ERROR_TOKENS) for x in (heldout.keys, heldout.values))
    even = torch.eye(values.shape[-1], device=values.device).expand(len(values), -1, -1)
    errors = relative_error(key, keys, sensitivity.diag_embed()), relative_error(value, values, even)
    return FitReport(dict(zip(("key_error", "value_error"), errors, strict=True)))


def query_energy(queries: Tensor, spec: ModelSpec) -> Tensor:
    """Mean square of queries [num_heads, tokens, head_dim] before RoPE in each channel pair, which RoPE rotates.

    It is what an error of a key channel costs: float32 [num_kv_heads, head_dim], equal within a pair.
    """
    energy = queries.float().square().mean(1).unflatten(0, (spec.num_kv_heads, -1)).mean(1)
    pairs = to_pairs(energy, spec.rope.rotary_dim).mean(-1, keepdim=True)
    return from_pairs(pairs.expand(*pairs.shape[:-1], 2), spec.rope.rotary_dim)


METHOD = Method(
    name="kvquant",
    summary="keys per channel before RoPE, fitted levels, 1 % outliers in 16 bits",
    bits="2, 3, 4",
    paper="KVQuant, NeurIPS 2024",
    arxiv="2401.18079",
    config_cls=KVQuantConfig,
    build=lambda spec, config, layer_idx: LayerCodec(
        _KVQuantKey(spec, config.k_bits, config.outlier_fraction),
        _KVQuantValue(spec, config.v_bits, config.outlier_fraction),
    ),
    paper_settings={f"kvquant-{bits}": {"sink_length": 1, "residual_length": 0} for bits in (4, 3, 2)},
    fit=_fit,
    fit_metrics={"key_error": "held-out key error in scores", "value_error": "held-out value error"},
    example_settings={"residual_length": 6, "flush_block": 1},
)
