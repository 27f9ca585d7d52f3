"""Layers beside those of codes: sliding windows and states, whose cache and attention vLLM keeps."""

from __future__ import annotations

from typing import Any, NamedTuple

from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.kv_cache_interface import MambaSpec

LEAST_TOKENS = 128
"""Of a page beside layers of states."""


class LayersBeside(NamedTuple):
    """Bytes of their largest page, 0 if there are none, and whether there are layers of states (Mamba, DeltaNet)."""

    nbytes: int
    has_states: bool


def layers_beside(config: VllmConfig) -> LayersBeside:
    """Those of a model that is loaded."""
    layers: Any = config.compilation_config.static_forward_context.values()
    kept = [x for x in layers if isinstance(x, AttentionLayerBase) and x.get_attn_backend().get_name() != "CUSTOM"]
    specs = [_state(x) if isinstance(x, MambaBase) else x.get_kv_cache_spec(config) for x in kept]
    return LayersBeside(
        max((spec.page_size_bytes for spec in specs if spec is not None), default=0),
        any(isinstance(x, MambaBase) for x in kept),
    )


def _state(layer: Any) -> MambaSpec:
    """The spec of a layer of states, without what vLLM adds to make it as large as others."""
    return MambaSpec(shapes=tuple(layer.get_state_shape()), dtypes=layer.get_state_dtype(), block_size=-1)
