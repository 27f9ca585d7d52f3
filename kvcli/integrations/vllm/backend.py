"""vLLM's attention backend on codes: every token is a row of bytes per layer, its keys' codes and then its values'.

New tokens of a pass are exact to each other; all earlier ones are read from codes. There are no sinks and no residual
window. Tokens that are read are decoded in PyTorch, request by request: `attend` is where kernels that read pages go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

from kvcli.attention.reference import attend_codes, merge_state, partial_attention
from kvcli.cache.ranges import StepRanges
from kvcli.errors import ModelError, UnsupportedModelError, UsageError
from kvcli.integrations.rows import LayerRows
from kvcli.integrations.vllm.model import ARTIFACT, METHOD, Settings, codecs_of
from kvcli.methods.layer_codec import EncodedTokens
from kvcli.rope import Rotation, TokenRotations


class Pages:
    """What the layers of a loaded model have in common: their rows, RoPE, and the largest numbers of a pass."""

    def __init__(self, config: VllmConfig) -> None:
        check_engine(config)
        settings = Settings.read()
        if settings is None:
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
        codecs, self.rope = codecs_of(model.hf_text_config, settings, ranks, None if dummy else weights)
        device = torch.empty(0, device=config.device_config.device_type).device
        self.ranges = StepRanges(2 * len(codecs), device)
        if hasattr(self.rope, "module"):
            self.rope.module.to(device)
        self.rows = []
        for layer_idx, codec in enumerate(codecs):
            codec.to(device).eval()
            codec.use_kernels(device.type == "cuda")
            self.rows.append(LayerRows(codec, layer_idx, model.dtype, self.ranges))


_made: list[tuple[VllmConfig, Pages]] = []
"""The last engine of this process, which has one at a time."""


def pages_of(config: VllmConfig) -> Pages:
    """Those of an engine, made once for all of its layers."""
    if not _made or _made[0][0] is not config:
        # vLLM loads weights in its own dtype and on the GPU by default, which codecs are made without
        with set_default_torch_dtype(torch.float32), torch.device("cpu"):
            _made[:] = [(config, Pages(config))]
    return _made[0][1]


def check_engine(config: VllmConfig) -> None:
    """UsageError: the engine has a feature that was not tried with codes in pages."""
    parallel, cache = config.parallel_config, config.cache_config
    for what, on in {
        "speculative decoding": config.speculative_config is not None,
        "transfer of pages (kv_transfer_config)": config.kv_transfer_config is not None,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        f"kv_cache_dtype '{cache.cache_dtype}'": cache.cache_dtype != "auto",
    }.items():
        if on:
            raise UsageError(f"{what} and codes in pages do not go together")


class CodesBackend(AttentionBackend):
    """The backend of a layer whose tokens take `row_bytes` bytes; 0 before its weights are loaded."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto"]
    row_bytes: ClassVar[int] = 0

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
        """The spec of a page of rows. UnsupportedModelError: another kind of layer, or one beside others."""
        if type(spec) is not FullAttentionSpec or not cls.row_bytes:
            raise UnsupportedModelError(f"layers of {type(spec).__name__} in this model have no codes in pages")
        return replace(spec, num_head_slots=1, state_content_bytes=cls.row_bytes, dtype=torch.uint8)


@dataclass(frozen=True)
class Request:
    """A request's part of a pass: new tokens [start, stop), and earlier ones, which are read.

    Attributes:
        slots: int64 [earlier tokens].
        rotations: of the earlier tokens.
    """

    start: int
    stop: int
    slots: Tensor
    rotations: TokenRotations


@dataclass(frozen=True)
class Batch(AttentionMetadata):
    """The tokens of a pass.

    Attributes:
        rotation: RoPE of the new tokens, float32.
        stored: which of the new tokens have a slot, int64 [stored]: none where vLLM runs for its own sake.
        slots: of these, int64 [stored].
    """

    requests: Sequence[Request]
    rotation: Rotation
    stored: Tensor
    slots: Tensor


