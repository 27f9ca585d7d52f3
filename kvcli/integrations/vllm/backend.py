"""vLLM's attention backend on codes: a page holds rows of bytes, those of its tokens' values and of their keys.

New tokens of a pass are exact to each other; all earlier ones are read from codes. There are no sinks and no residual
window. Where keys are encoded in groups, those of the last group are exact until it is whole, in bytes of its page.
Codes are read in PyTorch, request by request: `attend` is where kernels that read pages go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
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


class Page:
    """Where a layer's rows are in pages of `size` tokens: rows of values, of groups of keys, and keys of an open group.

    Args:
        rows: of the layer.
        dtype: of exact keys.
        size: tokens of a page.

    Raises:
        UsageError: groups that do not divide a page.
    """

    def __init__(self, rows: LayerRows, dtype: torch.dtype, size: int) -> None:
        self.size, self.group, spec = size, rows.keys.group, rows.codec.key.spec
        if size % self.group:
            raise UsageError(f"--block-size {size} is no multiple of {self.group} tokens, whose keys have a scale")
        exact = self.group if self.group > 1 else 0, spec.kv_dim * dtype.itemsize
        self._shapes = (size, rows.values.nbytes), (size // self.group, rows.keys.nbytes), exact
        self.nbytes = sum(count * width for count, width in self._shapes)

    def areas(self, kv_cache: Tensor) -> list[Tensor]:
        """Views uint8 [pages, rows, bytes] of values, groups of keys, and exact keys, in a layer's pages."""
        flat, views, start = kv_cache.view(len(kv_cache), -1), [], 0
        for count, width in self._shapes:
            views.append(flat[:, start : start + count * width].unflatten(1, (count, width)))
            start += count * width
        return views


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
        """The spec of a page of rows. UnsupportedModelError: another kind of layer, or one beside others."""
        if type(spec) is not FullAttentionSpec or cls.page is None:
            raise UnsupportedModelError(f"layers of {type(spec).__name__} in this model have no codes in pages")
        size = spec.block_size
        per_token = -(-cls.page(size).nbytes // size)
        return replace(spec, num_head_slots=1, state_content_bytes=per_token, dtype=torch.uint8)


@dataclass(frozen=True)
class Request:
    """A request's part of a pass: new tokens [start, stop), and `past` earlier ones, which are read.

    Attributes:
        blocks: its pages, int64 [pages].
        rotations: of the earlier tokens.
        is_stored: whether its new tokens have slots.
    """

    start: int
    stop: int
    past: int
    blocks: Tensor
    rotations: TokenRotations
    is_stored: bool

    def at(self, first: int, stop: int, per_page: int) -> tuple[Tensor, Tensor]:
        """Pages of rows [first, stop) of the request, and their places in these, int64 [rows]."""
        row = torch.arange(first, stop, device=self.blocks.device)
        return self.blocks[row // per_page], row % per_page


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
        slots = common.slot_mapping[: starts[-1]]
        stored = (slots >= 0).nonzero().squeeze(1)
        having_slots, requests, positions = set(stored.tolist()), [], []
        for row, (start, stop) in enumerate(pairwise(starts)):
            token = torch.arange(lengths[row], device=slots.device)
            old, new = token.split((len(token) - (stop - start), stop - start))
            blocks = common.block_table_tensor[row, : -(-len(token) // size)].long()
            rotations = TokenRotations(self._rope, old.unsqueeze(0))
            requests.append(Request(start, stop, len(old), blocks, rotations, start in having_slots))
            positions.append(new)
        rotation = self._rope.rotation(torch.cat(positions).unsqueeze(0), torch.float32)
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
        page = staticmethod(partial(Page, self._rows, self._config.model_config.dtype))
        layer.attn_backend = type("LayerBackend", (CodesBackend,), {"page": page})

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
        batch, page = attn_metadata, Page(self._rows, key.dtype, kv_cache.shape[2])
        count, block, place = batch.rotation.cos.shape[2], batch.slots // page.size, batch.slots % page.size
        values, keys, exact = page.areas(kv_cache)
        for request in batch.requests:
            new = slice(request.start, request.stop)
            open_keys = _open_keys(page, exact, request, key)
            output[new] = self.attend(query[new], key[new], value[new], values, keys, open_keys, request)
            if page.group > 1 and request.is_stored:
                self._store_groups(page, torch.cat((open_keys, key[new])), keys, exact, request, batch.rotation)
        values[block, place] = self._rows.encode_values(value[:count])[batch.stored]
        if page.group == 1:
            keys[block, place] = self._rows.encode_keys(key[:count], batch.rotation)[batch.stored]
        if self._ranges is not None:
            self._ranges.check()
        return output

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        values: Tensor,
        keys: Tensor,
        open_keys: Tensor,
        request: Request,
    ) -> Tensor:
        """Attention of a request's new tokens to themselves and to the codes of earlier ones.

        Args:
            query, key, value: of the new tokens, as of `forward`.
            values, keys: as of `Page.areas`.
            open_keys: of the last earlier tokens, whose group is open, [tokens, num_kv_heads, head_dim].

        Returns:
            [tokens, num_heads, head_dim] in the query's dtype.
        """
        rows, past, last = self._rows, request.past, len(open_keys)
        closed, group = past - last, rows.keys.group
        value_rows = values[request.at(0, past, values.shape[1])]
        if last:
            decoded = rows.codec.value.decode(rows.values.unpack(value_rows[closed:]), None)
            key, value = torch.cat((open_keys, key)), torch.cat((decoded[0].transpose(0, 1), value.float()))
        query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        shape = 1, query.shape[2], key.shape[2]
        causal = torch.ones(shape, dtype=torch.bool, device=query.device).tril(last)
        part = partial_attention(query, key, value, causal, self.scale, self._soft_cap)
        if closed:
            key_codes = rows.keys.unpack(keys[request.at(0, closed // group, keys.shape[1])])
            rotations = request.rotations if rows.codec.needs_rotations else None
            encoded = EncodedTokens(key_codes, None, rows.values.unpack(value_rows[:closed]), rotations, None)
            part = merge_state(part, attend_codes(rows.codec, query, encoded, self.scale, self._soft_cap))
        return part[0][0].transpose(0, 1).to(query.dtype)

    def _store_groups(
        self, page: Page, tokens: Tensor, keys: Tensor, exact: Tensor, request: Request, rotation: Rotation
    ) -> None:
        """Encodes the whole groups of keys `tokens`, from the first of the group that was open; keeps the rest."""
        first, whole = request.past // page.group, len(tokens) // page.group
        rest = tokens[whole * page.group :]
        if whole:
            place = request.at(first, first + whole, keys.shape[1])
            keys[place] = self._rows.encode_keys(tokens[: whole * page.group], rotation)
        if len(rest):
            block = request.blocks[(first + whole) // keys.shape[1]]
            exact[block, : len(rest)] = rest.flatten(1).contiguous().view(torch.uint8)


def _open_keys(page: Page, exact: Tensor, request: Request, like: Tensor) -> Tensor:
    """The exact keys of a request's open group, [tokens, num_kv_heads, head_dim]."""
    count = request.past % page.group
    if not count:
        return like[:0]
    rows = exact[request.blocks[request.past // page.size], :count]
    return rows.clone().view(like.dtype).unflatten(1, like.shape[1:])
