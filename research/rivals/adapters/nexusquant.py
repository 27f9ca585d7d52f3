"""nexusquant-kv: what was read is compressed after the prompt, or each pass as it is written."""

from __future__ import annotations

from typing import Any

from nexusquant import compress_kv_cache
from nexusquant.integrations.quantized_cache import E8QuantizedCache
from transformers import DynamicCache

from research.rivals.protocol import CacheSetting

CLAIM = "2.625 bits"


def compress(model: Any, cache: Any) -> Any:
    """As the quickstart has it, with the bits of its table."""
    theta = model.config.rope_parameters["rope_theta"]
    head_dim = model.config.head_dim
    return compress_kv_cache(cache, mode="quant_only", head_dim=head_dim, rope_base=theta, key_bits=3, value_bits=2)


SETTINGS = [
    CacheSetting("compress_kv_cache", CLAIM, lambda model: DynamicCache(), compress),
    CacheSetting("E8QuantizedCache", CLAIM, E8QuantizedCache.from_model),
]
