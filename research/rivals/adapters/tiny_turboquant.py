"""tiny-turboquant: presets of TinyKVCache."""

from __future__ import annotations

from tiny_turboquant import TinyKVCache

from research.rivals.protocol import CacheSetting

SETTINGS = [
    CacheSetting("safe", "about 3.3 times smaller", lambda model: TinyKVCache(compression="safe")),
    CacheSetting("K4, V2", "about 4 times smaller", lambda model: TinyKVCache(key_bits=4, value_bits=2)),
    CacheSetting("aggressive", "keys 3, values 2 bits", lambda model: TinyKVCache(compression="aggressive")),
]
