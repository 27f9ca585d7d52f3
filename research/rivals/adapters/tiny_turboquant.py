"""tiny-turboquant: presets of TinyKVCache."""

from __future__ import annotations

from tiny_turboquant import TinyKVCache

from research.rivals.protocol import CacheSetting

SETTINGS = [
    CacheSetting("safe", "3.3x", lambda model: TinyKVCache(compression="safe")),
    CacheSetting("K4, V2", "4x", lambda model: TinyKVCache(key_bits=4, value_bits=2)),
    CacheSetting("aggressive", "2.5 bits", lambda model: TinyKVCache(compression="aggressive")),
]
