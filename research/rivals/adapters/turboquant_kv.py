"""turboquant-kv."""

from __future__ import annotations

from typing import Any

from turboquant import TurboQuantProd
from turboquant.hf_cache import turboquant_dynamic_cache

from research.rivals.protocol import CacheSetting


def cache(bits: int) -> Any:
    """A cache whose layers share one quantizer."""
    return lambda model: turboquant_dynamic_cache(
        model.config, TurboQuantProd(bits=bits, head_dim=model.config.head_dim, device="cpu")
    )


SETTINGS = [CacheSetting(f"{bits} bits", f"{bits} bits", cache(bits)) for bits in (4, 3)]
