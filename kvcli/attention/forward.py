"""One forward pass over one cache: the new tokens, and what all layers need of them, made once.

Layers ask in turn; whatever the first one makes, the others find. This module does not know about layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvcli.cache.timeline import Step, Timeline
from kvcli.rope import Rotation, TokenRotations

MadeT = TypeVar("MadeT")


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
        self._made: dict[Any, Any] = {}

    def rotations(self, start: int, stop: int) -> Rotation:
        """Rotation of tokens [start, stop) of every row of the batch, in float32."""
        return self._once((start, stop), lambda: self.timeline.rotation(start, stop))

    def encoded_rotations(self, start: int, coded: tuple[int, ...]) -> TokenRotations:
        """Rotations of the `coded` tokens of each row from token `start` on."""
        lengths = self.lengths(coded)
        return self._once(
            ("encoded", start, coded), lambda: self.timeline.token_rotations(start, start + max(coded), lengths)
        )

    def lengths(self, coded: tuple[int, ...]) -> Tensor | None:
        """Token counts of the rows as int32 [batch]; None when all are equal."""
        if min(coded) == max(coded):
            return None
        return self._once(("lengths", coded), lambda: self._vector(coded, torch.int32))

    def visible_exact(self, sink_length: int, coded: tuple[int, ...], width: int) -> Tensor | None:
        """Which exact tokens each new slot sees: boolean [batch, query_len, width]; None when all see all.

        Args:
            sink_length: exact tokens at the beginning of a row.
            coded: tokens of each row that come as codes, after the sinks.
            width: exact tokens of the row that has most.
        """
        rows = set(zip(coded, self.timeline.lengths, strict=True))
        if self.step.index.shape[1] == 1 and self.step.real is None and len(rows) == 1:
            return None
        return self._once(("visible", sink_length, coded, width), lambda: self._visible(sink_length, coded, width))

    def _visible(self, sink_length: int, coded: tuple[int, ...], width: int) -> Tensor:
        place = torch.arange(width, device=self.step.index.device)
        skipped = self._vector(coded).unsqueeze(1)
        token = torch.where(place < sink_length, place, place + skipped)
        beyond = token >= self._vector(tuple(self.timeline.lengths)).unsqueeze(1)
        token = token.masked_fill(beyond, torch.iinfo(torch.int64).max)
        return token.unsqueeze(1) <= self.step.index.unsqueeze(-1)

    def _vector(self, values: tuple[int, ...], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, device=self.step.index.device, dtype=dtype)

    def _once(self, name: Any, make: Callable[[], MadeT]) -> MadeT:
        if name not in self._made:
            self._made[name] = make()
        made: MadeT = self._made[name]
        return made
