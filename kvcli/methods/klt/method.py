"""KLT: transform coding of keys and values, in the axes and with the bits that cost least.

Ours, from known parts: bits follow variances as in Huang and Schultheiss, "Block quantization of correlated Gaussian
random variables", 1963; bits for RoPE pairs of unequal energy are Block-GTQ's (arXiv 2606.24033), a transform of the
cache with bits per component KVTC's (arXiv 2511.01815), whose codes are decoded as a whole before attention.

What is coded: keys less their mean, rotated by their position within a tile of 256, so that slow RoPE pairs stay
correlated at any length of the context and the transform of a query is one per tile; values less their mean. A few
consecutive heads share a transform (`transform`), because heads of a layer are correlated; each has 8 bands of
transformed channels, and 1 to 4 bits per value, in fields of 0 to 8 bits (`fields.py`). A token's codes depend on
nothing but the token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
_FISHER_SHRINKAGE, _VALUE_SHRINKAGE = 0.1, 0.05
"""How much of them, which come from few tokens, is taken to be the same in all directions; the latter's covariance."""
_FLOOR = 1e-4
"""Share of a group's mean Fisher information that all of its directions have at least."""
_ERROR_TOKENS = 8192
_MOST_ROWS, _MOST_CHANNELS = 16, 256
"""Query heads and channels of the kv heads that share a transform, at most."""

KLTLayer = LayerCodec[KLTKey, KLTValue]


@dataclass(frozen=True)
class Transform:
    """x = B z for vectors x of each group of heads; components z are uncorrelated between bands, largest cost first.

    Attributes:
        basis: float64 [groups, channels, channels], B, with the components of one head after those of another, to
            which they are dealt in turn; components z have unit variance.
        costs: float64 [groups, BANDS], the sum over a band of all heads of what its errors cost if it is not coded.
        level: float64 [groups, 1], the geometric mean of a component's cost.
    """

    basis: Tensor
    costs: Tensor
    level: Tensor


