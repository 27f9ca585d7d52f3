"""spectralquant: compresses what was read after the prompt, calibrated by its own sentences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import spectralquant as package
from spectralquant.integrations.dynamic_cache import compress_prefill_cache
from transformers import AutoTokenizer, DynamicCache

from research.rivals.protocol import CacheSetting


def compress(model: Any, cache: Any) -> Any:
    """The cache that the package goes on with."""
    made = package.SpectralQuant(compression="standard", device="cpu")
    made.calibrate(model, AutoTokenizer.from_pretrained(Path(model.config._name_or_path)))
    return compress_prefill_cache(made.engine, cache)[0]


SETTINGS = [CacheSetting("standard", "5.95x, sent", lambda model: DynamicCache(), compress)]
