"""kakeyalattice: the balanced and the aggressive point of its documentation."""

from __future__ import annotations

from typing import Any

from kakeyalattice.hf import KakeyaLatticeCache

from research.rivals.protocol import CacheSetting


def cache(q_range: int) -> Any:
    """A cache of the E8 lattice."""
    return lambda model: KakeyaLatticeCache(
        variant="e8",
        q_range=q_range,
        num_hidden_layers=model.config.num_hidden_layers,
        head_dim=model.config.head_dim,
        device="cpu",
    )


SETTINGS = [
    CacheSetting("E8, q_range 38", "2.5x, nominal", cache(38)),
    CacheSetting("E8, q_range 10", "3.4x, nominal", cache(10)),
]
