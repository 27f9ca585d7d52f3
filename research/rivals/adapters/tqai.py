"""tqai: its default, which keeps what it decodes, and the strategy that keeps codes alone."""

from __future__ import annotations

from typing import Any

import tqai as package

from research.rivals.protocol import CacheSetting, in_steps


def cache(**options: Any) -> Any:
    """A cache with keys of 4 and values of 2 bits."""
    return lambda model: package.patch(model, bits_k=4, bits_v=2, backend="torch", **options)


PASSES = [
    CacheSetting("K4, V2", "5x, serialized", cache()),
    CacheSetting("K4, V2, full", "5x", cache(cache_strategy="full")),
]
SETTINGS = [*PASSES, *map(in_steps, PASSES)]
