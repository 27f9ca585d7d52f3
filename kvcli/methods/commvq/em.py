"""Expectation-maximisation for one stage of the key codebook, with hard or annealed soft assignment.

CommVQ (arXiv 2506.18879) appendix A.2. Hard: E-step by `Search.nearest`, M-step by `update`; the mean squared error
never rises. Annealed: weights softmax(-D/T_k) over all N^2 centres with D the Euclidean distance (Eq. 34-35) and T_k
falling exponentially; the codebook with the lowest hard-assignment error is kept.

An iteration keeps the sums of a pass over blocks of the data x, [P, T, 2g] in all, so its memory does not depend on T.
Generators are on the CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.methods.commvq.codebook import Search, Sums, pair_table, times_i, update
from kvcli.methods.samples import TokenBlocks

_SUBSET, _MOST_SUBSET = 4096, 8192
_SOFT_BLOCK_ELEMENTS = 2**24
_ANNEAL_STEPS = 100
_ANNEAL_FROM, _ANNEAL_TO = 1e-3, 1e-5


def initial_codebook(x: TokenBlocks, size: int, generator: torch.Generator) -> Tensor:
    """Least squares fit of the structured centres [P, N, 2g] to N^2 = `size`^2 random data vectors, one for each."""
    count = size * size
    draw = torch.randperm(max(count, x.num_tokens), generator=generator)[:count] % x.num_tokens
    drawn = x.at(draw)
    cells = torch.arange(count, device=drawn.device).expand(drawn.shape[0], -1)
    start = drawn.new_zeros(drawn.shape[0], size, drawn.shape[-1])
    return update(drawn, cells // size, cells % size, start)[0]


def fit_hard(x: TokenBlocks, size: int, iterations: int, early: int, generator: torch.Generator) -> Tensor:
    """EM with hard assignment; its first iterations run on a random quarter, 4096 to 8192 vectors.

    Of data x [P, T, 2g], to a codebook [P, N, 2g] of N = `size` rows. `early` of all iterations run on the subset; all
    vectors are taken where it would be half of them or more.
    """
    codebook = initial_codebook(x, size, generator)
    count = min(max(_SUBSET, x.num_tokens // 4), _MOST_SUBSET)
    subset = torch.randperm(x.num_tokens, generator=generator)[:count]
    early = early if x.num_tokens > 2 * count else 0
    if early:
        some = TokenBlocks.of(x.at(subset))
        for _ in range(early):
            codebook = step(some, codebook)
    for _ in range(iterations - early):
        codebook = step(x, codebook)
    return codebook


def step(x: TokenBlocks, codebook: Tensor) -> Tensor:
    """One hard EM iteration on a codebook [P, N, 2g]; dead rows are replaced by the vectors of largest error."""
    sums, search = Sums(codebook), Search.of(codebook)
    for block in x:
        sums.add(block, *search.nearest(block))
    updated, dead = sums.solve(codebook)
    if bool(dead.any()):
        # a row that no vector uses can take any value without raising the error, so the next E-step can only lower it
        worst = worst_vectors(x, codebook)
        rank = (dead.cumsum(-1) - 1).clamp(0, worst.shape[1] - 1)
        candidates = worst.gather(1, rank.unsqueeze(-1).expand_as(codebook))
        updated = torch.where(dead.unsqueeze(-1), candidates, updated)
    return updated


def worst_vectors(x: TokenBlocks, codebook: Tensor) -> Tensor:
    """The N vectors of each problem with the largest error under a codebook [P, N, 2g], the largest first."""
    worst: tuple[Tensor, Tensor] | None = None
    search = Search.of(codebook)
    for block in x:
        error = (block - search.centres(*search.nearest(block))).square().sum(-1)
        top = _largest(error, block, codebook.shape[1])
        if worst is not None:
            top = _largest(torch.cat((worst[0], top[0]), 1), torch.cat((worst[1], top[1]), 1), codebook.shape[1])
        worst = top
    assert worst is not None
    return worst[1]


def _largest(errors: Tensor, vectors: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest errors [P, T] in descending order, `count` at most, and their vectors [P, T, 2g]."""
    top = errors.topk(min(count, errors.shape[1]), dim=1)
    return top.values, vectors.gather(1, top.indices.unsqueeze(-1).expand(-1, -1, vectors.shape[-1]))


def fit_annealed(x: TokenBlocks, size: int, stage: int, generator: torch.Generator) -> Tensor:
    """EM with the paper's annealed soft assignment.

    The schedule is the released code's: one E-step at T = 1, then 100 steps from 1e-3 * s to 1e-5 * s, s divided by 10
    after stages 0, 4, 8, ..., for vectors scaled to unit norm. The codebook [P, N, 2g], N = `size`, with the lowest
    hard-assignment error is returned.
    """
    scale = 0.1 ** ((stage + 3) // 4)
    decay = torch.logspace(0, 1, _ANNEAL_STEPS, base=_ANNEAL_TO / _ANNEAL_FROM).tolist()
    width = x.first(1).shape[-1]
    unit = x.map(lambda block: block * width**-0.5)  # rows arrive with unit root mean square
    codebook = initial_codebook(unit, size, generator)
    best, best_error = codebook, float("inf")
    for temperature in [1.0, *(_ANNEAL_FROM * scale * factor for factor in decay)]:
        codebook = soft_step(unit, codebook, temperature)
        error = hard_error(unit, codebook)
        if error < best_error:
            best, best_error = codebook, error
    return best * width**0.5


def hard_error(x: TokenBlocks, codebook: Tensor) -> float:
    """Mean squared error per channel of x [P, T, 2g] under hard assignment to a codebook [P, N, 2g]."""
    search = Search.of(codebook)
    return float(x.mean(lambda block: (block - search.centres(*search.nearest(block))).square().mean()))


def soft_step(x: TokenBlocks, codebook: Tensor, temperature: float) -> Tensor:
    """One EM iteration on a codebook [P, N, 2g] with weights softmax(-D/T) over all centres (CommVQ Eq. 34-35).

    The temperature T is in units of the distance.
    """
    problems, size, _ = codebook.shape
    table = pair_table(codebook).flatten(1).unsqueeze(1)
    directions = torch.cat((codebook, times_i(codebook)), dim=1).transpose(1, 2) * -2
    sums = Sums(codebook)
    block = max(1, _SOFT_BLOCK_ELEMENTS // (problems * size * size))
    for part in (part for data in x for part in data.split(block, dim=1)):
        along_a, along_b = (part @ directions).split(size, dim=-1)
        cross = (along_a.unsqueeze(-1) + along_b.unsqueeze(-2)).flatten(2)
        distance = (part.square().sum(-1, keepdim=True) + cross + table).clamp_min(0).sqrt()
        weights = torch.softmax(-distance / temperature, dim=-1).double().unflatten(-1, (size, size))
        sums.counts += weights.sum(1).flatten(1)
        sums.first += weights.sum(-1).transpose(1, 2) @ part.double()
        sums.second += weights.sum(-2).transpose(1, 2) @ part.double()
    return sums.solve(codebook)[0]
