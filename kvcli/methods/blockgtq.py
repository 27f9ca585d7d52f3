"""Block-GTQ: TurboQuant's keys with more bits for the RoPE pairs that carry more energy.

Liang, Zhang, Jia, "RoPE-Aware Bit Allocation for KV-Cache Quantization", 2026, https://arxiv.org/abs/2606.24033

RoPE turns each pair of channels by its own angle, so a score is a sum over pairs (section 2) and the error of each pair
counts on its own. Section 3 allots bits to the L = head_dim / 2 pairs of each kv head:

    score of a pair:   s_i = (E|q_i|^2 + E|k_i|^2) / 2, over all query heads that read the kv head
    error law:         minimize sum_i s_i 4^-b_i with sum_i b_i = L * k_bits, b_i integers of 1 to 8
    greedy:            from the least width on, the next bit goes to the pair with the largest s_i 4^-b_i

Pairs of equal width are one vector, coded by TurboQuant's Algorithm 1: norm, random rotation, Lloyd-Max levels of its
dimension. What is decoded is stretched to the norm of the vector, as in the released code. Values have TurboQuant's
codes of `v_bits`.

Written from the abstract and from what the released code does, not from the equations. Deviations:

- A head has at most `rate_groups` bit widths, neighbouring ones, so that a token has a fixed number of norms: which
  ones, the error law chooses. `rate_groups=8` does not limit it, as in the released code, for 8 norms per token.
- Decoded values are a little short, as in TurboQuant's Algorithm 1; the released code stretches them, too.
- The released code packs widths of 5 to 8 bits as bytes. Here all codes of a head are one stream of bits.
- Levels are optimal for the exact density of a group's dimension, not for the normal one that it approaches.
- Channels that RoPE does not rotate are paired and get bits like the others; the released code can code them apart.
- Keys are coded less the bias of their projection (`key_offset`), and so is their energy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvcli.errors import ConfigError
from kvcli.kernels.launch import FP16_MAX, TINY, norm_unit
from kvcli.methods.base import Codes, KeyCodec
from kvcli.methods.config import BlockGTQConfig
from kvcli.methods.layer_codec import LayerCodec
from kvcli.methods.method import FitReport, Method
from kvcli.methods.oscar import relative_error, rotated_keys, rotated_tokens, without_bias
from kvcli.methods.packing import pack_bits, packed_size, unpack_bits
from kvcli.methods.samples import LayerSamples
from kvcli.methods.turboquant import TurboQuant, lloyd_max, random_rotation
from kvcli.rope import to_pairs
from kvcli.spec import ModelSpec

_MAX_WIDTH = 8
_ERROR_TOKENS = 8192


@dataclass(frozen=True)
class BlockGTQCodes(Codes):
    """Coordinates of rotated unit vectors, one vector per bit width, and their norms.

    Attributes:
        packed: uint8 [batch, num_kv_heads, time, ceil(head_dim * k_bits / 8)], the indices of the centroids of a head's
            coordinates one after the other, each as wide as it is, in a little-endian stream of bits.
        norm: float16 [batch, num_kv_heads, time, rate_groups], the L2 norm of the channels of each width over that of
            their centroids, divided by `2 * norm_unit(head_dim)`, the least width first; 0 where a head has fewer.
    """

    packed: Tensor
    norm: Tensor


class BlockGTQKey(KeyCodec[BlockGTQCodes, None]):
    """x_hat = Q^T (|x_g| / |c_g[idx]| * c_g[idx]): Q rotates the channels of each width g, x_g, among themselves.

    Buffers:
        rotation: float32 [num_kv_heads, head_dim, head_dim], Q; its rows are coordinates, ordered by width.
        widths: int32 [num_kv_heads, head_dim], bits of each coordinate, ascending; head_dim * k_bits in all.
        centroids: float32 [num_kv_heads, rate_groups, 2^8], ascending; the last one is repeated.

    ValueError: an odd head_dim.
    """

    def __init__(self, spec: ModelSpec, n_bits: int, rate_groups: int, seed: int) -> None:
        super().__init__()
        heads, width = spec.num_kv_heads, spec.head_dim
        if width % 2:
            raise ValueError(f"Block-GTQ allots bits to pairs of channels, and a head_dim of {width} is odd")
        self.spec, self.n_bits, self.rate_groups, self.seed = spec, n_bits, rate_groups, seed
        self.unit = 2 * norm_unit(width)  # centroids can be a little shorter than 1
        self.rotation: Tensor = nn.Buffer(torch.zeros(heads, width, width))
        self.widths: Tensor = nn.Buffer(torch.full((heads, width), n_bits, dtype=torch.int32))
        self.centroids: Tensor = nn.Buffer(torch.zeros(heads, rate_groups, 2**_MAX_WIDTH))

    def bits_per_token(self) -> float:
        return float(
            self.spec.num_kv_heads * (8 * packed_size(self.spec.head_dim, self.n_bits) + 16 * self.rate_groups)
        )

    def set_widths(self, head: int, widths: Sequence[int], generator: torch.Generator) -> None:
        """Sets a head's tables to those of bit widths of its pairs [head_dim / 2], in the order of `to_pairs`."""
        pairs = to_pairs(torch.arange(self.spec.head_dim), self.spec.rope.rotary_dim)
        start = 0
        for matrix in (self.rotation, self.centroids):
            matrix[head].zero_()
        for n_bits in sorted(set(widths)):
            channels = pairs[torch.tensor(widths) == n_bits].flatten().to(self.rotation.device)
            rows = slice(start, start + len(channels))
            self.rotation[head, rows, channels] = random_rotation(len(channels), generator).to(self.rotation)
            self.widths[head, rows] = n_bits
            levels = torch.tensor(lloyd_max(len(channels), n_bits))
            table = self.centroids[head, n_bits - min(widths)]
            table[:] = levels[-1]
            table[: len(levels)] = levels
            start = rows.stop

    def encode(self, x: Tensor, state: None = None) -> BlockGTQCodes:
        rotated = x.float() / self.unit @ self.rotation.mT
        member = self._member()
        norm = (rotated.square() @ member).sqrt()
        index = self._nearest(rotated / (norm @ member.mT).clamp_min(TINY))
        norm = norm / (self._direction(index).square() @ member).sqrt().clamp_min(TINY)
        channel, place = self._stream()
        bits = index.gather(-1, channel.expand(*index.shape[:2], index.shape[2], -1)) >> place & 1
        return BlockGTQCodes(pack_bits(bits, 1), norm.clamp(max=FP16_MAX).half())

    def decode(self, codes: BlockGTQCodes, state: None = None) -> Tensor:
        channel, place = self._stream()
        bits = unpack_bits(codes.packed, 1, place.shape[-1]) << place
        index = bits.new_zeros(*bits.shape[:3], self.spec.head_dim)
        index.scatter_add_(-1, channel.expand_as(bits), bits)
        rotated = self._direction(index) * (codes.norm.float() @ self._member().mT)
        return rotated @ self.rotation * self.unit

    def _group(self) -> Tensor:
        """Which of the head's norms and rows of centroids each coordinate has, int64 [num_kv_heads, head_dim]."""
        return (self.widths - self.widths.amin(-1, keepdim=True)).long()

    def _member(self) -> Tensor:
        """1 where a coordinate is in a group, else 0: float32 [num_kv_heads, head_dim, rate_groups]."""
        groups = torch.arange(self.rate_groups, device=self.widths.device)
        return (self._group().unsqueeze(-1) == groups).float()

    def _direction(self, index: Tensor) -> Tensor:
        """The centroids of indices [batch, num_kv_heads, time, head_dim], float32 of that shape."""
        head = torch.arange(self.spec.num_kv_heads, device=index.device)[:, None, None]
        return self.centroids[head, self._group()[:, None], index]

    def _nearest(self, x: Tensor) -> Tensor:
        """Index of the centroid nearest to each coordinate, int32 of the shape of x."""
        borders = (self.centroids[..., 1:] + self.centroids[..., :-1]) / 2
        borders = borders.gather(1, self._group().unsqueeze(-1).expand(-1, -1, borders.shape[-1]))
        values = x.permute(1, 3, 0, 2).contiguous()
        index = torch.searchsorted(borders, values.flatten(2), out_int32=True).view(values.shape).permute(2, 0, 3, 1)
        return torch.minimum(index, (2**self.widths - 1).unsqueeze(1))

    def _stream(self) -> tuple[Tensor, Tensor]:
        """The coordinate of each bit of the stream, int64, and its place there, int32 [num_kv_heads, 1, bits]."""
        ends = self.widths.cumsum(-1)
        bit = torch.arange(self.spec.head_dim * self.n_bits, device=ends.device).expand(len(ends), -1).contiguous()
        channel = torch.searchsorted(ends, bit, right=True)
        return channel.unsqueeze(1), (bit - (ends - self.widths).gather(-1, channel)).int().unsqueeze(1)


