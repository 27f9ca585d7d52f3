"""CommVQ's entry in the registry (arXiv 2506.18879)."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean
from typing import Any

import torch

from kvcli.methods.commvq.allocate import allocate
from kvcli.methods.commvq.config import CommVQConfig
from kvcli.methods.commvq.fit import fit_layer
from kvcli.methods.commvq.keys import CommVQKeyCodec
from kvcli.methods.commvq.values import CommVQValueCodec
from kvcli.methods.head_groups import KeyGroups, ValueGroups
from kvcli.methods.layer_codec import LayerCodec
from kvcli.methods.method import Method
from kvcli.spec import ModelSpec


def _build(spec: ModelSpec, config: CommVQConfig, layer_idx: int) -> LayerCodec[Any, Any]:
    resolved = config.resolve(spec).for_layer(layer_idx)
    key_offset = torch.zeros(spec.num_kv_heads, spec.head_dim)
    if resolved.value_groups == 1:
        return LayerCodec(CommVQKeyCodec(spec, resolved), CommVQValueCodec(spec, resolved), key_offset)
    heads = {name: getattr(spec, name) // resolved.value_groups for name in ("num_heads", "num_kv_heads")}
    part, groups = replace(spec, **heads), range(resolved.value_groups)
    bits = resolved.value_code_bits // len(groups)
    of_group = resolved.model_copy(update={"value_groups": 1, "value_code_bits": bits})
    keys = KeyGroups([CommVQKeyCodec(part, of_group) for _ in groups])
    return LayerCodec(keys, ValueGroups([CommVQValueCodec(part, of_group) for _ in groups]), key_offset)


def _nominal_bits(spec: ModelSpec, config: CommVQConfig) -> tuple[float, float]:
    """CommVQ Eq. 21 for keys, Eq. 10 for values."""
    resolved = config.resolve(spec)
    residuals = fmean(resolved.layer_residuals or [resolved.num_residuals])
    value_bits = fmean(resolved.layer_value_bits or [resolved.value_code_bits])
    return residuals * resolved.bits_per_code / 2 / resolved.pairs_per_group, value_bits / spec.kv_dim


METHOD = Method(
    name="commvq",
    summary="RoPE-commutative vector quantization of keys, additive quantization of values",
    bits="1, 2",
    paper="CommVQ, ICML 2025",
    arxiv="2506.18879",
    config_cls=CommVQConfig,
    build=_build,
    nominal_bits=_nominal_bits,
    paper_settings={
        f"commvq-{bits}": {"sink_length": 0, "residual_length": 128, "pairs_per_group": 64} for bits in (2, 1)
    },
    fit=fit_layer,
    allocate=allocate,
    fit_metrics={
        "key_bits": "bits per value of key codes",
        "value_bits": "bits per value of value codes",
        "key_nmse": "held-out error of weighted keys (share of their variance)",
        "value_nmse": "held-out error of weighted values (share of their square)",
        "dead_key_rows": "key codebook rows that no training vector uses",
    },
    attend_kernels="kvcli.methods.commvq.attend_kernels",
    example_settings={
        "residual_length": 6,
        "flush_block": 1,
        "codebook_size": 8,
        "num_residuals": 3,
        "key_iterations": 4,
        "value_iterations": 3,
    },
    bench=("commvq-1", "commvq-2"),
)
