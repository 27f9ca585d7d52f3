"""turboquant."""

from __future__ import annotations

from turboquant import TurboQuantCache

from research.rivals.protocol import CacheSetting

SETTINGS = [
    CacheSetting("4 bits", "about 4 times smaller, same quality", lambda model: TurboQuantCache(bits=4)),
    CacheSetting("3 bits", "3 bits per value", lambda model: TurboQuantCache(bits=3)),
]
