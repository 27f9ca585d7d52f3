"""What layers keep that do not attend to the whole context: caches of transformers' own, by the number of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from kvcli.cache.memory import own_bytes
from kvcli.plan.live_bytes import META
from kvcli.plan.model import PlannedModel


@dataclass(frozen=True)
class OtherLayers:
    """Bytes of the other layers' caches of one sequence.

    Attributes:
        state: bytes that do not depend on the number of tokens, such as states of linear attention.
        windows: bytes per token, and most tokens, of each layer that keeps the last tokens only.
    """

    state: int = 0
    windows: tuple[tuple[int, int], ...] = ()

    @property
    def longest_window(self) -> int | None:
        """Most tokens that a layer keeps; None without windows."""
        return max((most for _, most in self.windows), default=None)

    def held(self, tokens: int, new_tokens: int = 1) -> int:
        """Bytes after so many tokens.

        Args:
            tokens: of the sequence.
            new_tokens: that the last forward pass read: what a window is cut from stays until the next pass.
        """
        return self.state + sum(size * min(tokens, most + new_tokens - 1) for size, most in self.windows)

    @classmethod
    def of(cls, planned: PlannedModel) -> OtherLayers:
        """Those of a model, found by running it without numbers.

        Raises:
            UnsupportedModelError: a model that does not run so.
        """
        spec = planned.spec
        if not spec.other_layers:
            return NO_OTHERS
        model: Any = planned.empty()
        cache = DynamicCache(config=model.config)
        ours = {spec.in_model(layer_idx) for layer_idx in range(spec.num_layers)}
        others = [layer for layer_idx, layer in enumerate(cache.layers) if layer_idx not in ours]
        one, two = (_after_a_token(planned, model, cache, others) for _ in range(2))
        growth = [after - before for before, after in zip(one, two, strict=True)]
        state = sum(before - size for before, size in zip(one, growth, strict=True))
        return cls(
            state, tuple((size, layer.sliding_window - 1) for size, layer in zip(growth, others, strict=True) if size)
        )


NO_OTHERS = OtherLayers()
"""Those of a model whose layers all attend to the whole context."""


def _after_a_token(planned: PlannedModel, model: Any, cache: DynamicCache, layers: list[Any]) -> list[int]:
    """Bytes of layers of a cache after one more token."""
    ids = torch.zeros(1, 1, dtype=torch.int64, device=META)
    with torch.no_grad():
        planned.peak_bytes(lambda: model(input_ids=ids, past_key_values=cache, use_cache=True))
    return [own_bytes([layer]) for layer in layers]
