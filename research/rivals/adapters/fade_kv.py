"""fade-kv: its safe preset, and rotated 2 bits."""

from __future__ import annotations

from typing import Any

from fade import FadeConfig, create_tiered_cache
from fade.backends import get_backend
from fade.policy import reassign_tiers_by_position

from research.rivals.protocol import CacheSetting


def reassign(model: Any, cache: Any) -> None:
    """What the documentation calls every 64 tokens in a loop of one's own."""
    reassign_tiers_by_position(cache, model.config.num_hidden_layers)


def safe(model: Any) -> Any:
    """Its safe preset: nothing is evicted."""
    return create_tiered_cache(model, config=FadeConfig.safe())


def rotated(model: Any) -> Any:
    """The same, rotated, with 2 bits."""
    backend = get_backend("rotated", head_dim=model.config.head_dim, bits=2)
    return create_tiered_cache(model, config=FadeConfig.safe(), quant_backend=backend)


SETTINGS = [
    CacheSetting("safe", "3.6x", safe),
    CacheSetting("rotated 2 bits", "6.3x", rotated),
    CacheSetting("safe, tiers reassigned", "3.6x", safe, after=reassign, ways=("passes",)),
    CacheSetting("rotated 2 bits, tiers reassigned", "6.3x", rotated, after=reassign, ways=("passes",)),
]
