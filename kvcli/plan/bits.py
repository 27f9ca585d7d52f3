"""Stored bits per value at a context length, from the methods' formulas; tests compare them with live caches."""

from __future__ import annotations

from typing import Any

import torch

from kvcli.attention.attach import build_codecs, make_config
from kvcli.plan.cache import CachePlan
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
    plan = CachePlan.of_codecs(spec, method, config, build_codecs(method, spec, config), torch.float16)
    key = sum(8 * layer.key_group / layer.key_tokens for layer in plan.layers) / len(plan.layers)
    value = sum(8 * layer.value_group / layer.value_tokens for layer in plan.layers) / len(plan.layers)
    effective = []
    for context in contexts:
        memory = plan.memory(context)
        positions = context * (32 + 8)
        held = 8 * (memory.code_bytes + memory.window_bytes) + positions
        effective.append(held / (2 * context * spec.kv_dim * spec.num_layers))
    return {
        "method": name,
        "settings": settings,
        "nominal": [float(bits) for bits in method.nominal_bits(spec, config)],
        "key_bits": key / spec.kv_dim,
        "value_bits": value / spec.kv_dim,
        "effective": effective,
    }
