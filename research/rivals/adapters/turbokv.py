"""turbokv."""

from __future__ import annotations

from turboquant.cache import TurboQuantCache

from research.rivals.protocol import CacheSetting

SETTINGS = [
    CacheSetting(
        f"{bits} bits", claim, lambda model, bits=bits: TurboQuantCache(model.config, nbits=bits, device="cpu")
    )
    for bits, claim in ((4, "about 4 times smaller"), (2, "up to 7 times smaller"))
]
