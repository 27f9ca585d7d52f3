"""Shares bits among layers, and between keys and values, so that coding errors cost least in KL divergence.

A Gaussian vector whose components have variances l_i, coded at b bits, keeps the distortion sum_i min(l_i, t), with the
level t where sum_i max(0, log2(l_i / t) / 2) = b (reverse water-filling; Cover and Thomas, Elements of Information
Theory, 10.3.3). In coordinates in which a unit of distortion costs the same everywhere, which Fisher information gives
(`calibrate.fisher`), that is the rate and the distortion of each layer's keys and values.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

from kvcli.methods.commvq.config import CommVQConfig
from kvcli.methods.samples import LayerFisher
from kvcli.rope import from_pairs, to_pairs
from kvcli.spec import ModelSpec

_STEPS = 5
"""Steps that make up the average layer; kernels are compiled for each number of stages and of bits that occurs."""

_MOST_BITS = 4


def allocate(
    spec: ModelSpec, config: CommVQConfig, fisher: Sequence[LayerFisher] | None, samples: object = None
) -> CommVQConfig:
    """The settings with residual stages and value bits for each layer.

    Starting from one step everywhere, steps go one by one to where they save most per bit. Distortion is a convex
    function of bits, so this is optimal up to the size of a step. `num_residuals` and `value_code_bits` of the resolved
    settings are those of the average layer; without Fisher information, all layers have the same bits.
    """
    if config.allocation == "uniform" or fisher is None or config.layer_residuals:
        return config
    stages, unit = max(1, config.num_residuals // _STEPS), 16 * config.value_groups
    bits = max(1, config.value_code_bits // _STEPS // unit) * unit
    stage_bits = spec.kv_dim // 2 // config.pairs_per_group * config.bits_per_code
    budget = spec.num_layers * (config.num_residuals * stage_bits + config.value_code_bits)
    steps = [stages * stage_bits] * spec.num_layers + [bits] * spec.num_layers
    spectra = [key_spectrum(layer, spec) for layer in fisher] + [value_spectrum(layer) for layer in fisher]
    most = [max(1, _MOST_BITS * spec.kv_dim // step) for step in steps]
    groups = [1] * spec.num_layers + [config.value_groups] * spec.num_layers
    costs = [
        torch.stack([distortion(part, torch.arange(n + 1) * (step // count)) for part in x.chunk(count)]).sum(0)
        for x, n, step, count in zip(spectra, most, steps, groups, strict=True)
    ]
    counts = [1] * len(steps)
    budget -= sum(steps)

    def gain(index: int) -> float:
        """The cost that the next step of a layer's keys or values saves, per bit."""
        at = counts[index]
        return float(costs[index][at] - costs[index][at + 1]) / steps[index]

    heap = [(-gain(index), index) for index in range(len(steps)) if most[index] > 1]
    heapq.heapify(heap)
    while heap:
        _, index = heapq.heappop(heap)
        if steps[index] > budget:
            continue
        counts[index] += 1
        budget -= steps[index]
        if counts[index] < most[index]:
            heapq.heappush(heap, (-gain(index), index))
    keys, values = counts[: spec.num_layers], counts[spec.num_layers :]
    shares = {
        "layer_residuals": tuple(stages * count for count in keys),
        "layer_value_bits": tuple(bits * count for count in values),
    }
    return config.model_copy(update=shares)


def key_spectrum(fisher: LayerFisher, spec: ModelSpec) -> Tensor:
    """Variances, in units of cost, of keys along principal axes: float64 [num_kv_heads * head_dim].

    Codebooks weight both channels of a RoPE pair equally, so Fisher information is that of pairs.
    """
    weight = pair_fisher(fisher.key, spec.rope.rotary_dim).double()
    channels = from_pairs(weight.unsqueeze(-1).expand(-1, -1, 2), spec.rope.rotary_dim).sqrt()
    scaled = channels.unsqueeze(-1) * fisher.key_covariance.double() * channels.unsqueeze(-2)
    return torch.linalg.eigvalsh(scaled).flatten().clamp_min(0)


def value_spectrum(fisher: LayerFisher) -> Tensor:
    """The same of values."""
    root = square_root(fisher.value.double())
    return torch.linalg.eigvalsh(root @ fisher.value_covariance.double() @ root).flatten().clamp_min(0)


def pair_fisher(fisher: Tensor, rotary_dim: int) -> Tensor:
    """Fisher information [heads, d, d] of channel pairs, the mean of both channels: [heads, d/2]."""
    return to_pairs(fisher.diagonal(dim1=-2, dim2=-1).unsqueeze(1), rotary_dim).squeeze(1).mean(-1)


def square_root(matrix: Tensor) -> Tensor:
    """The symmetric square roots of positive semidefinite matrices [..., d, d]."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)) @ vectors.transpose(-1, -2)


def distortion(variances: Tensor, bits: Tensor) -> Tensor:
    """Distortion of a Gaussian vector with variances float64 [n], by reverse water-filling, for `bits` [k] in all.

    float64 [k], half of the summed squared errors: with variances in units of cost, nats.
    """
    ordered = variances.sort(descending=True).values.clamp_min(1e-300)
    logs = ordered.log2()
    active = torch.arange(1, len(logs) + 1)
    # the level if the `active` largest components got all bits; the right number is the last whose level they exceed
    levels = (logs.cumsum(0) - 2 * bits.double().unsqueeze(1)) / active
    number = (levels < logs).sum(1).clamp_min(1)
    level = levels.gather(1, number.unsqueeze(1) - 1).exp2()
    return torch.minimum(ordered, level).sum(1) / 2
