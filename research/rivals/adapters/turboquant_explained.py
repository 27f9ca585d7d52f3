"""turboquant-explained."""

from __future__ import annotations

import turboquant

from research.rivals.protocol import CacheSetting, in_steps

PASSES = [
    CacheSetting(
        f"{bits} bits",
        claim,
        lambda model, bits=bits: turboquant.patch_model(model, b_key=bits, b_value=bits, device="cpu"),
    )
    for bits, claim in ((4, "4x"), (2, "8x"))
]
SETTINGS = [*PASSES, *map(in_steps, PASSES)]
