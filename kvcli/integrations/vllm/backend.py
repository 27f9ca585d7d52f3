"""vLLM's attention backend on codes: what vLLM asks of a backend around `kvcli.paged.attention`."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

from kvcli.errors import UnsupportedModelError
from kvcli.integrations.vllm.beside import LEAST_TOKENS, LayersBeside, layers_beside, tokens_beside
from kvcli.integrations.vllm.engine import EngineState, engine_state
from kvcli.kernels.launch import power_of_two
from kvcli.paged.attention import PagedAttention
from kvcli.paged.batch import Batch, most_rows
from kvcli.paged.rings import ResidualRings


class CodesBackend(AttentionBackend):
    """The backend of a layer, once it is known which."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto"]
    layer: ClassVar[CodesAttention | None] = None

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[CodesAttention]:
        return CodesAttention

    @staticmethod
    def get_builder_cls() -> type[BatchBuilder]:
        return BatchBuilder

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True  # so that `CodesAttention` says which backend such layers need

    @classmethod
    def get_supported_kernel_block_sizes(cls, spec: Any = None) -> list[int | MultipleOf]:
        """Beside layers of states, which vLLM then gives pages of as many tokens: prefixes are whole pages of both."""
        has_states = cls.layer is not None and cls.layer.beside.has_states
        return [MultipleOf(cls.page_tokens(LEAST_TOKENS) if has_states else 1)]

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """The spec of a page of codes; vLLM asks for that of one token, too, to know its bytes."""
        if type(spec) is not FullAttentionSpec or cls.layer is None:
            raise UnsupportedModelError(f"layers of {type(spec).__name__} in this model have no codes in pages")
        is_question = spec.block_size == 1 and cls.layer.block_size > 1
        size = cls.page_tokens(LEAST_TOKENS if is_question else spec.block_size)
        given = {"block_size": 1 if is_question else size, "state_content_bytes": cls.layer.token_bytes(size)}
        return replace(spec, num_head_slots=1, dtype=torch.uint8, **given)

    @classmethod
    def page_tokens(cls, least: int) -> int:
        """Tokens of a page: as many as asked for, or, beside layers that vLLM keeps, `tokens_beside`."""
        assert cls.layer is not None
        return tokens_beside(cls.layer.least_tokens(least), cls.layer.token_bytes, cls.layer.beside)


