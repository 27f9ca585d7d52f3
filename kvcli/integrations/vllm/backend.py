"""vLLM's attention backend on codes: a page holds the codes of its tokens' keys and values.

New tokens of a pass are exact to each other; all earlier ones are read from codes, on a GPU by the method's kernels.
There are no sinks and no residual window. Where keys are encoded in groups, those of the last group are exact until it
is whole, in bytes of its page.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from math import lcm
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

from kvcli.attention.backend import choose_backend
from kvcli.attention.reference import merge_state, partial_attention
from kvcli.cache.ranges import StepRanges
from kvcli.errors import ModelError, UnsupportedModelError, UsageError
from kvcli.integrations.pages import LayerEncoder
from kvcli.integrations.vllm.model import ARTIFACT, METHOD, Settings, codecs_of
from kvcli.methods.base import Codes
from kvcli.methods.layer_codec import EncodedTokens
from kvcli.methods.pages import PageTable, check_page_size
from kvcli.registry import get_method, parse_method
from kvcli.rope import Rotation, TokenRotations


class Layers:
    """What the layers of a loaded model have in common: RoPE, kernels, and the largest numbers of a pass."""

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
        self.backend = choose_backend(get_method(parse_method(settings.method)[0].name), codecs, "auto", device)
        self.encoders = []
        for layer_idx, codec in enumerate(codecs):
            codec.to(device).eval()
            codec.use_kernels(self.backend.impl == "fused")
            self.encoders.append(LayerEncoder(codec, layer_idx, model.dtype, self.ranges))

    @property
    def group(self) -> int:
        """Tokens whose keys are encoded together."""
        return self.encoders[0].codec.key.tokens_per_group


_made: list[tuple[VllmConfig, Layers]] = []
"""The last engine of this process, which has one at a time."""


def layers_of(config: VllmConfig) -> Layers:
    """Those of an engine, made once for all of its layers."""
    if not _made or _made[0][0] is not config:
        # vLLM loads weights in its own dtype and on the GPU by default, which codecs are made without
        with set_default_torch_dtype(torch.float32), torch.device("cpu"):
            _made[:] = [(config, Layers(config))]
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


class Page:
    """Where codes are in a layer's pages of `size` tokens: those of values, of keys, and exact keys of an open group.

    Args:
        encoder: of the layer.
        dtype: of exact keys.
        size: tokens of a page.

    Attributes:
        nbytes: of a page, a multiple of its tokens.

    Raises:
        UsageError: a size that is no power of two or below 16, or groups that do not divide a page.
    """

    def __init__(self, encoder: LayerEncoder, dtype: torch.dtype, size: int) -> None:
        codec = encoder.codec
        self.size, self.group = size, codec.key.tokens_per_group
        check_page_size(size)
        if size % self.group:
            raise UsageError(f"--block-size {size} is no multiple of {self.group} tokens, whose keys have a scale")
        self.groups = size // self.group
        self.keys, self.values = encoder.fields(size)
        self._exact = self.group if self.group > 1 else 0, codec.key.spec.kv_dim * dtype.itemsize
        unit = lcm(16, size)
        nbytes = self.keys.nbytes + self.values.nbytes + self._exact[0] * self._exact[1]
        self.nbytes = -(-nbytes // unit) * unit

    def views(self, kv_cache: Tensor) -> tuple[Codes, Codes, Tensor]:
        """Codes of keys and of values, and exact keys, uint8 [pages, tokens, bytes], in a layer's pages."""
        pages = kv_cache.view(len(kv_cache), -1)
        start, (count, width) = self.keys.nbytes + self.values.nbytes, self._exact
        exact = pages[:, start : start + count * width].unflatten(1, (count, width))
        return self.keys.view(pages), self.values.view(pages[:, self.keys.nbytes :]), exact


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
        """The spec of a page of codes. UnsupportedModelError: another kind of layer, or one beside others."""
        if type(spec) is not FullAttentionSpec or cls.page is None:
            raise UnsupportedModelError(f"layers of {type(spec).__name__} in this model have no codes in pages")
        size = spec.block_size
        per_token = cls.page(size).nbytes // size
        return replace(spec, num_head_slots=1, state_content_bytes=per_token, dtype=torch.uint8)


