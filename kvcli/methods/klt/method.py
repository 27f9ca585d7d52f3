"""KLT: transform coding of keys and values, each head in the axes and with the bits that cost least.

Ours, from known parts: bits follow variances as in Huang and Schultheiss, "Block quantization of correlated Gaussian
random variables", 1963; bits for RoPE pairs of unequal energy are Block-GTQ's (arXiv 2606.24033), a transform of the
cache with bits per component KVTC's (arXiv 2511.01815), whose codes are decoded as a whole before attention.

What is coded: keys less their mean, rotated by their position within a tile of 256, so that slow RoPE pairs stay
correlated at any length of the context and the transform of a query is one per tile; values less their mean. Each head
has a transform of its own (`transform`), 8 bands of transformed channels, and 1 to 4 bits per value, in fields of 0
to 8 bits (`fields.py`). A token's codes depend on nothing but the token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import fmean

import torch
from torch import Tensor

from kvcli.errors import ConfigError
from kvcli.methods.config import KLTConfig
from kvcli.methods.klt.codec import KLTKey, KLTValue
from kvcli.methods.klt.fields import BANDS, MOST_BYTES, SCALAR, TRELLIS, Code, Fields, share
from kvcli.methods.layer_codec import LayerCodec
from kvcli.methods.method import FitReport, Method
from kvcli.methods.oscar import hadamard, relative_error
from kvcli.methods.samples import LayerFisher, LayerSamples, TokenBlocks
from kvcli.rope import OFFSET_BLOCK, ROPE_TILE, Rotation
from kvcli.spec import ModelSpec

# chosen by KL divergence: SmolLM2-135M, notes/quality_log.md
_KEY_POWER, _VALUE_POWER = 0.75, 0.5
_KEY_EVENNESS, _VALUE_EVENNESS = 0.8, 0.75
_MOVED_BITS = 0.25
"""Bits per number that values have more than the average, and keys less, where heads can have fewer and more."""
_VALUE_SHRINKAGE = 0.05
_ERROR_TOKENS = 8192
_FLOOR = 1e-4
"""Least eigenvalue of a metric, as a share of their mean."""

KLTLayer = LayerCodec[KLTKey, KLTValue]


@dataclass(frozen=True)
class Transform:
    """x = B z for vectors x of each head; components z are uncorrelated between bands, largest cost first.

    Attributes:
        basis: float64 [heads, head_dim, head_dim], B; components z have unit variance.
        costs: float64 [heads, BANDS], the sum over a band of what its errors cost if it is not coded.
        level: float64 [heads, 1], the geometric mean of a component's cost.
    """

    basis: Tensor
    costs: Tensor
    level: Tensor


def transform(fisher: Tensor, covariance: Tensor, power: float, *, cost_of_fisher: bool) -> Transform:
    """The transform of vectors with a Fisher information and covariance, both [heads, head_dim, head_dim].

    In coordinates in which an error costs the same along every axis, the principal axes of a Gaussian vector are
    optimal for scalar codes (the Karhunen-Loeve transform; Goyal, "Theoretical foundations of transform coding", 2001).
    Fisher information tells the cost of small errors that are independent from token to token. Those of coarse codes
    are neither, so the metric is a power of it between 0 and 1, chosen by KL divergence (notes/quality_log.md).

    Args:
        power: of the Fisher information that is the metric in which axes are principal.
        cost_of_fisher: whether errors along the axes cost what the Fisher information says, or the metric.
    """
    fisher, covariance = fisher.double(), covariance.double()
    mean = fisher.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None].clamp_min(1e-30)
    metric = _power(fisher / mean, power) * mean
    root, inverse_root = _power(metric, 0.5), _power(metric, -0.5)
    variances, axes = torch.linalg.eigh(root @ covariance @ root)
    basis = inverse_root @ axes
    cost = (basis.mT @ fisher @ basis).diagonal(dim1=-2, dim2=-1) if cost_of_fisher else torch.ones_like(variances)
    cost, variances = cost.clamp_min(1e-30), variances.clamp_min(1e-30)
    order = (cost * variances).argsort(-1, descending=True)
    basis = (basis / cost.sqrt().unsqueeze(-2)).gather(-1, order.unsqueeze(-2).expand_as(basis))
    sizes = (cost * variances).gather(-1, order)
    # inside a band all components are of one size, so that one field suits all of them
    width = basis.shape[-1] // BANDS
    part = hadamard(width & -width).to(basis)
    mixing = torch.block_diag(*[part] * (basis.shape[-1] // len(part)))
    mixed = (mixing.square() @ sizes.unsqueeze(-1)).squeeze(-1)
    costs = mixed.unflatten(-1, (BANDS, width)).sum(-1)
    return Transform(basis @ mixing.mT * mixed.sqrt().unsqueeze(-2), costs, sizes.log().mean(-1, keepdim=True).exp())


def in_tiles(matrix: Tensor, rotation: Rotation) -> Tensor:
    """The mean of R_t M R_t^T over the positions t of a tile, of matrices M [heads, head_dim, head_dim], float64.

    `rotation` is that of the positions from 0 on, [1, 1, positions, pairs], ROPE_TILE of them.
    """
    turn = Rotation(rotation.cos[0, 0, :, None, None].double(), rotation.sin[0, 0, :, None, None].double())
    rows = turn.apply(matrix.double().mT.expand(ROPE_TILE, *matrix.shape)).mT
    return turn.apply(rows).mean(0)


def tile_rotation(angles: Tensor) -> Rotation:
    """The rotation of a tile's positions, [1, 1, ROPE_TILE, pairs], from radians per position [pairs]."""
    angle = torch.arange(ROPE_TILE, device=angles.device).unsqueeze(1) * angles.double()
    return Rotation(angle.cos()[None, None], angle.sin()[None, None])