class Tokens(AttentionMetadata):
    """The tokens of a pass.

    Where they go is found by the first layer and not before, so that it is a part of a pass that is captured as a CUDA
    graph, and is found anew when that is replayed: from tensors of vLLM that stay where they are.
    """

    def __init__(
        self, layers: EngineState, common: CommonAttentionMetadata, page_size: int, rings: ResidualRings
    ) -> None:
        self.common, self.rings = common, rings
        self._layers, self._size = layers, page_size
        self.is_decode = common.max_query_len == 1 and common.num_reqs == common.num_actual_tokens

    @cached_property
    def batch(self) -> Batch:
        """Where the tokens go; rings are given when it is asked for the first time."""
        common, size, layers = self.common, self._size, self._layers
        if self.is_decode:
            counts = [1] * common.num_reqs
        else:
            counts = [b - a for a, b in pairwise(common.query_start_loc_cpu[: common.num_reqs + 1].tolist())]
        table = common.block_table_tensor[: common.num_reqs, : -(-common.max_seq_len // size)]
        bounds = common.seq_lens_cpu_upper_bound
        return Batch.of(
            counts,
            common.seq_lens[: common.num_reqs],
            table,
            common.slot_mapping[: sum(counts)],
            layers.rope,
            page_size=size,
            group=layers.group,
            sinks=layers.sinks,
            rings=self.rings,
            null_page=0 if self.is_decode else None,  # vLLM's own, which no request has
            most_rows=most_rows(table.shape[1] * size, layers.num_heads),
            has_codes=self.is_decode or bounds is None or bounds[: len(counts)].tolist() != counts,
            fused=layers.backend.impl == "fused",
        )


class BatchBuilder(AttentionMetadataBuilder[Tokens]):
    """Passes on what vLLM knows of a pass."""

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> AttentionCGSupport:
        """Passes that decode are captured, but for methods without kernels: of these, whole tables would be decoded."""
        backend = engine_state(vllm_config).backend
        if backend.attend_codes is backend.attend_dequantized:
            return AttentionCGSupport.NEVER
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._layers = engine_state(vllm_config)
        self._rings = self._layers.make_rings()
        self._layers.rings.append(self._rings)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Tokens:
        """The tokens of a pass.

        UnsupportedModelError: attention that is not causal; CacheError: as of `EngineState.check`.
        """
        if common_attn_metadata.causal is not True:
            raise UnsupportedModelError("attention that is not causal cannot be computed on codes in pages")
        layers, tokens, common = self._layers, self._layers.tokens, common_attn_metadata
        # there is a builder for all layers whose pages have as many bytes: the first one that is asked finds the tokens
        # of the pass, with its rings, for those that have the same block table
        if tokens is None or tokens.common is not common or tokens.rings is self._rings:
            tokens = layers.tokens = Tokens(layers, common, self.kv_cache_spec.block_size, self._rings)
            layers.check_sometimes()
        return tokens


class CodesAttention(AttentionImpl[Tokens]):
    """Attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> None:
        for what, on in {
            "latent attention (MLA)": "kv_lora_rank" in others,
            "ALiBi": alibi_slopes is not None,
            "a sliding window, which vLLM itself attends to with "
            """--attention-config '{"backend_per_kind": {"full_attention": "CUSTOM"}}'""": sliding_window is not None,
            f"attention of type {attn_type}": attn_type != AttentionType.DECODER,
            "layers that share keys and values": kv_sharing_target_layer_name is not None,
            ", ".join(others): any(x is not None and x is not False for x in others.values()),
        }.items():
            if on:
                raise UnsupportedModelError(f"codes in pages do not support {what}")
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads or num_heads
        self.scale, self.kv_cache_dtype, self._soft_cap = scale, kv_cache_dtype, logits_soft_cap or None
        self.sinks = sinks
        self._config = get_current_vllm_config()

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Finds the layer's codecs, and tells vLLM the bytes of its tokens."""
        name, layer = self.named_layer()
        layers, layer_idx = engine_state(self._config), extract_layer_index(name)
        if layer_idx not in layers.encoders:
            raise UnsupportedModelError(f"{name} attends to the whole context here, but not by the model's config")
        encoder, backend = layers.encoders[layer_idx], layers.backend.with_soft_cap(self._soft_cap)
        spec, dtype = encoder.codec.key.spec, self._config.model_config.dtype
        recent = layers.make_rings()
        shape = recent.count, recent.length, 2, spec.num_kv_heads, spec.head_dim
        rings = torch.zeros(shape, dtype=dtype, device=layers.ranges.device)
        self._attend = PagedAttention(encoder, backend, self.scale, rings, self._soft_cap, self.sinks)
        self._last = layers if layer_idx == max(layers.encoders) else None
        if (ours := (spec.num_kv_heads, spec.head_dim)) != (self.num_kv_heads, self.head_size):
            here, told = (f"{x[0]} kv heads of {x[1]}" for x in (ours, (self.num_kv_heads, self.head_size)))
            raise UnsupportedModelError(f"vLLM gives {name} {told} channels, where the model's config says {here}")
        self.page = partial(layers.page, encoder)
        layer.attn_backend = type("LayerBackend", (layer.attn_backend,), {"layer": self})

    @property
    def beside(self) -> LayersBeside:
        """What vLLM keeps of other layers."""
        return layers_beside(self._config)

    @property
    def block_size(self) -> int:
        """Tokens of vLLM's own pages."""
        return int(self._config.cache_config.block_size)

    def least_tokens(self, asked: int) -> int:
        """Beside other layers, pages have room for sinks and for a group of keys."""
        layers = engine_state(self._config)
        needed = max(layers.sinks, layers.group) if self.beside.nbytes else 0
        return asked * power_of_two(max(1, -(-needed // asked)))

    def token_bytes(self, size: int) -> int:
        """Bytes of a token in pages of `size`; beside other layers, in those of the layer with the largest."""
        pages = engine_state(self._config).pages(size) if self.beside.nbytes else [self.page(size)]
        return max(page.token_bytes for page in pages)

    def named_layer(self) -> tuple[str, Any]:
        """The layer of vLLM that this is in, and its name."""
        modules = self._config.compilation_config.static_forward_context
        return next((name, x) for name, x in modules.items() if getattr(x, "impl", None) is self)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Tokens | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Encodes the new tokens, and attends to them and to earlier ones.

        Args:
            query: new tokens, [tokens, num_heads, head_dim], padding at the end.
            key, value: the same of kv heads, [tokens, num_kv_heads, head_dim].
            kv_cache: uint8 [blocks, 1, block size, bytes per token].
            attn_metadata: None in a pass that measures memory.
            output: written, [tokens, num_heads, head_dim].

        CacheError: numbers of the pass exceed the range of the codes.
        """
        if attn_metadata is None:
            return output.fill_(0)
        page, pages = self.page(kv_cache.shape[2]), kv_cache.view(len(kv_cache), -1)
        self._attend(page, pages, attn_metadata.batch, query, key, value, output)
        if self._last is not None and (query.is_cpu or not attn_metadata.is_decode):
            self._last.check()
        return output
