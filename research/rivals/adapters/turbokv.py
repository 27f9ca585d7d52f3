"""turbokv."""

from __future__ import annotations

from turboquant.cache import TurboQuantCache

from research.rivals.protocol import CacheSetting

SETTINGS = [
    CacheSetting(
        f"{bits} bits", claim, lambda model, bits=bits: TurboQuantCache(model.config, nbits=bits, device="cpu")
    )
    for bits, claim in ((4, "4x"), (2, "7x"))
]
