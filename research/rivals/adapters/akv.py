"""akv-cache: presets of AKVCache."""

from __future__ import annotations

from akv import AKVCache

from research.rivals.protocol import CacheSetting

SETTINGS = [
    CacheSetting("quality", "4 bits, about 4 times smaller", lambda model: AKVCache(preset="quality")),
    CacheSetting("balanced", "3 bits, about 5 times smaller", lambda model: AKVCache(preset="balanced")),
    CacheSetting("compact", "2 bits, about 8 times smaller", lambda model: AKVCache(preset="compact")),
]
