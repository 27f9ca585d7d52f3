"""vLLM's attention backend on codes: what vLLM asks of a backend around `kvcli.paged.attention`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
from huggingface_hub import snapshot_download
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

from kvcli.attention.backend import choose_backend
from kvcli.cache.ranges import StepRanges
from kvcli.errors import ModelError, UnsupportedModelError, UsageError
from kvcli.integrations.vllm.environment import ARTIFACT, METHOD, choice_of_environment
from kvcli.integrations.vllm.model import codecs_of
from kvcli.paged.attention import Page, PagedAttention
from kvcli.paged.batch import Batch, most_rows
from kvcli.paged.pages import LayerEncoder
from kvcli.paged.rings import RESIDUAL_LENGTH, ResidualRings

_SPARE_RINGS = 16
"""Rings of requests that have just finished, which vLLM does not tell."""

_CONNECTORS = (None, "OffloadingConnector", "ExampleConnector")
"""Connectors of vLLM that move whole pages."""

_CHECKED = 64
"""Passes between two looks at the largest numbers."""


class EngineState:
    """What the layers of a loaded model have in common: RoPE, kernels, and the largest numbers of a pass."""

    def __init__(self, config: VllmConfig) -> None:
        check_engine(config)
        choice = choice_of_environment()
        if choice is None:
            raise UsageError(f"this backend stores codes: set {METHOD} or {ARTIFACT}")
        model, loading = config.model_config, config.load_config
        ranks = config.parallel_config.tensor_parallel_size

        def weights() -> Path:
            folder = Path(model.model)
            if folder.is_dir():
                return folder
            try:
                options = {"revision": model.revision, "cache_dir": loading.download_dir}
                return Path(snapshot_download(model.model, local_files_only=True, **options))
            except (OSError, ValueError) as error:
                raise ModelError(
                    f"the checkpoint of '{model.model}' is no folder and not in the hub's cache"
                ) from error

        dummy = loading.load_format == "dummy"
        exact, codecs, self.rope = codecs_of(model.hf_text_config, choice, ranks, None if dummy else weights)
        device = torch.empty(0, device=config.device_config.device_type).device
        self.ranges = StepRanges(2 * len(codecs), device)
        if hasattr(self.rope, "module"):
            self.rope.module.to(device)
        self.backend = choose_backend(choice.record, codecs, "auto", device)
        self.encoders = []
        for layer_idx, codec in enumerate(codecs):
            codec.to(device).eval()
            codec.use_kernels(self.backend.impl == "fused")
            self.encoders.append(LayerEncoder(codec, layer_idx, model.dtype, self.ranges))

        self.group, self.sinks = codecs[0].key.tokens_per_group, exact.sink_length
        if self.group > 1 and config.kv_transfer_config is not None:
            raise UsageError(
                f"{choice.method} encodes {self.group} tokens together, and a request that pages come back to can "
                "begin within them: choose a method that encodes tokens independently, or omit kv_transfer_config"
            )
        rings = config.scheduler_config.max_num_seqs + _SPARE_RINGS
        residual_length = choice.named.get("residual_length", RESIDUAL_LENGTH)
        self.make_rings = partial(ResidualRings, rings, residual_length, self.group, device)
        self.rings = list[ResidualRings]()
        self.tokens: Tokens | None = None  # of the last pass
        self.num_heads = codecs[0].key.spec.num_heads
        self._passes = 0

    def check(self) -> None:
        """CacheError: numbers of the passes so far exceed the range of the codes, or exact keys are lost."""
        self.ranges.check()
        for rings in self.rings:
            rings.check()

    def check_sometimes(self) -> None:
        """`check`, which waits for the GPU, before every `_CHECKED`-th pass; prompts are looked at after each."""
        self._passes += 1
        if self._passes % _CHECKED == 0:
            self.check()


_made: list[tuple[VllmConfig, EngineState]] = []
"""The last engine of this process, which has one at a time."""


def engine_state(config: VllmConfig) -> EngineState:
    """Those of an engine, made once for all of its layers."""
    if not _made or _made[0][0] is not config:
        # vLLM loads weights in its own dtype and on the GPU by default, which codecs are made without
        with set_default_torch_dtype(torch.float32), torch.device("cpu"):
            _made[:] = [(config, EngineState(config))]
    return _made[0][1]


def check_engine(config: VllmConfig) -> None:
    """UsageError: the engine has a feature that was not tried with codes in pages."""
    parallel, cache, transfer = config.parallel_config, config.cache_config, config.kv_transfer_config
    connector = None if transfer is None else transfer.kv_connector
    for what, on in {
        "speculative decoding": config.speculative_config is not None,
        f"transfer of pages by {connector}": connector not in _CONNECTORS,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        f"kv_cache_dtype '{cache.cache_dtype}'": cache.cache_dtype != "auto",
    }.items():
        if on:
            raise UsageError(f"{what} and codes in pages do not go together")


class CodesBackend(AttentionBackend):
    """The backend of a layer, once `page` says how it lays out a page of so many tokens."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto"]
    page: ClassVar[Callable[[int], Page] | None] = None

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
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """The spec of a page of codes."""
        return replace(spec, num_head_slots=1, state_content_bytes=cls.token_bytes(spec), dtype=torch.uint8)

    @classmethod
    def token_bytes(cls, spec: AttentionSpec) -> int:
        """Bytes of a token in a page. UnsupportedModelError: another kind of layer, or one beside others."""
        if type(spec) is not FullAttentionSpec or cls.page is None:
            raise UnsupportedModelError(f"layers of {type(spec).__name__} in this model have no codes in pages")
        return -(-cls.page(spec.block_size).nbytes // spec.block_size)


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

        Raises:
            UnsupportedModelError: attention that is not causal.
            CacheError: as of `EngineState.check`.
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
        **others: Any,
    ) -> None:
        for what, on in {
            "latent attention (MLA)": "kv_lora_rank" in others,
            "ALiBi": alibi_slopes is not None,
            "a sliding window": sliding_window is not None,
            f"attention of type {attn_type}": attn_type != AttentionType.DECODER,
            "layers that share keys and values": kv_sharing_target_layer_name is not None,
            ", ".join(others): any(x is not None and x is not False for x in others.values()),
        }.items():
            if on:
                raise UnsupportedModelError(f"codes in pages do not support {what}")
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads or num_heads
        self.scale, self.kv_cache_dtype, self._soft_cap = scale, kv_cache_dtype, logits_soft_cap or None
        self._config = get_current_vllm_config()

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Finds the layer's codecs, and tells vLLM the bytes of its tokens."""
        name, layer = self.named_layer()
        layers, layer_idx = engine_state(self._config), extract_layer_index(name)
        encoder, backend = layers.encoders[layer_idx], layers.backend.with_soft_cap(self._soft_cap)
        spec, dtype = encoder.codec.key.spec, self._config.model_config.dtype
        recent = layers.make_rings()
        shape = recent.count, recent.length, 2, spec.num_kv_heads, spec.head_dim
        rings = torch.zeros(shape, dtype=dtype, device=layers.ranges.device)
        self._attend = PagedAttention(encoder, backend, self.scale, rings, self._soft_cap)
        self._last = layers if layer_idx == len(layers.encoders) - 1 else None
        if (ours := (spec.num_kv_heads, spec.head_dim)) != (self.num_kv_heads, self.head_size):
            here, told = (f"{x[0]} kv heads of {x[1]}" for x in (ours, (self.num_kv_heads, self.head_size)))
            raise UnsupportedModelError(f"vLLM gives {name} {told} channels, where the model's config says {here}")
        self._page = cache(partial(Page, encoder, dtype, sinks=layers.sinks))
        layer.attn_backend = type("LayerBackend", (layer.attn_backend,), {"page": staticmethod(self._page)})

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

        Raises:
            CacheError: numbers of the pass exceed the range of the codes.
        """
        if attn_metadata is None:
            return output.fill_(0)
        page, pages = self._page(kv_cache.shape[2]), kv_cache.view(len(kv_cache), -1)
        self._attend(page, pages, attn_metadata.batch, query, key, value, output)
        if self._last is not None and (query.is_cpu or not attn_metadata.is_decode):
            self._last.check()
        return output
