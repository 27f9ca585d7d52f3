"""KVarN: keys and values rotated, normalized along tokens and channels, and rounded to nearest, tile by tile.

Muller et al., "KVarN: Variance-Normalized KV-Cache Quantization Mitigates Error Accumulation in Reasoning Tasks", 2026,
https://arxiv.org/abs/2606.03458

A tile X is `group_size` consecutive tokens of a kv head, tokens by channels, keys after RoPE:

    rotation:        X H, with the normalized Hadamard matrix H on the channels
    normalization:   B = X H / (t c^T): token scales t and channel scales c, found by dividing in turn by the standard
                     deviations of the tokens and of the channels (Sinkhorn-like), in logarithms
    rounding:        asymmetric, to nearest; keys have the range of a channel in B, values that of a token

The scale along which ranges are taken (c of keys, t of values) is a factor of the range, so it changes no code and is
stored in it; the other one is stored next to it. Of all rounds, the one counts whose largest standard deviations
exceed the smallest ones by the least factors, tokens' and channels' added. No calibration.

Written from the abstract and from what the released code does, not from the equations. Deviations:

- Logarithms of scales lie in [-3, 8] relative to the tile's standard deviation, as if all values were as large; the
  released code limits them to [-0.3, 10] for values as they are, so that it leaves small ones as they are.
- Variances divide by the number of values; in the released code by one less.
- Token scales (channel scales of values) are stored relative to the smallest of the tile, in float16.
- Where head_dim is no power of two, H acts on blocks of channels, as many as the largest power of two that divides it.
- The released code has 4 bits for keys and 2 for values (`--setting k_bits=4 --setting v_bits=2`).
- The first 4 tokens stay in full precision (`sink_length`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvcli.kernels.launch import FP16_MAX, TINY
from kvcli.methods.base import Codes, KeyCodec, ValueCodec
from kvcli.methods.config import KVarNConfig
from kvcli.methods.kivi import kivi_schedules
from kvcli.methods.layer_codec import LayerCodec
from kvcli.methods.method import Method
from kvcli.methods.oscar import hadamard
from kvcli.methods.packing import pack_planes, planes_size, unpack_planes
from kvcli.methods.scalar.codec import dequantize, quantize
from kvcli.spec import ModelSpec

_LEAST_STD, _LARGEST_STD = 1e-3, 1e3
_LEAST_LOG, _LARGEST_LOG = -3.0, 8.0
_TOKENS, _CHANNELS = -2, -1


@dataclass(frozen=True)
class KVarNCodes(Codes):
    """Codes of tiles of g tokens and of all channels of a head; [a, b] are those of keys and of values.

    Attributes:
        packed: uint8 [batch, num_kv_heads, time, head_dim * bits / 8], by `pack_planes`.
        scale: float16 [batch, num_kv_heads, time / g, head_dim] of keys, [batch, num_kv_heads, time, 1] of values.
        zero: like scale.
        balance: float16 [batch, num_kv_heads, time, 1] of keys, [batch, num_kv_heads, time / g, head_dim] of values:
            what tokens (channels) of a tile are multiplied by, 1 or more.
    """

    packed: Tensor
    scale: Tensor
    zero: Tensor
    balance: Tensor


class _KVarN(KeyCodec[KVarNCodes, None], ValueCodec[KVarNCodes]):
    """x_hat = (code * scale + zero) * balance H^T.

    Attributes:
        range_axis: axis of a tile over which a range is taken: tokens for keys, channels for values.

    Buffers:
        rotation: float32 [block, block], H, with as many channels as the largest power of two that divides head_dim.

    ValueError: an odd head_dim.
    """

    calibrated_range = True  # a rotated value can be sqrt(head_dim) times as large as any channel

    def __init__(self, spec: ModelSpec, config: KVarNConfig, n_bits: int, range_axis: int) -> None:
        super().__init__()
        if spec.head_dim % 2:
            raise ValueError(f"KVarN's Hadamard matrix needs an even head_dim, not {spec.head_dim}")
        self.spec, self.n_bits, self.iterations = spec, n_bits, config.iterations
        self.tokens_per_group, self.range_axis = config.group_size, range_axis
        self.max_magnitude = FP16_MAX / 2 if n_bits == 1 else FP16_MAX
        self.rotation: Tensor = nn.Buffer(hadamard(spec.head_dim & -spec.head_dim).float())

    def bits_per_token(self) -> float:
        width, group = self.spec.head_dim, self.tokens_per_group
        ranges, scales = (width / group, 1) if self.range_axis == _TOKENS else (1, width / group)
        return self.spec.num_kv_heads * (8 * planes_size(width, self.n_bits) + 32 * ranges + 16 * scales)

    def peak(self, x: Tensor, codes: KVarNCodes) -> Tensor:
        return super().peak(self._rotated(x), codes)

    def encode(self, x: Tensor, state: None = None) -> KVarNCodes:
        tiles = self._rotated(x).unflatten(2, (-1, self.tokens_per_group))
        scales = normalizing_scales(tiles, self.iterations)
        balance = scales[0 if self.range_axis == _TOKENS else 1]
        balance = (balance / balance.amin((-2, -1), keepdim=True)).half()
        fields = quantize((tiles / balance.float()).transpose(self.range_axis, -1), self.n_bits)
        codes, scale, zero = (field.transpose(self.range_axis, -1).flatten(2, 3) for field in fields)
        return KVarNCodes(pack_planes(codes, self.n_bits), scale, zero, balance.flatten(2, 3))

    def decode(self, codes: KVarNCodes, state: None = None) -> Tensor:
        unpacked = unpack_planes(codes.packed, self.n_bits, self.spec.head_dim)
        fields = (unpacked, codes.scale, codes.zero, codes.balance)
        tiles = codes.num_tokens // self.tokens_per_group
        index, scale, zero, balance = (field.unflatten(2, (tiles, -1)) for field in fields)
        # H is symmetric, so it is its own inverse
        return self._rotated((dequantize(index, scale, zero) * balance.float()).flatten(2, 3))

    def _rotated(self, x: Tensor) -> Tensor:
        """x H, float32 of the shape of x."""
        return (x.float().unflatten(-1, (-1, len(self.rotation))) @ self.rotation).flatten(-2)


def normalizing_scales(tiles: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """Scales of tokens [..., tokens, 1] and of channels [..., 1, channels] that give tiles unit variance along both.

    Tiles are float32 [..., tokens, channels]. After no round, the scales are 1. They are those of the round with the
    least `imbalance`, in units of the tile's standard deviation.
    """
    unit = tiles / tiles.std((-2, -1), correction=0, keepdim=True).clamp_min(TINY)
    logs = [unit.new_zeros(*unit.shape[:-1], 1), unit.new_zeros(*unit.shape[:-2], 1, unit.shape[-1])]
    best, least = [x.exp() for x in logs], imbalance(unit)
    for _ in range(iterations):
        for place, along in enumerate((_CHANNELS, _TOKENS)):
            current = unit / (logs[0] + logs[1]).exp()
            std = current.std(along, correction=0, keepdim=True).clamp(_LEAST_STD, _LARGEST_STD)
            logs[place] = (logs[place] + std.log()).clamp(_LEAST_LOG, _LARGEST_LOG)
        found = imbalance(unit / (logs[0] + logs[1]).exp())
        best = [torch.where(found <= least, x.exp(), y) for x, y in zip(logs, best, strict=True)]
        least = torch.minimum(found, least)
    return best[0], best[1]


def imbalance(tiles: Tensor) -> Tensor:
    """Largest over smallest standard deviation, of the tokens plus of the channels: [..., tokens, channels] to 1s."""
    stds = (tiles.std(along, correction=0, keepdim=True) for along in (_CHANNELS, _TOKENS))
    ratios = [x.amax((-2, -1), keepdim=True) / x.amin((-2, -1), keepdim=True).clamp_min(1e-8) for x in stds]
    return ratios[0] + ratios[1]


METHOD = Method(
    name="kvarn",
    summary="rotated and normalized along tokens and channels; keys per channel, values per token",
    bits="1, 2, 4, 8",
    paper="KVarN, 2026",
    arxiv="2606.03458",
    config_cls=KVarNConfig,
    build=lambda spec, config, layer_idx: LayerCodec(
        _KVarN(spec, config, config.k_bits, _TOKENS), _KVarN(spec, config, config.v_bits, _CHANNELS)
    ),
    paper_settings={f"kvarn-{bits}": {"sink_length": 0, "residual_length": 128} for bits in (4, 2)},
    schedules=lambda config: (kivi_schedules(config)[0],) * 2,  # a tile is encoded when it is full, also of values
    example_settings={"residual_length": 8, "group_size": 4},
)
