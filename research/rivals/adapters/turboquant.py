"""turboquant."""

from __future__ import annotations

from turboquant import TurboQuantCache

from research.rivals.protocol import CacheSetting

SETTINGS = [
    CacheSetting("4 bits", "4x", lambda model: TurboQuantCache(bits=4)),
    CacheSetting("3 bits", "3 bits", lambda model: TurboQuantCache(bits=3)),
]
