"""OSCAR: INT2 codes of keys and values in bases that follow what attention does with them.

Zhou et al., "OSCAR: Offline Spectral Covariance-Aware Rotation for 2-bit KV Cache Quantization", 2026,
https://arxiv.org/abs/2605.17757

Keys are coded after RoPE as k R_K, values as v R_V, with R = U H P: U holds eigenvectors of a covariance, the largest
eigenvalue first; H is the normalized Hadamard matrix, after which all channels matter equally; P orders channels by the
reversed bits of their index, so that groups of channels matter equally. The covariances:

    keys:    Q^T Q over the queries after RoPE of a kv head's query heads, because an error e of a key costs |Q e|^2
    values:  V^T S^T S V with the attention weights S, the covariance of the attention outputs

Then clipping at a quantile of each token's magnitudes, and asymmetric uniform quantization of the token in groups.

Deviations, from the paper and its released code:

- The share of a token's channels that is not clipped is chosen per kv head, on calibration data, for the least error
  in the metric of the covariance. The released code has 0.96 and 0.92 for all heads of 128 (`k_clip`, `v_clip`).
- One rotation per kv head, as later releases of the code have it; `rotation_scope=layer` averages the covariances of a
  layer's heads to one rotation, as in the paper.
- The attention weights are computed from the recorded queries and keys; the released code replaces them by weights
  k (Q^T Q) k^T per token. Tokens that the cache keeps as sinks are not among the recorded ones, so S is normalized
  over the others.
- Scales and zeros are float16 (released code: float32), and the inverse rotation is applied to what is decoded (paper:
  to queries, and to the output projection).
- A head narrower than `group_size` is one group.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from kvcli.errors import ConfigError
from kvcli.kernels.launch import FP16_MAX, TINY
from kvcli.methods.base import Codec, KeyCodec, ValueCodec
from kvcli.methods.config import BiasOffsetConfig, OSCARConfig, ScalarBits
from kvcli.methods.layer_codec import LayerCodec
from kvcli.methods.method import FitReport, Method
from kvcli.methods.samples import LayerSamples
from kvcli.methods.scalar.codec import PerTokenCodec, ScalarCodes
from kvcli.rope import Rotation
from kvcli.spec import ModelSpec

_QUERY_BLOCK = 512
_ERROR_TOKENS = 8192
_CLIP_TOKENS = 2048
_CLIP_SHARES = (1.0, 0.98, 0.96, 0.94, 0.92, 0.9, 0.87, 0.84, 0.8)


class OSCAR(PerTokenCodec, KeyCodec[ScalarCodes, None], ValueCodec[ScalarCodes]):
    """Quantizes clip(x R, t) per token in groups of channels, t the `kept`-th smallest of the group's magnitudes.

    Buffers:
        rotation: float32 [num_kv_heads, head_dim, head_dim], R; its columns are the rotated channels.
        kept: int32 [num_kv_heads], channels of a group that are not clipped, the one at the threshold included.

    Raises:
        ValueError: a head_dim that is no power of two, or that `group_size` does not divide.
    """

    calibrated_range = True  # a rotated value can be sqrt(head_dim) times as large as any channel

    def __init__(self, spec: ModelSpec, n_bits: ScalarBits, group_size: int, clip: float) -> None:
        super().__init__(spec, n_bits, group_size)
        if spec.head_dim & (spec.head_dim - 1):
            raise ValueError(f"OSCAR's Hadamard matrix needs a head_dim that is a power of two, not {spec.head_dim}")
        self.rotation: Tensor = nn.Buffer(torch.zeros(spec.num_kv_heads, spec.head_dim, spec.head_dim))
        self.kept: Tensor = nn.Buffer(torch.full((spec.num_kv_heads,), self.count_kept(clip or 1.0), dtype=torch.int32))

    def count_kept(self, share: float) -> int:
        """Channels of a group that are not clipped."""
        return max(1, math.ceil(share * self.group_size))

    def peak(self, x: Tensor, codes: ScalarCodes) -> Tensor:
        return super().peak(x.float() @ self.rotation, codes)

    def encode(self, x: Tensor, state: None = None, peak: Tensor | None = None) -> ScalarCodes:
        return super().encode(self._clipped(x), state, peak)

    def encode_noted(self, x: Tensor, peak: Tensor) -> ScalarCodes:
        return Codec.encode_noted(self, x, peak)

    def encode_into(self, x: Tensor, state: None, codes: ScalarCodes) -> None:
        super().encode_into(self._clipped(x) if self.fused else x, state, codes)

    def decode(self, codes: ScalarCodes, state: None = None) -> Tensor:
        return super().decode(codes) @ self.rotation.mT

    def decode_to(self, codes: ScalarCodes, state: None, dtype: torch.dtype) -> Tensor:
        rotated = super().decode_to(codes, state, torch.float32) if self.fused else super().decode(codes)
        decoded = rotated @ self.rotation.mT
        return (decoded.clamp(-FP16_MAX, FP16_MAX) if dtype == torch.float16 else decoded).to(dtype)

    def _clipped(self, x: Tensor) -> Tensor:
        """Rotated and clipped tokens, float32 [batch, num_kv_heads, time, head_dim]."""
        groups = (x.float() @ self.rotation).unflatten(-1, (-1, self.group_size))
        rank = (self.kept.long() - 1).view(-1, 1, 1, 1).expand(*groups.shape[:-1], 1)
        limit = groups.abs().sort(-1).values.gather(-1, rank)
        return groups.clamp(-limit, limit).flatten(-2)


def hadamard(width: int) -> Tensor:
    """The Hadamard matrix in Sylvester's order divided by sqrt(width): float64 [width, width], orthogonal."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < width:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / math.sqrt(width)