def allot_bits(scores: Sequence[float], budget: int, least: int, most: int) -> list[int]:
    """Widths b_i of `least` to `most` with sum b_i = budget and the least sum_i s_i 4^-b_i, bit by bit.

    The gain of a pair's next bit, 3/4 s_i 4^-b_i, falls with every bit, so the greedy choice is optimal.
    """
    widths = [least] * len(scores)
    for _ in range(budget - least * len(scores)):
        open_pairs = (i for i, width in enumerate(widths) if width < most)
        widths[max(open_pairs, key=lambda i: (scores[i] * 4.0 ** -widths[i], -widths[i]))] += 1
    return widths


def allot_neighbouring(scores: Sequence[float], n_bits: int, rate_groups: int) -> list[int]:
    """`allot_bits` of `n_bits` on average, with the best `rate_groups` neighbouring widths of 1 to 8."""
    first = range(max(1, n_bits - rate_groups + 1), min(n_bits, _MAX_WIDTH - rate_groups + 1) + 1)
    budget = len(scores) * n_bits
    choices = [allot_bits(scores, budget, least, least + rate_groups - 1) for least in first]
    return min(choices, key=lambda widths: sum(s * 4.0**-b for s, b in zip(scores, widths, strict=True)))


def pair_energy(x: Tensor, rotary_dim: int) -> Tensor:
    """Mean of |x_i|^2 over the tokens for each pair of channels: [heads, tokens, head_dim] to [heads, head_dim / 2]."""
    return to_pairs(x.float(), rotary_dim).square().sum(-1).mean(1)


