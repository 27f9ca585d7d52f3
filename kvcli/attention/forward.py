"""One forward pass over one cache: the new tokens, and what all layers need of them, made once.

Layers ask in turn; whatever the first one makes, the others find. This module does not know about layers.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from kvcli.cache.ledger import Counts
from kvcli.cache.timeline import Step, Timeline, vector
from kvcli.rope import Rotation, TokenRotations


class ForwardPass:
    """What the layers of one forward pass share.

    Attributes:
        step: the new tokens.
        timeline: all tokens.
        rotation: rotation of the new slots, in the model's dtype.
        mask: the mask transformers made, checked already.
    """

    def __init__(self, timeline: Timeline, step: Step, rotation: Rotation, mask: Tensor | None) -> None:
        self.timeline, self.step, self.rotation, self.mask = timeline, step, rotation, mask
        self._rotations: dict[tuple[int, int], Rotation] = {}

    def rotations(self, start: int, stop: int) -> Rotation:
        """Rotation of tokens [start, stop) of every row of the batch, in float32."""
        if (start, stop) not in self._rotations:
            self._rotations[start, stop] = self.timeline.rotation(start, stop)
        return self._rotations[start, stop]

    @cached_property
    def coded(self) -> Counts:
        """Tokens of each row, after its sinks, that are attended to as codes: whole groups of keys and values."""
        keys, values = self.timeline.keys, self.timeline.values
        group = max(keys.tokens_per_group, values.tokens_per_group)
        pairs = zip(self.step.keys.encoded, self.step.values.encoded, strict=True)
        return tuple(min(pair) // group * group for pair in pairs)

    @cached_property
    def most_coded(self) -> int:
        """The largest of `coded`."""
        return max(self.coded)

    @cached_property
    def coded_lengths(self) -> Tensor | None:
        """`coded` as int32 [batch]; None when all are equal."""
        if min(self.coded) == max(self.coded):
            return None
        return vector(self.coded, self.step.index.device, torch.int32)

    @cached_property
    def coded_rotations(self) -> TokenRotations:
        """Rotations of the `coded` tokens of each row."""
        first = self.timeline.keys.sink_length
        return self.timeline.token_rotations(first, self.coded, self.coded_lengths)

    @cached_property
    def alike(self) -> bool:
        """Whether all rows hold as many tokens, and as many of them as codes."""
        turns = (self.step.keys.encoded, self.step.values.encoded)
        return all(min(n) == max(n) for n in (self.timeline.lengths, *turns))

    @cached_property
    def visible_exact(self) -> Tensor | None:
        """Which exact tokens each new slot sees: boolean [batch, query_len, most exact]; None when all see all."""
        if self.alike and self.step.index.shape[1] == 1:
            return None
        lengths, device = self.timeline.lengths, self.step.index.device
        most = max(length - coded for length, coded in zip(lengths, self.coded, strict=True))
        place = torch.arange(most, device=device)
        skipped = vector(self.coded, device).unsqueeze(1)
        token = torch.where(place < self.timeline.keys.sink_length, place, place + skipped)
        beyond = token >= vector(tuple(lengths), device).unsqueeze(1)
        token = token.masked_fill(beyond, torch.iinfo(torch.int64).max)
        return token.unsqueeze(1) <= self.step.index.unsqueeze(-1)