def _power(matrix: Tensor, power: float) -> Tensor:
    """A power of symmetric matrices [..., d, d] with positive eigenvalues, at least _FLOOR of their mean."""
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    values = values.maximum(_FLOOR * values.mean(-1, keepdim=True)).clamp_min(1e-30)
    return (vectors * (values**power).unsqueeze(-2)) @ vectors.mT


def allocate(
    spec: ModelSpec, config: KLTConfig, fisher: Sequence[LayerFisher] | None, code: Code = SCALAR
) -> KLTConfig:
    """The settings with the fields of each layer's heads, keys and values with `bits` per value on average.

    Costs of a head are raised to a power below 1 of their level, because Fisher information overrates how much heads
    differ. Without it, all heads count alike and bands halve from one to the next.
    """
    if config.key_fields:
        return config
    groups = spec.num_kv_heads // config.head_groups, config.head_groups
    if fisher is None:
        shares = [_shares_without_fisher(code, spec.num_layers * spec.num_kv_heads, config.bits, *groups)] * 2
    else:
        rotary_dim = spec.rope.rotary_dim
        angles = spec.rope.theta ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
        tiles = [tile_rotation(angles * (index not in spec.unrotated)) for index in range(spec.num_layers)]
        keys = _weighted([_key_transform(x, tile) for x, tile in zip(fisher, tiles, strict=True)], _KEY_EVENNESS)
        values = _weighted([_value_transform(x.value_unweighted, x.value_covariance) for x in fisher], _VALUE_EVENNESS)
        # a bit of wider values is more in the average
        most = 0.0 if spec.value_dim != spec.head_dim else min(_MOVED_BITS, config.bits - 1, MOST_BYTES - config.bits)
        moved = int(most * len(keys)) / len(keys)
        shares = [share(code, x, config.bits + more, *groups) for x, more in ((keys, -moved), (values, moved))]
    heads = spec.num_kv_heads
    fields = [tuple(tuple(x[first : first + heads]) for first in range(0, len(x), heads)) for x in shares]
    return config.model_copy(update={"key_fields": fields[0], "value_fields": fields[1]})


@cache
def _shares_without_fisher(code: Code, count: int, bits: float, heads: int, groups: int) -> list[Fields]:
    return share(code, [0.5 ** torch.arange(BANDS, dtype=torch.float64, device="cpu")] * count, bits, heads, groups)


def _weighted(transforms: Sequence[Transform], evenness: float) -> list[Tensor]:
    return [costs for x in transforms for costs in x.costs.cpu() * x.level.cpu() ** (evenness - 1)]


def _key_transform(fisher: LayerFisher, tile: Rotation, covariance: Tensor | None = None) -> Transform:
    """`covariance` is that of keys in tiles; by default that of the keys' deviations from their mean."""
    covariance = in_tiles(fisher.key_covariance, tile) if covariance is None else covariance
    return transform(in_tiles(fisher.key_unweighted, tile), covariance, _KEY_POWER, cost_of_fisher=True)


def _value_transform(fisher: Tensor, covariance: Tensor) -> Transform:
    size = covariance.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    even = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    return transform(fisher, covariance + _VALUE_SHRINKAGE * size * even, _VALUE_POWER, cost_of_fisher=False)


