"""Layers beside those of codes: sliding windows and states, whose cache and attention vLLM keeps."""

from collections.abc import Callable
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


def tokens_beside(least: int, token_bytes: Callable[[int], int], beside: LayersBeside) -> int:
    """Tokens of a page of codes, `least` times a power of two: those with which the smaller pages are padded least.

    vLLM gives all layers of a model pages of the same number of bytes. Pages of codes are as large as those of states,
    which vLLM pads alone.
    """
    size = least
    if not beside.nbytes:
        return size
    while 2 * size * token_bytes(2 * size) <= beside.nbytes:
        size *= 2
    nbytes, larger = size * token_bytes(size), 2 * size * token_bytes(2 * size)
    is_better = beside.has_states or larger * nbytes < beside.nbytes**2
    return 2 * size if nbytes < beside.nbytes and is_better else size


def _state(layer: Any) -> MambaSpec:
    """The spec of a layer of states, without what vLLM adds to make it as large as others."""
    return MambaSpec(shapes=tuple(layer.get_state_shape()), dtypes=layer.get_state_dtype(), block_size=-1)
