"""akv-cache: presets of AKVCache."""

from __future__ import annotations

from akv import AKVCache

from research.rivals.protocol import CacheSetting

SETTINGS = [
    CacheSetting("quality", "4x", lambda model: AKVCache(preset="quality")),
    CacheSetting("balanced", "5x", lambda model: AKVCache(preset="balanced")),
    CacheSetting("compact", "8x", lambda model: AKVCache(preset="compact")),
]