def _fit(
    codec: KLTLayer, train: LayerSamples, heldout: LayerSamples, config: KLTConfig, generator: torch.Generator
) -> FitReport:
    """Computes offset, means and bases in place.

    Returns:
        `key_bits`, `value_bits`: of each head, of the codes per value.
        `key_error`, `value_error`: of each head, the squared error of held-out samples in terms of what it costs, as a
            share of what the samples less their mean would cost.

    ConfigError: a recording without queries.
    """
    if train.query_rotation is None or train.q.shape[1] < 2:
        raise ConfigError("the angles of RoPE come from recorded queries; calibrate with --query-tokens above 0")
    spec, fisher = codec.key.spec, train.fisher
    angles = torch.atan2(train.query_rotation.sin[0, 0, 1], train.query_rotation.cos[0, 0, 1])
    tile = tile_rotation(angles)
    means, covariances = zip(*(_moments(x) for x in (train.keys, train.values)), strict=True)
    if fisher is None:
        queries = train.q.float().unflatten(0, (spec.num_kv_heads, -1))
        even = torch.eye(spec.value_dim, device=queries.device).expand(spec.num_kv_heads, -1, -1)
        scores = torch.einsum("hgtc,hgtd->hcd", queries, queries)
        fisher = LayerFisher(scores, scores, covariances[0], even, even, covariances[1])
    rotated = tile.at_each_position(means[0][None, :, None])  # the mean key at each position of a tile
    codec.key_offset = rotated[0, :, :OFFSET_BLOCK].mean(1).float()
    blocks = Rotation(tile.cos[:, :, ::OFFSET_BLOCK], tile.sin[:, :, ::OFFSET_BLOCK])
    offsets = blocks.at_each_position(codec.key_offset[None, :, None].double()).repeat_interleave(OFFSET_BLOCK, 2)[0]
    rest = rotated[0] - offsets
    codec.key.set_basis(_key_transform(fisher, tile, in_tiles(covariances[0], tile) + rest.mT @ rest / ROPE_TILE).basis)
    codec.value.set_basis(_value_transform(fisher.value_unweighted, covariances[1]).basis)
    keys = heldout.keys.first(_ERROR_TOKENS).float()
    place = heldout.positions[: keys.shape[1]] % ROPE_TILE
    at = Rotation(tile.cos[:, :, place].float(), tile.sin[:, :, place].float())
    keys = at.apply(keys.unsqueeze(0))[0] - offsets[:, place].float()
    values = heldout.values.first(_ERROR_TOKENS).float() - means[1].float().unsqueeze(1)
    metrics = {
        "key_bits": [sum(fields) / BANDS for fields in codec.key.fields],
        "value_bits": [sum(fields) / BANDS for fields in codec.value.fields],
        "key_error": relative_error(codec.key, keys, in_tiles(fisher.key_unweighted, tile).float()),
        "value_error": relative_error(codec.value, values, fisher.value_unweighted),
    }
    codec.value.mean.copy_(means[1])  # the error is that of values less their mean, as that of keys
    return FitReport(metrics)


def _moments(samples: TokenBlocks) -> tuple[Tensor, Tensor]:
    """Mean and covariance of all tokens, float64 [heads, head_dim] and [heads, head_dim, head_dim]."""
    mean = samples.mean(lambda block: block.double().mean(1))
    squares = samples.mean(lambda block: block.double().mT @ block.double() / block.shape[1])
    return mean, squares - mean.unsqueeze(-1) * mean.unsqueeze(-2)


def _method(name: str, summary: str, code: Code) -> Method:
    def build(spec: ModelSpec, config: KLTConfig, layer_idx: int) -> KLTLayer:
        resolved = allocate(spec, config.resolve(spec), None, code)
        fields = resolved.key_fields[layer_idx], resolved.value_fields[layer_idx]
        offset = torch.zeros(spec.num_kv_heads, spec.head_dim)
        return LayerCodec(KLTKey(spec, fields[0], code), KLTValue(spec, fields[1], code), offset)

    def nominal_bits(spec: ModelSpec, config: KLTConfig) -> tuple[float, float]:
        resolved = allocate(spec, config, None, code)
        both = resolved.key_fields, resolved.value_fields
        key_bits, value_bits = (fmean(sum(fields) / BANDS for layer in x for fields in layer) for x in both)
        return key_bits, value_bits

    return Method(
        name=name,
        summary=summary,
        bits="1 to 4, also fractions",
        config_cls=KLTConfig,
        build=build,
        nominal_bits=nominal_bits,
        fit=_fit,
        allocate=partial(allocate, code=code),
        fit_metrics={
            "key_bits": "bits per value of key codes",
            "value_bits": "bits per value of value codes",
            "key_error": "held-out key error in terms of its cost",
            "value_error": "held-out value error in terms of its cost",
        },
        attend_kernels="kvcli.methods.klt.attend_kernels",
        example_settings={"residual_length": 6, "flush_block": 1},
        bench=(f"{name}-2.25",),
    )


METHOD = _method("klt", "fitted transform per head, bits where errors cost most, a gain per token and head", SCALAR)
METHOD_TCQ = _method("klt-tcq", "klt with trellis-coded quantization: less loss, more time to read codes", TRELLIS)
