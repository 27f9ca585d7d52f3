"""turboquant-serve: for heads of 64 channels its documentation asks for keys of 8 bits."""

from __future__ import annotations

from turboquant import TurboQuantCache

from research.rivals.protocol import CacheSetting, in_steps


def cache(key_bits: int) -> object:
    """A cache of the model's dtype."""
    return lambda model: TurboQuantCache(key_bits=key_bits, value_bits=4, device="cpu", dtype=model.dtype)


PASSES = [
    CacheSetting("keys 8, values 4 bits", "-", cache(8)),
    CacheSetting("keys 4, values 4 bits", "3x to 4x", cache(4)),
]
SETTINGS = [*PASSES, *map(in_steps, PASSES)]
