"""Fits CommVQ's key codebooks (arXiv 2506.18879, section 4.2 and appendix A.2) stage by stage."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kvcli.methods.commvq.allocate import pair_fisher
from kvcli.methods.commvq.codebook import Search
from kvcli.methods.commvq.config import CommVQConfig
from kvcli.methods.commvq.em import fit_annealed, fit_hard
from kvcli.methods.commvq.keys import CommVQKeyCodec
from kvcli.methods.samples import LayerSamples, TokenBlocks
from kvcli.rope import to_pairs

_MIN_SHARE = 1e-6
_TINY = 1e-30


def fit_keys(codec: CommVQKeyCodec, keys: TokenBlocks, config: CommVQConfig, generator: torch.Generator) -> int:
    """Fits the residual stages one after another, each on the residual of the greedy encoding so far.

    Args:
        codec: fitted in place; its weights of channel pairs are used.
        keys: [num_kv_heads, tokens, head_dim], pre-RoPE, less the offset.
        generator: on the CPU.

    Returns:
        Dead codebook rows: those that no training vector uses in the end, over all stages and heads.
    """
    weights = codec.group_weight()
    residual = keys.map(lambda block: codec.problems(codec.normalise(block.unsqueeze(0))[0])).stored()
    books, dead = [], 0
    for stage in range(config.num_residuals):
        if config.key_assignment == "hard":
            on_subset = max(0, config.key_iterations - config.key_full_iterations)
            book = fit_hard(residual, config.codebook_size, config.key_iterations, on_subset, generator)
        else:
            book = fit_annealed(residual, config.codebook_size, stage, generator)
        if stage == 0:
            # the unit of each pair follows from the first stage
            largest = (book / weights).unflatten(-1, (-1, 2)).abs().amax((1, 3))
            codec.codebook_scale.copy_((largest.clamp_min(1e-6) / 127).view_as(codec.codebook_scale))
        # later stages must see the residual of the stored int8 codebook, not of the float32 one
        unit = codec.codebook_scale.flatten(0, 1).repeat_interleave(2, -1).unsqueeze(1)
        stored = (book / weights / unit).round().clamp(-127, 127)
        rounded = stored * unit * weights
        used = torch.zeros(book.shape[:2], device=book.device)
        residual.update(partial(_left_over, search=Search.of(rounded), used=used))
        dead += int((used == 0).sum())
        books.append(stored.to(torch.int8))
    codec.codebook.copy_(torch.stack(books, dim=1).view_as(codec.codebook))
    return dead


def _left_over(residual: Tensor, search: Search, used: Tensor) -> Tensor:
    """The residual [P, T, 2g] after one more stage; the rows that the stage uses are marked in `used` [P, N]."""
    first, second = search.nearest(residual)
    used.scatter_(1, first, 1.0).scatter_(1, second, 1.0)
    return residual - search.centres(first, second)


def set_pair_weight(codec: CommVQKeyCodec, keys: TokenBlocks, samples: LayerSamples, weighting: str) -> None:
    """Sets the weights of channel pairs.

    A real factor per pair commutes with RoPE, so it can weight the distance without breaking the codebook's structure.
    Scaling a pair of the keys and its queries by the inverse, which changes no score, does not change weighted keys.

    Args:
        codec: changed in place; the weighted keys of each head have mean square 1.
        keys: [num_kv_heads, tokens, head_dim], pre-RoPE, less the offset.
        weighting: `fisher`, the root of what an error of a pair costs (of queries, where that was not recorded),
            `queries`, sqrt(E|q_j|^2) over a kv head's query heads, or `none`.
    """
    rotary_dim = codec.spec.rope.rotary_dim
    if weighting == "fisher" and samples.fisher is not None:
        codec.pair_weight.copy_(pair_weight(pair_fisher(samples.fisher.key, rotary_dim), keys, rotary_dim))
    elif weighting != "none" and samples.q.shape[1]:
        queries = to_pairs(samples.q, rotary_dim).double().square().sum(-1).mean(1)
        queries = queries.unflatten(0, (codec.spec.num_kv_heads, -1)).mean(1)
        codec.pair_weight.copy_(pair_weight(queries, keys, rotary_dim))


def pair_weight(costs: Tensor, keys: TokenBlocks, rotary_dim: int) -> Tensor:
    """Roots of what a squared error of each channel pair costs, in units that give a head's keys mean square 1.

    From `costs` [num_kv_heads, head_dim/2], in any unit, and pre-RoPE keys [num_kv_heads, tokens, head_dim], less the
    offset; float32 [num_kv_heads, head_dim/2].
    """
    costs = costs.double()
    of_keys = keys.mean(lambda block: to_pairs(block, rotary_dim).double().square().sum(-1).mean(1))
    total = (costs * of_keys).mean(-1, keepdim=True)
    # pairs that cost nothing, or without keys, keep a small weight: what is stored there must stay finite
    energy = costs.clamp_min(_TINY) + _MIN_SHARE * total / of_keys.clamp_min(_TINY)
    energy = torch.where(of_keys > 0, energy, energy.amin(-1, keepdim=True))
    mean_square = (energy * of_keys).mean(-1, keepdim=True) / 2
    scale = torch.where(mean_square > 0, 1 / mean_square.clamp_min(_TINY), 1.0)
    return (energy * scale).sqrt().float()
