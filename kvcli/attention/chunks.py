"""Passes over chunks of a text of which all are as long; on a GPU, they are replayed as CUDA graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvcli.attention.backend import AttentionBackend
from kvcli.attention.generation import Mode
from kvcli.attention.steps import Steps
from kvcli.cache.compressed import CompressedCache
from kvcli.seam.decoder import backbone
from kvcli.seam.versions import with_cache

_LEAST_PASSES = 4
"""Passes for which capturing a graph pays."""


class Chunks:
    """Reads tokens into one cache without padding, `width` per row in each forward pass, until `left` are read.

    Once every row holds codes, and as long as chunks have `width` tokens, passes count on the device.

    Args:
        mode: `graphs`, `steps`, which are the same without capturing them, or `passes`.

    Attributes:
        left: tokens to come.
        mode: how the last pass was made.
    """

    def __init__(
        self, model: Any, cache: CompressedCache, backends: list[AttentionBackend], width: int, left: int, mode: Mode
    ) -> None:
        self.model, self.cache, self.width, self.left = model, cache, width, left
        few = all(width < backend.prefill_threshold for backend in backends)
        self._pays = mode != "passes" and few and left >= _LEAST_PASSES * width
        self._steps, self._made, self._has_room = Steps(cache, backends, mode, model.device, width), 0, False
        self._mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=model.device)
        self._ids = self._states = torch.empty(0)
        self.mode: Mode = "passes"

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> Tensor:
        """Reads tokens, int64 [batch, time]; returns their last hidden states, which the next call overwrites."""
        counts = self.cache.sequences.counts
        fits = ids.shape == (len(counts.lengths), self.width)  # an ordinary pass says what is wrong with another batch
        if self._has_room and fits and self.left >= self.width and self.cache.can_step:
            states = self._step(ids)
        else:
            self.close()
            if self._pays:
                counts.make_room(self.width)
            states = self._run(ids)
            self._has_room, self.mode = self._pays, "passes"
        self.left -= ids.shape[1]
        return states

    def _run(self, ids: Tensor, **inputs: Tensor) -> Tensor:
        states: Tensor = backbone(self.model)(ids, **inputs, **with_cache(self.cache))[0]
        return states

    def _step(self, ids: Tensor) -> Tensor:
        steps = self._steps
        if self._ids.shape != ids.shape:
            self._ids = torch.empty_like(ids, memory_format=torch.contiguous_format)
        self._ids.copy_(ids)
        steps.prepare(self.left)
        with self.cache.passes.complete_or_refused():
            new = steps.append()
            steps.run(self._captured)
            self._made += self.width
            if new.flushes:
                steps.encode(new)
        self.mode = steps.mode
        return self._states

    def _captured(self) -> None:
        step: Any = self._steps.counts
        states = self._run(self._ids, position_ids=step.positions(), attention_mask=self._mask)
        if self._states.shape != states.shape:
            self._states = torch.empty_like(states)
        self._states.copy_(states)

    def close(self) -> None:
        """Hands the cache back to ordinary passes."""
        self._steps.end(self._made)
        self._made, self._has_room = 0, False
        self.cache.sequences.counts.make_room(1)