@dataclass(frozen=True)
class Part:
    """Requests of a pass that have as many new tokens and as many keys in an open group, so that they are one batch.

    Attributes:
        tokens: the new tokens' places in the pass, int64 [requests, count].
        past: earlier tokens, int32 [requests].
        open_keys: how many of these have exact keys.
        pages: of all tokens.
        rotations: of the tokens of these pages.
        is_stored: whether the new tokens have slots.
        has_codes: whether there are earlier tokens in whole groups.
    """

    tokens: Tensor
    past: Tensor
    open_keys: int
    pages: PageTable
    rotations: TokenRotations
    is_stored: bool
    has_codes: bool

    def at(self, first: Tensor, count: int, per_page: int) -> tuple[Tensor, Tensor]:
        """Where tokens, or groups, `first` [requests] to first + count - 1 are, of which a page has `per_page`.

        Returns:
            Pages, and places in these, int64 [requests * count].
        """
        index = first.long().unsqueeze(1) + torch.arange(count, device=first.device)
        return self.pages.table.gather(1, index // per_page).flatten().long(), (index % per_page).flatten()


@dataclass(frozen=True)
class Batch(AttentionMetadata):
    """The tokens of a pass.

    Attributes:
        stored: which of the new tokens have a slot, int64 [stored]: none where vLLM runs for its own sake.
        slots: of these, int64 [stored].
        rotation: RoPE of these, float32.
    """

    parts: Sequence[Part]
    stored: Tensor
    slots: Tensor
    rotation: Rotation


class BatchBuilder(AttentionMetadataBuilder[Batch]):
    """Finds slots and positions of the tokens of a pass."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = layers_of(vllm_config)
        self._rope, self._group = layers.rope, layers.group

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Batch:
        """The batch of a pass; UnsupportedModelError: attention that is not causal."""
        common, size = common_attn_metadata, self.kv_cache_spec.block_size
        if common.causal is not True:
            raise UnsupportedModelError("attention that is not causal cannot be computed on codes in pages")
        starts, lengths = common.query_start_loc_cpu[: common.num_reqs + 1].tolist(), common.seq_lens.tolist()
        slots = common.slot_mapping[: starts[-1]]
        device, stored = slots.device, (slots >= 0).nonzero().squeeze(1)
        having_slots, alike = set(stored.tolist()), defaultdict[tuple[int, int, bool], list[int]](list)
        positions = []
        for row, (start, stop) in enumerate(pairwise(starts)):
            past = lengths[row] - (stop - start)
            positions.append(torch.arange(past, lengths[row], device=device))
            if stop > start:
                alike[stop - start, past % self._group, start in having_slots].append(row)
        parts = []
        for (count, open_keys, is_stored), rows in alike.items():
            blocks = max(-(-lengths[row] // size) for row in rows)
            table = common.block_table_tensor[rows, :blocks].int().contiguous()
            tokens = torch.tensor([starts[row] for row in rows], device=device).unsqueeze(1)
            parts.append(
                Part(
                    tokens=tokens + torch.arange(count, device=device),
                    past=torch.tensor([lengths[row] - count for row in rows], dtype=torch.int32, device=device),
                    open_keys=open_keys,
                    pages=PageTable(table, size),
                    rotations=TokenRotations(self._rope, torch.arange(blocks * size, device=device).unsqueeze(0)),
                    is_stored=is_stored,
                    has_codes=any(lengths[row] - count > open_keys for row in rows),
                )
            )
        rotation = self._rope.rotation(torch.cat(positions)[stored].unsqueeze(0), torch.float32)
        return Batch(parts, stored, slots[stored].long(), rotation)


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
        modules = self._config.compilation_config.static_forward_context
        name, layer = next((name, x) for name, x in modules.items() if getattr(x, "impl", None) is self)
        layers, layer_idx = layers_of(self._config), extract_layer_index(name)
        self._encoder, self._backend = layers.encoders[layer_idx], layers.backend.with_soft_cap(self._soft_cap)
        self._ranges = layers.ranges if layer_idx == len(layers.encoders) - 1 else None
        spec = self._encoder.codec.key.spec
        if (ours := (spec.num_kv_heads, spec.head_dim)) != (self.num_kv_heads, self.head_size):
            here, told = (f"{x[0]} kv heads of {x[1]}" for x in (ours, (self.num_kv_heads, self.head_size)))
            raise UnsupportedModelError(f"vLLM gives {name} {told} channels, where the model's config says {here}")
        self._page = cache(partial(Page, self._encoder, self._config.model_config.dtype))
        layer.attn_backend = type("LayerBackend", (CodesBackend,), {"page": staticmethod(self._page)})

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
            kv_cache: uint8 [blocks, 1, block size, bytes per token].
            attn_metadata: None in a pass that measures memory.
            output: written, [tokens, num_heads, head_dim].

        Raises:
            CacheError: numbers of the pass exceed the range of the codes.
        """
        if attn_metadata is None:
            return output.fill_(0)
        batch, page, encoder = attn_metadata, self._page(kv_cache.shape[2]), self._encoder
        keys, values, exact = page.views(kv_cache)
        # all is stored before any is read: a request may share pages that another one fills in this pass
        open_keys = [self._open_keys(page, exact, part, key) for part in batch.parts]
        if len(batch.stored):
            place = batch.slots // page.size, batch.slots % page.size
            page.values.put(values, *place, encoder.encode_values(value[batch.stored]))
            if page.group == 1:
                page.keys.put(keys, *place, encoder.encode_keys(key[batch.stored], batch.rotation))
        for part, kept in zip(batch.parts, open_keys, strict=True):
            if page.group > 1 and part.is_stored:
                tokens = torch.cat((kept, key[part.tokens].transpose(1, 2)), 2)
                self._store_groups(page, tokens, keys, exact, part, batch.rotation)
        for part, kept in zip(batch.parts, open_keys, strict=True):
            new = [x[part.tokens].transpose(1, 2) for x in (query, key, value)]
            out = self.attend(page, keys, values, kept, part, *new)
            output[part.tokens] = out.transpose(1, 2).to(output.dtype)
        if self._ranges is not None:
            self._ranges.check()
        return output

    def attend(
        self,
        page: Page,
        keys: Codes,
        values: Codes,
        open_keys: Tensor,
        part: Part,
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        """Attention of new tokens to themselves and to the codes of earlier ones.

        Args:
            keys, values: as of `Page.views`.
            open_keys: of the last earlier tokens, whose group is open, [requests, num_kv_heads, tokens, head_dim].
            query, key, value: of the new tokens, [requests, heads, count, head_dim].

        Returns:
            float32 [requests, num_heads, count, head_dim].
        """
        codec, (requests, _, last, _) = self._encoder.codec, open_keys.shape
        closed = part.past - last
        if last:
            codes = page.values.take(values, *part.at(closed, last, page.size))
            decoded = codec.value.decode(codes, None)[0].unflatten(1, (requests, last)).transpose(0, 1)
            key, value = torch.cat((open_keys, key), 2), torch.cat((decoded, value.float()), 2)
        shape = 1, query.shape[2], key.shape[2]
        causal = torch.ones(shape, dtype=torch.bool, device=query.device).tril(last)
        state = partial_attention(query, key, value, causal, self.scale, self._soft_cap)
        if part.has_codes:
            rotations = part.rotations if codec.needs_rotations else None
            encoded = EncodedTokens(keys, None, values, rotations, closed, part.pages)
            few = query.shape[2] <= self._backend.max_queries
            attend_codes = self._backend.attend_codes if few else self._backend.attend_decoded
            state = merge_state(state, attend_codes(codec, query, encoded, self.scale))
        return state[0]

    def _store_groups(
        self, page: Page, tokens: Tensor, keys: Codes, exact: Tensor, part: Part, rotation: Rotation
    ) -> None:
        """Encodes whole groups of keys `tokens`, from the first of the group that was open; keeps the rest exactly."""
        first, (whole, rest) = part.past // page.group, divmod(tokens.shape[2], page.group)
        if whole:
            groups = tokens[:, :, : whole * page.group].transpose(1, 2).flatten(0, 1)
            page.keys.put(keys, *part.at(first, whole, page.groups), self._encoder.encode_keys(groups, rotation))
        if rest:
            block, _ = part.at(first + whole, 1, page.groups)
            kept = tokens[:, :, -rest:].transpose(1, 2).flatten(2).contiguous()
            exact[block, :rest] = kept.view(torch.uint8)

    def _open_keys(self, page: Page, exact: Tensor, part: Part, like: Tensor) -> Tensor:
        """The exact keys of open groups, [requests, num_kv_heads, tokens, head_dim]; `like` [tokens, ...]."""
        if not part.open_keys:
            return like.new_empty(len(part.past), like.shape[1], 0, like.shape[2])
        block, _ = part.at(part.past // page.size, 1, 1)
        kept = exact[block, : part.open_keys].clone().view(like.dtype)
        return kept.unflatten(2, like.shape[1:]).transpose(1, 2)