def _fit(
    codec: LayerCodec[BlockGTQKey, TurboQuant],
    train: LayerSamples,
    heldout: LayerSamples,
    config: BlockGTQConfig,
    generator: torch.Generator,
) -> FitReport:
    """Allots the bits of each kv head from the energies of its queries and keys, in place.

    Returns:
        `key_error`: of each head, sum |Q (k_hat - k)|^2 / sum |Q k|^2 on held-out keys with the recorded queries Q.
        `value_error`: of each head, sum |v_hat - v|^2 / sum |v|^2 on held-out values.
        `most_bits`: of each head, the width of its best pairs.

    ConfigError: a recording without queries.
    """
    key, spec = codec.key, codec.key.spec
    if train.query_rotation is None or not train.q.shape[1]:
        raise ConfigError("energies come from recorded queries; calibrate with --query-tokens above 0")
    rotary_dim = spec.rope.rotary_dim
    of_queries = pair_energy(train.q, rotary_dim).unflatten(0, (spec.num_kv_heads, -1)).mean(1)
    of_keys = without_bias(train, config).keys.mean(lambda block: pair_energy(block, rotary_dim))
    # the codec's own generator, on the CPU: rotations are the same wherever a layer is fitted
    rotations = torch.Generator().manual_seed(key.seed)
    for head, scores in enumerate(((of_queries + of_keys) / 2).tolist()):
        key.set_widths(head, allot_neighbouring(scores, config.k_bits, config.rate_groups), rotations)
    queries = train.rotated_queries().float().unflatten(0, (spec.num_kv_heads, -1))
    keys = rotated_keys(without_bias(heldout, config), rotated_tokens(heldout)[:_ERROR_TOKENS])
    values = heldout.values.first(_ERROR_TOKENS)
    weight = torch.einsum("hgtc,hgtd->hcd", queries, queries)
    unweighted = torch.eye(codec.value.spec.head_dim, device=values.device).expand(len(values), -1, -1)
    key_error, value_error = relative_error(key, keys, weight), relative_error(codec.value, values, unweighted)
    return FitReport({"key_error": key_error, "value_error": value_error, "most_bits": key.widths.amax(-1).tolist()})


def _build(spec: ModelSpec, config: BlockGTQConfig, layer_idx: int) -> LayerCodec[BlockGTQKey, TurboQuant]:
    seed = config.rotation_seed * 100_003 + layer_idx
    value = TurboQuant(spec, config.v_bits, False, torch.Generator().manual_seed(seed))
    return LayerCodec(BlockGTQKey(spec, config.k_bits, config.rate_groups, seed), value)


METHOD = Method(
    name="blockgtq",
    summary="TurboQuant with key bits allotted to RoPE pairs by their energy, values uniform",
    bits="2, 3, 4",
    paper="Block-GTQ, 2026",
    arxiv="2606.24033",
    config_cls=BlockGTQConfig,
    build=_build,
    paper_settings={f"blockgtq-{bits}": {"sink_length": 0, "residual_length": 0} for bits in (3, 2)},
    fit=_fit,
    fit_metrics={
        "key_error": "held-out key error in scores",
        "value_error": "held-out value error",
        "most_bits": "bits of the best pairs",
    },
    example_settings={"residual_length": 6, "flush_block": 1},
)
