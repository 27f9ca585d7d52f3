"""The backend in vLLM 0.26, which asks a layer, and not its backend, what a page is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

from kvcli.errors import UnsupportedModelError
from kvcli.integrations.vllm import backend


class CodesBackend(backend.CodesBackend):
    """The backend of a layer whose pages are one head of bytes."""

    @staticmethod
    def get_impl_cls() -> type[CodesAttention]:
        return CodesAttention

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """The shape of `CodesAttention.forward`."""
        return num_blocks, num_kv_heads, block_size, head_size

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """The spec of a page of codes, as keys of one head without values."""
        if type(spec) is not FullAttentionSpec or cls.layer is None or cls.layer.beside.nbytes:
            raise UnsupportedModelError("models with layers of several kinds have no codes in the pages of vLLM 0.26")
        size = cls.layer.token_bytes(spec.block_size)
        return replace(spec, num_kv_heads=1, head_size=size, head_size_v=0, dtype=torch.uint8)


class CodesAttention(backend.CodesAttention):
    """Attention of a layer, whose spec goes through its backend as vLLM does it from 0.31 on."""

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        super().process_weights_after_loading(act_dtype)
        _, layer = self.named_layer()
        spec_of = type(layer).get_kv_cache_spec

        def get_kv_cache_spec(config: Any) -> AttentionSpec:
            spec: AttentionSpec = layer.attn_backend.customize_spec(spec_of(layer, config))
            return spec

        layer.get_kv_cache_spec = get_kv_cache_spec
