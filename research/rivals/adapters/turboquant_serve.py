"""turboquant-serve: for heads of 64 channels its documentation asks for keys of 8 bits."""

from __future__ import annotations

from turboquant import TurboQuantCache

from research.rivals.protocol import CacheSetting, in_steps


def cache(key_bits: int) -> object:
    """A cache of the model's dtype."""
    return lambda model: TurboQuantCache(key_bits=key_bits, value_bits=4, device="cpu", dtype=model.dtype)


PASSES = [CacheSetting("K8, V4", "-", cache(8)), CacheSetting("K4, V4", "3x to 4x", cache(4))]
SETTINGS = [*PASSES, *map(in_steps, PASSES)]