class BatchBuilder(AttentionMetadataBuilder[Batch]):
    """Finds slots and positions of the tokens of a pass."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._rope = pages_of(vllm_config).rope

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Batch:
        """The batch of a pass; UnsupportedModelError: attention that is not causal."""
        common, size = common_attn_metadata, self.kv_cache_spec.block_size
        if common.causal is not True:
            raise UnsupportedModelError("attention that is not causal cannot be computed on codes in pages")
        starts, lengths = common.query_start_loc_cpu[: common.num_reqs + 1].tolist(), common.seq_lens.tolist()
        requests, positions = [], []
        for row, (start, stop) in enumerate(pairwise(starts)):
            token = torch.arange(lengths[row], device=common.block_table_tensor.device)
            old, new = token.split((len(token) - (stop - start), stop - start))
            slots = common.block_table_tensor[row, old // size].long() * size + old % size
            requests.append(Request(start, stop, slots, TokenRotations(self._rope, old.unsqueeze(0))))
            positions.append(new)
        rotation = self._rope.rotation(torch.cat(positions).unsqueeze(0), torch.float32)
        slots = common.slot_mapping[: starts[-1]]
        stored = (slots >= 0).nonzero().squeeze(1)
        return Batch(requests, rotation, stored, slots[stored].long())


class CodesAttention(AttentionImpl[Batch]):
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
        layers = self._config.compilation_config.static_forward_context
        name, layer = next((name, x) for name, x in layers.items() if getattr(x, "impl", None) is self)
        pages, layer_idx = pages_of(self._config), extract_layer_index(name)
        self._rows = pages.rows[layer_idx]
        self._ranges = pages.ranges if layer_idx == len(pages.rows) - 1 else None
        spec = self._rows.codec.key.spec
        if (ours := (spec.num_kv_heads, spec.head_dim)) != (self.num_kv_heads, self.head_size):
            here, told = (f"{x[0]} kv heads of {x[1]}" for x in (ours, (self.num_kv_heads, self.head_size)))
            raise UnsupportedModelError(f"vLLM gives {name} {told} channels, where the model's config says {here}")
        layer.attn_backend = type("LayerBackend", (CodesBackend,), {"row_bytes": self._rows.nbytes})

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Batch | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Encodes the new tokens, and attends to them and to earlier ones.

        Args:
            query: new tokens, [tokens, num_heads, head_dim], padding at the end.
            key, value: the same of kv heads, [tokens, num_kv_heads, head_dim].
            kv_cache: uint8 [blocks, 1, block size, bytes of a row].
            attn_metadata: None in a pass that measures memory.
            output: written, [tokens, num_heads, head_dim].

        Raises:
            CacheError: numbers of the pass exceed the range of the codes.
        """
        if attn_metadata is None:
            return output.fill_(0)
        slots, size, count = attn_metadata.slots, kv_cache.shape[2], attn_metadata.rotation.cos.shape[2]
        rows = self._rows.encode(key[:count], value[:count], attn_metadata.rotation)
        kv_cache[slots // size, 0, slots % size] = torch.cat(rows, 1)[attn_metadata.stored]
        if self._ranges is not None:
            self._ranges.check()
        for request in attn_metadata.requests:
            new = slice(request.start, request.stop)
            output[new] = self.attend(query[new], key[new], value[new], kv_cache, request)
        return output

    def attend(self, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, request: Request) -> Tensor:
        """Attention of a request's new tokens to themselves and to the codes of earlier ones.

        Shapes are those of `forward`; the result is [tokens, num_heads, head_dim] of the query's dtype.
        """
        query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        causal = torch.ones(1, query.shape[2], query.shape[2], dtype=torch.bool, device=query.device).tril()
        part = partial_attention(query, key, value, causal, self.scale, self._soft_cap)
        if len(request.slots):
            size = kv_cache.shape[2]
            found = kv_cache[request.slots // size, 0, request.slots % size]
            keys, values = found.split((self._rows.keys.nbytes, self._rows.values.nbytes), 1)
            rotations = request.rotations if self._rows.codec.needs_rotations else None
            codes = self._rows.keys.unpack(keys), None, self._rows.values.unpack(values)
            old = attend_codes(
                self._rows.codec, query, EncodedTokens(*codes, rotations, None), self.scale, self._soft_cap
            )
            part = merge_state(part, old)
        return part[0][0].transpose(0, 1).to(query.dtype)
