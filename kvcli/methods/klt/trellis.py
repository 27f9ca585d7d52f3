"""Trellis-coded quantization: codes of a vector that are chosen together, each from half of the levels there are.

A channel of b bits has 2^(b+1) uniform levels in four subsets, every fourth level each. Of its bits one is that of the
trellis, a convolutional code; its own and those of the channels 1, 2 and 4 before it say which subset, and b - 1 bits
say which level of that. So levels lie as densely as those of one bit more, and what is decoded needs four bits and no
search. Marcellin and Fischer, "Trellis coded quantization of memoryless and Gauss-Markov sources", 1990, with the code
of 16 states of Ungerboeck, "Channel coding with multilevel/phase signals", 1982. The channels before the first are the
last ones (tail-biting), so that no bit is spent on a state.

With y1 = b_t + b_(t-1) + b_(t-4) and y0 = b_(t-2), modulo 2, the subset is 2 y1 + y0.
"""

from __future__ import annotations

import torch
from torch import Tensor

TAPS = (1, 2, 4)
"""How many channels before its own the bits lie that choose a subset."""

LEAD = 32
"""Channels before the first, and from it on, that are searched to find the state at the start: of 64 and 128 channels
the error is 1 % more than if every state were tried, as it is of at most so many channels.
"""

_STATES = 16
_CHUNK = 4096
"""Vectors that are searched at once, few enough for a processor's cache."""


def search(y: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
    """The bits of the trellis and the levels within subsets with the least squared error, in a Viterbi search from the
    state that is found at the start on.

    Args:
        y: float32 [channels, vectors], in units of steps from the first level on.
        most: float32 of that shape, 2^(b - 1) - 1.

    Returns:
        int32 [channels, vectors]: the bits, and levels from 0 to `most`; level 4 u + s for the u-th of subset s.
    """
    parts = [_search(*part) for part in zip(y.split(_CHUNK, 1), most.split(_CHUNK, 1), strict=True)]
    bits, levels = (torch.cat(x, 1) for x in zip(*parts, strict=True))
    return bits, levels


def _search(y: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
    count, y = len(y), y.clamp(-1e4, 1e4)  # far beyond the last level, squares may overflow
    subset = torch.arange(4, device=y.device).unsqueeze(1)
    levels = ((y.unsqueeze(1) - subset) * 0.25).round().clamp_min(0).minimum(most.unsqueeze(1))
    errors = (y.unsqueeze(1) - (4 * levels + subset)).square()  # [channels, 4, vectors]
    if count <= LEAD:
        only = torch.full((_STATES, _STATES), 1e30, device=y.device).fill_diagonal_(0.0)
        ends, _ = _forward(only.repeat_interleave(y.shape[1], 1), errors.repeat(1, 1, _STATES))
        start = ends.unflatten(1, (_STATES, -1)).diagonal().argmin(1)
    else:
        around = torch.arange(-LEAD, LEAD, device=y.device) % count
        costs, ways = _forward(y.new_zeros(_STATES, y.shape[1]), errors[around])
        start = _back(ways[LEAD:], costs.argmin(0))[0]
    _, ways = _forward(y.new_full((_STATES, y.shape[1]), 1e30).scatter_(0, start.unsqueeze(0), 0.0), errors)
    bits = _back(ways, start)[1:] & 1
    return bits.int(), levels.gather(1, subsets(bits).unsqueeze(1)).squeeze(1).int()


def subsets(bits: Tensor) -> Tensor:
    """Subsets 0 to 3 of channels along axis 0, from their bits."""
    before = [bits.roll(tap, 0) for tap in TAPS]
    return 2 * (bits ^ before[0] ^ before[2]) + before[1]


def _forward(costs: Tensor, errors: Tensor) -> tuple[Tensor, Tensor]:
    """Least costs [16, vectors] of each state after channels of errors [channels, 4, vectors], and the ways to it.

    Bit i of a state is that of the channel i channels before, so state n comes from n // 2 or n // 2 + 8; bool
    [channels, 16, vectors] says whether from the latter.
    """
    half, vectors = _STATES // 2, costs.shape[1]
    state = torch.arange(half, device=costs.device)
    zero = 2 * (state & 1) + (state >> 1 & 1)  # the subset of a bit 0 after states below 8
    subset = torch.stack((zero, zero ^ 2, zero ^ 2, zero), 1).flatten()  # [state, bit, state above 7]
    ways = torch.empty(len(errors), half, 2, vectors, dtype=torch.bool, device=costs.device)
    for error, way in zip(errors, ways, strict=True):
        sums = error[subset].view(half, 2, 2, vectors) + costs.reshape(2, half, vectors).transpose(0, 1).unsqueeze(1)
        torch.lt(sums[:, :, 1], sums[:, :, 0], out=way)
        costs = torch.minimum(sums[:, :, 0], sums[:, :, 1]).view(_STATES, vectors)
    return costs, ways.flatten(1, 2)


def _back(ways: Tensor, state: Tensor) -> Tensor:
    """States before the first channel and after each one on the way to states [vectors]: [channels + 1, vectors]."""
    states = [state]
    for way in ways.flip(0):
        state = torch.add(state >> 1, way.gather(0, state.unsqueeze(0))[0], alpha=8)
        states.append(state)
    return torch.stack(states[::-1])