def bit_reversal(width: int) -> list[int]:
    """The numbers below `width`, a power of two, with their bits in reversed order."""
    bits = width.bit_length() - 1
    return [int(f"{index:0{bits}b}"[::-1], 2) if bits else 0 for index in range(width)]


def oscar_rotation(covariance: Tensor) -> Tensor:
    """R = U H P of symmetric matrices [..., width, width]: float32 of the same shape."""
    width = covariance.shape[-1]
    symmetric = (covariance + covariance.mT).double() / 2
    vectors = torch.linalg.eigh(symmetric)[1].flip(-1)
    return (vectors @ hadamard(width).to(vectors.device))[..., bit_reversal(width)].float()


def _fit(
    codec: LayerCodec[OSCAR, OSCAR],
    train: LayerSamples,
    heldout: LayerSamples,
    config: OSCARConfig,
    generator: torch.Generator,
) -> FitReport:
    """Computes the two covariances of each kv head and their rotations, in place.

    Returns:
        `key_error`: of each head, sum |Q (k_hat - k)|^2 / sum |Q k|^2 on held-out keys with the recorded queries Q.
        `value_error`: of each head, sum |v_hat - v|^2 / sum |v|^2 on held-out values.

    Raises:
        ConfigError: a recording without queries, or latents: queries of the shared key do not say what is attended to.
    """
    key, value = codec.key, codec.value
    if key.spec.latent:
        raise ConfigError("oscar is fitted to outputs of attention, which recordings of latents (MLA) do not give")
    if train.query_rotation is None or not train.q.shape[1]:
        raise ConfigError("the rotations come from recorded queries; calibrate with --query-tokens above 0")
    queries = train.rotated_queries().float().unflatten(0, (key.spec.num_kv_heads, -1))
    of_keys = torch.einsum("hgtc,hgtd->hcd", queries, queries)
    of_values = output_covariance(queries, train)
    for coder, covariance in ((key, of_keys), (value, of_values)):
        shared = covariance.mean(0, keepdim=True) if config.rotation_scope == "layer" else covariance
        coder.rotation.copy_(oscar_rotation(shared))
    if not config.k_clip:
        tokens = rotated_tokens(train)
        some = tokens[:: -(-len(tokens) // _CLIP_TOKENS)]
        fit_clipping(key, rotated_keys(without_bias(train, config), some), of_keys)
    if not config.v_clip:
        fit_clipping(
            value, train.values.at(torch.arange(0, train.num_tokens, -(-train.num_tokens // _CLIP_TOKENS))), of_values
        )
    keys = rotated_keys(without_bias(heldout, config), rotated_tokens(heldout)[:_ERROR_TOKENS])
    values = heldout.values.first(_ERROR_TOKENS)
    unweighted = torch.eye(values.shape[-1], device=keys.device).expand_as(of_values)
    return FitReport(
        {"key_error": relative_error(key, keys, of_keys), "value_error": relative_error(value, values, unweighted)}
    )


def without_bias(samples: LayerSamples, config: BiasOffsetConfig) -> LayerSamples:
    """Samples with the keys that are coded: less the projection's bias, unless the settings say otherwise."""
    if samples.key_bias is None or config.key_offset == "none":
        return samples
    bias = samples.key_bias.unsqueeze(1)
    keys = samples.keys.map(lambda block: block - bias.to(block.dtype))
    return LayerSamples(samples.q, keys, samples.values, samples.positions, samples.query_rotation, samples.key_bias)


def fit_clipping(codec: OSCAR, x: Tensor, weight: Tensor) -> None:
    """Sets `kept` of each head to that of `_CLIP_SHARES` with the least error of x [num_kv_heads, tokens, head_dim].

    The covariances `weight`, float32 [num_kv_heads, head_dim, head_dim], are the metric of errors.
    """
    counts = sorted({codec.count_kept(share) for share in _CLIP_SHARES})
    errors = []
    for count in counts:
        codec.kept.fill_(count)
        errors.append(relative_error(codec, x, weight))
    codec.kept.copy_(torch.tensor(counts)[torch.tensor(errors).argmin(0)])


def rotated_tokens(samples: LayerSamples) -> Tensor:
    """The tokens whose position is one of a recorded query, [count] indices on the CPU."""
    assert samples.query_rotation is not None
    # queries are those of the first sequences, so the first of them have the positions 0, 1, 2, ...
    return (samples.positions < samples.query_rotation.cos.shape[2]).nonzero()[:, 0].cpu()


def rotated_keys(samples: LayerSamples, tokens: Tensor) -> Tensor:
    """Keys of some of the tokens of `rotated_tokens` after RoPE, float32 [num_kv_heads, count, head_dim]."""
    rotation = samples.query_rotation
    assert rotation is not None
    positions = samples.positions[tokens.to(samples.positions.device)]
    at = Rotation(rotation.cos[:, :, positions], rotation.sin[:, :, positions])
    return at.apply(samples.keys.at(tokens).float().unsqueeze(0))[0]


def output_covariance(queries: Tensor, samples: LayerSamples) -> Tensor:
    """V^T S^T S V, float32 [num_kv_heads, head_dim, head_dim], over the tokens of `samples`, which may lack some.

    Queries are float32 [num_kv_heads, queries per kv head, query_tokens, head_dim] after RoPE, of the same sequences.
    """
    tokens = rotated_tokens(samples)
    positions = samples.positions[tokens.to(samples.positions.device)]
    seq_len = int(samples.positions.max()) + 1
    sequence = torch.cat((positions.new_zeros(1), (positions.diff() < 0).cumsum(0)))
    with_queries = sequence <= (queries.shape[2] - 1) // seq_len
    sequence, positions, tokens = sequence[with_queries], positions[with_queries], tokens[with_queries.cpu()]
    keys, values = rotated_keys(samples, tokens), samples.values.at(tokens).float()
    covariance = values.new_zeros(len(values), values.shape[-1], values.shape[-1])
    for start in range(0, queries.shape[2], _QUERY_BLOCK):
        block = queries[:, :, start : start + _QUERY_BLOCK]
        at = torch.arange(start, start + block.shape[2], device=block.device)
        near = ((sequence >= at[0] // seq_len) & (sequence <= at[-1] // seq_len)).nonzero()[:, 0]
        visible = (sequence[near] == at[:, None] // seq_len) & (positions[near] <= at[:, None] % seq_len)
        scores = block @ keys[:, None, near].mT / math.sqrt(block.shape[-1])
        # a query that sees no token has no output
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(0.0)
        output = (weights @ values[:, None, near]).flatten(1, 2)
        covariance += output.mT @ output
    return covariance


def relative_error(codec: Codec[Any, None], x: Tensor, weight: Tensor) -> list[float]:
    """sum e^T W e / sum x^T W x of each head with e = x_hat - x, for x [heads, tokens, head_dim]."""
    x = x[:, :_ERROR_TOKENS].float()
    error = codec.decode(codec.encode(x.unsqueeze(0), None), None)[0] - x
    lost, all_of_it = (torch.einsum("htc,hcd,htd->h", y, weight, y) for y in (error, x))
    return [float(part) for part in lost / all_of_it.clamp_min(TINY)]


METHOD = Method(
    name="oscar",
    summary="fitted rotations from query and output covariance, clipped, per token",
    bits="1, 2, 4, 8",
    paper="OSCAR, 2026",
    arxiv="2605.17757",
    config_cls=OSCARConfig,
    build=lambda spec, config, layer_idx: LayerCodec(
        OSCAR(spec, config.k_bits, config.group_size, config.k_clip),
        OSCAR(spec, config.v_bits, config.group_size, config.v_clip),
    ),
    paper_settings={"oscar-2": {"sink_length": 64, "residual_length": 256, "rotation_scope": "layer"}},
    attend_kernels="kvcli.methods.token_attend_kernels",
    fit=_fit,
    fit_metrics={"key_error": "held-out key error in scores", "value_error": "held-out value error"},
    example_settings={"residual_length": 6, "flush_block": 1, "group_size": 8},
)