def transform(fisher: Tensor, covariance: Tensor, power: float, *, cost_of_fisher: bool, joint: int = 1) -> Transform:
    """The transform of vectors with a Fisher information and covariance, both [groups, channels, channels].

    In coordinates in which an error costs the same along every axis, the principal axes of a Gaussian vector are
    optimal for scalar codes (the Karhunen-Loeve transform; Goyal, "Theoretical foundations of transform coding", 2001).
    Fisher information tells the cost of small errors that are independent from token to token. Those of coarse codes
    are neither, so the metric is a power of it between 0 and 1, chosen by KL divergence (notes/quality_log.md).

    Args:
        power: of the Fisher information that is the metric in which axes are principal.
        cost_of_fisher: whether errors along the axes cost what the Fisher information says, or the metric.
        joint: heads of a group.
    """
    fisher, covariance = fisher.double(), covariance.double()
    mean = fisher.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None].clamp_min(1e-30)
    metric = _power(fisher / mean, power) * mean
    root, inverse_root = _power(metric, 0.5), _power(metric, -0.5)
    variances, axes = torch.linalg.eigh(root @ covariance @ root)
    basis = inverse_root @ axes
    cost = (basis.mT @ fisher @ basis).diagonal(dim1=-2, dim2=-1) if cost_of_fisher else torch.ones_like(variances)
    cost, variances = cost.clamp_min(1e-30), variances.clamp_min(1e-30)
    order = (cost * variances).argsort(-1, descending=True).unflatten(-1, (-1, joint)).mT.flatten(-2)
    basis = (basis / cost.sqrt().unsqueeze(-2)).gather(-1, order.unsqueeze(-2).expand_as(basis))
    sizes = (cost * variances).gather(-1, order)
    # inside a band all components are of one size, so that one field suits all of them
    width = basis.shape[-1] // joint // BANDS
    part = hadamard(width & -width).to(basis)
    mixing = torch.block_diag(*[part] * (basis.shape[-1] // len(part)))
    mixed = (mixing.square() @ sizes.unsqueeze(-1)).squeeze(-1)
    costs = mixed.unflatten(-1, (joint, BANDS, width)).sum((1, 3))
    return Transform(basis @ mixing.mT * mixed.sqrt().unsqueeze(-2), costs, sizes.log().mean(-1, keepdim=True).exp())


def in_tiles(matrix: Tensor, rotation: Rotation, joint: int = 1) -> Tensor:
    """The mean of R_t M R_t^T over the positions t of a tile, of M [groups, channels, channels], float64.

    `rotation` is that of the positions from 0 on, [1, 1, positions, pairs], ROPE_TILE of them, for each of the `joint`
    heads of a group.
    """
    turn = Rotation(rotation.cos[0, 0, :, None, None].double(), rotation.sin[0, 0, :, None, None].double())
    heads = matrix.double().unflatten(-1, (joint, -1)).unflatten(-3, (joint, -1)).transpose(-3, -2)
    mean = torch.zeros_like(heads)
    for of_position in zip(turn.cos.split(32), turn.sin.split(32), strict=True):
        some = Rotation(*(x.unsqueeze(-2).unsqueeze(-2) for x in of_position))
        rows = some.apply(heads.mT.expand(len(some.cos), *heads.shape)).mT
        mean += some.apply(rows).sum(0)
    return mean.transpose(-3, -2).flatten(-2).flatten(-3, -2) / ROPE_TILE


def tile_rotation(angles: Tensor) -> Rotation:
    """The rotation of a tile's positions, [1, 1, ROPE_TILE, pairs], from radians per position [pairs]."""
    angle = torch.arange(ROPE_TILE, device=angles.device).unsqueeze(1) * angles.double()
    return Rotation(angle.cos()[None, None], angle.sin()[None, None])


def _power(matrix: Tensor, power: float) -> Tensor:
    """A power of symmetric matrices [..., d, d] with positive eigenvalues."""
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    return (vectors * (values.clamp_min(1e-30) ** power).unsqueeze(-2)) @ vectors.mT


def allocate(
    spec: ModelSpec, config: KLTConfig, fisher: Sequence[LayerFisher] | None,
    samples: Callable[[int], LayerSamples] | None = None, code: Code = SCALAR,
) -> KLTConfig:  # fmt: skip
    """The settings with the groups of heads that share a transform, and their fields, `bits` per value on average.

    Costs of a group are raised to a power below 1 of their level, because Fisher information overrates how much heads
    differ. Without it, all heads count alike and bands halve from one to the next. How heads of a group are correlated
    is known from samples; without them, as if they were not.
    """
    if config.key_fields:
        return config.model_copy(update={"joint_heads": config.joint_heads or 1})
    joint = config.joint_heads or most_joint_heads(spec, config.head_groups)
    groups = spec.num_kv_heads // joint // config.head_groups, config.head_groups
    if fisher is None:
        shares = [_shares_without_fisher(code, spec.num_layers * spec.num_kv_heads // joint, config.bits, *groups)] * 2
    else:
        rotary_dim = spec.rope.rotary_dim
        angles = spec.rope.theta ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
        keys, values = [], []
        for index, x in enumerate(fisher):
            covariances = [_of_groups(y, joint) for y in (x.key_covariance, x.value_covariance)]
            if samples is not None:
                recorded = samples(index)
                covariances = [_moments(y, joint)[1] for y in (recorded.keys, recorded.values)]
            of_keys, of_values = (y.to(covariances[0].device) for y in (x.key_unweighted, x.value_unweighted))
            tile = tile_rotation((angles * (index not in spec.unrotated)).to(of_keys.device))
            keys.append(_key_transform(of_keys, in_tiles(covariances[0], tile, joint), tile, joint))
            values.append(_value_transform(of_values, covariances[1], joint))
        costs = _weighted(keys, _KEY_EVENNESS), _weighted(values, _VALUE_EVENNESS)
        # a bit of wider values is more in the average
        most = 0.0 if spec.value_dim != spec.head_dim else min(_MOVED_BITS, config.bits - 1, MOST_BYTES - config.bits)
        moved = int(most * len(costs[0])) / len(costs[0])
        shares = [share(code, x, config.bits + more, *groups) for x, more in zip(costs, (-moved, moved), strict=True)]
    heads, shares = spec.num_kv_heads, [[fields for fields in x for _ in range(joint)] for x in shares]
    fields = [tuple(tuple(x[first : first + heads]) for first in range(0, len(x), heads)) for x in shares]
    return config.model_copy(update={"key_fields": fields[0], "value_fields": fields[1], "joint_heads": joint})


def most_joint_heads(spec: ModelSpec, head_groups: int = 1) -> int:
    """Kv heads that share a transform by default: as many as kernels have query rows and registers for."""
    heads = spec.num_kv_heads // head_groups
    most = min(_MOST_ROWS // spec.num_kv_groups, _MOST_CHANNELS // max(spec.head_dim, spec.value_dim), heads)
    return max(x for x in range(1, max(1, most) + 1) if heads % x == 0)


@cache
def _shares_without_fisher(code: Code, count: int, bits: float, heads: int, groups: int) -> list[Fields]:
    return share(code, [0.5 ** torch.arange(BANDS, dtype=torch.float64, device="cpu")] * count, bits, heads, groups)


def _weighted(transforms: Sequence[Transform], evenness: float) -> list[Tensor]:
    return [costs for x in transforms for costs in x.costs.cpu() * x.level.cpu() ** (evenness - 1)]


def _key_transform(metric: Tensor, covariance: Tensor, tile: Rotation, joint: int = 1) -> Transform:
    """From the metric of each head's keys and the covariance of those of each group, rotated in tiles."""
    weights = _metric(in_tiles(metric, tile), joint)
    return transform(weights, covariance, _KEY_POWER, cost_of_fisher=True, joint=joint)


def _value_transform(metric: Tensor, covariance: Tensor, joint: int = 1) -> Transform:
    covariance = _smoothed(covariance, _VALUE_SHRINKAGE)
    return transform(_metric(metric, joint), covariance, _VALUE_POWER, cost_of_fisher=False, joint=joint)


def _smoothed(matrices: Tensor, share: float) -> Tensor:
    """Matrices of which a share, by the mean of their diagonal, is the same in all directions."""
    mean = matrices.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    return matrices.lerp(mean * torch.eye(matrices.shape[-1]).to(matrices), share)


def _of_groups(matrices: Tensor, joint: int) -> Tensor:
    """Block-diagonal matrices of groups, from those of heads."""
    return torch.stack([torch.block_diag(*some) for some in matrices.split(joint)])


def _metric(fisher: Tensor, joint: int) -> Tensor:
    """The Fisher information of groups from that of heads, each smoothed; errors of no head are free."""
    return _smoothed(_of_groups(_smoothed(fisher, _FISHER_SHRINKAGE), joint), _FLOOR)


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
    spec, fisher, joint = codec.key.spec, train.fisher, codec.key.joint
    angles = torch.atan2(train.query_rotation.sin[0, 0, 1], train.query_rotation.cos[0, 0, 1])
    tile = tile_rotation(angles)
    means, covariances = zip(*(_moments(x, joint) for x in (train.keys, train.values)), strict=True)
    if fisher is None:
        queries = train.q.float().unflatten(0, (spec.num_kv_heads, -1))
        key_metric = torch.einsum("hgtc,hgtd->hcd", queries, queries)
        value_metric = torch.eye(spec.value_dim, device=queries.device).expand(spec.num_kv_heads, -1, -1)
    else:
        key_metric, value_metric = fisher.key_unweighted, fisher.value_unweighted
    rotated = tile.at_each_position(means[0][None, :, None])  # the mean key at each position of a tile
    codec.key_offset = rotated[0, :, :OFFSET_BLOCK].mean(1).float()
    blocks = Rotation(tile.cos[:, :, ::OFFSET_BLOCK], tile.sin[:, :, ::OFFSET_BLOCK])
    offsets = blocks.at_each_position(codec.key_offset[None, :, None].double()).repeat_interleave(OFFSET_BLOCK, 2)[0]
    rest = _channels_of_groups(rotated[0] - offsets, joint)
    covariance = in_tiles(covariances[0], tile, joint) + rest.mT @ rest / ROPE_TILE
    codec.key.set_basis(_key_transform(key_metric, covariance, tile, joint).basis)
    codec.value.set_basis(_value_transform(value_metric, covariances[1], joint).basis)
    keys = heldout.keys.first(_ERROR_TOKENS).float()
    place = heldout.positions[: keys.shape[1]] % ROPE_TILE
    at = Rotation(tile.cos[:, :, place].float(), tile.sin[:, :, place].float())
    keys = at.apply(keys.unsqueeze(0))[0] - offsets[:, place].float()
    values = heldout.values.first(_ERROR_TOKENS).float() - means[1].float().unsqueeze(1)
    metrics = {
        "key_bits": [sum(fields) / BANDS for fields in codec.key.fields],
        "value_bits": [sum(fields) / BANDS for fields in codec.value.fields],
        "key_error": relative_error(codec.key, keys, in_tiles(key_metric, tile).float()),
        "value_error": relative_error(codec.value, values, value_metric),
    }
    codec.value.mean.copy_(means[1])  # the error is that of values less their mean, as that of keys
    return FitReport(metrics)


def _moments(samples: TokenBlocks, joint: int) -> tuple[Tensor, Tensor]:
    """Mean and covariance of all tokens, float64 [heads, head_dim] and [groups, channels, channels]."""
    mean = samples.mean(lambda block: block.double().mean(1))
    squares = samples.mean(lambda block: (x := _channels_of_groups(block.double(), joint)).mT @ x / x.shape[1])
    of_group = mean.view(len(squares), -1)
    return mean, squares - of_group.unsqueeze(-1) * of_group.unsqueeze(-2)


def _channels_of_groups(x: Tensor, joint: int) -> Tensor:
    """x [heads, tokens, head_dim] as [heads / joint, tokens, joint * head_dim]."""
    return x.unflatten(0, (-1, joint)).transpose(1, 2).flatten(2)


def _method(name: str, summary: str, code: Code) -> Method:
    def build(spec: ModelSpec, config: KLTConfig, layer_idx: int) -> KLTLayer:
        resolved = allocate(spec, config.resolve(spec), None, code=code)
        fields = resolved.key_fields[layer_idx], resolved.value_fields[layer_idx]
        offset = torch.zeros(spec.num_kv_heads, spec.head_dim)
        joint = resolved.joint_heads
        return LayerCodec(KLTKey(spec, fields[0], code, joint), KLTValue(spec, fields[1], code, joint), offset)

    def nominal_bits(spec: ModelSpec, config: KLTConfig) -> tuple[float, float]:
        resolved = allocate(spec, config, None, code=code)
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


METHOD = _method(
    "klt", "fitted transform of a few heads, bits where errors cost most, gains per token and head", SCALAR
)
METHOD_TCQ = _method("klt-tcq", "klt with trellis-coded quantization: less loss, more time to read codes", TRELLIS)
