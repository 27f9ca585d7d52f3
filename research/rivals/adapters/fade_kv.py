"""fade-kv: its safe preset, and rotated 2 bits."""

from __future__ import annotations

from fade import FadeConfig, create_tiered_cache
from fade.backends import get_backend

from research.rivals.protocol import CacheSetting

SETTINGS = [
    CacheSetting("safe", "3.6 times smaller", lambda model: create_tiered_cache(model, config=FadeConfig.safe())),
    CacheSetting(
        "safe, rotated 2 bits",
        "6.3 times smaller",
        lambda model: create_tiered_cache(
            model,
            config=FadeConfig.safe(),
            quant_backend=get_backend("rotated", head_dim=model.config.head_dim, bits=2),
        ),
    ),
]
