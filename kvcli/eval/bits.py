"""Stored bits per value at a context length, from the methods' formulas; tests compare them with live caches."""

from __future__ import annotations

from typing import Any

from kvcli.attention.session import make_config
from kvcli.registry import parse_method
from kvcli.spec import ModelSpec


def stored_bits(name: str, settings: dict[str, Any], spec: ModelSpec, contexts: list[int]) -> dict[str, Any]:
    """Bits per value of one sequence in a 16-bit model, without the artifact and per-sequence state.

    Args:
        name: a method with or without bits, such as `kivi-2`.
        settings: its settings.
        spec: the model's shapes.
        contexts: lengths of the prompt, each a cache of its own.

    Returns:
        Nominal bits; stored bits of encoded keys and of values, scales and norms included; bits over all tokens at each
        context, window and positions included.
    """
    method, from_bits = parse_method(name)
    config = make_config(method, {**from_bits, **settings})
    codecs = [method.build(spec, config, layer_idx) for layer_idx in range(spec.num_layers)]
    key = sum(codec.key.bits_per_token() for codec in codecs) / len(codecs)
    value = sum(codec.value.bits_per_token() for codec in codecs) / len(codecs)
    group = max(codec.tokens_per_group for codec in codecs)
    effective = []
    for context in contexts:
        tokens = max(0, context - config.sink_length)
        coded_keys, coded_values = (schedule.encoded_now(tokens) for schedule in method.schedules(config))
        window = context - min(coded_keys, coded_values) // group * group
        total = coded_keys * key + coded_values * value + 2 * window * 16 * spec.kv_dim
        positions = context * (32 + 8) / spec.num_layers
        effective.append((total + positions) / (2 * context * spec.kv_dim))
    return {
        "method": name,
        "settings": settings,
        "nominal": [float(bits) for bits in method.nominal_bits(spec, config)],
        "key_bits": key / spec.kv_dim,
        "value_bits": value / spec.kv_dim,
        "effective": effective,
    }
