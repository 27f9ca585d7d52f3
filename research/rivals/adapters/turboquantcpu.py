"""turboquantcpu: patches a model and compresses beside the model's own cache."""

from __future__ import annotations

from typing import Any

from transformers import DynamicCache
from turboquantcpu import patch_model

from research.rivals.protocol import CacheSetting


def cache(bits: int, mode: str) -> Any:
    """The model's own cache, which attention reads, and from it the compressed one."""

    def make(model: Any) -> DynamicCache:
        both = DynamicCache()
        both.compressed = patch_model(model, mode=mode, bits=bits, verbose=False)
        return both

    return make


SETTINGS = [
    CacheSetting("prod, 4 bits", "7x, lossless", cache(4, "prod")),
    CacheSetting("qjl, 1 bit", "14x", cache(1, "qjl")),
]
