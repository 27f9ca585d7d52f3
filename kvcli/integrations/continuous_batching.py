"""transformers' continuous batching (`model.generate_batch`) on codes.

The paged cache of transformers is one tensor of bytes, divided into blocks that requests with a common prefix share. An
allocator class lays out keys and values of layers with full attention in the blocks. `enable` replaces that class for
one model. Every forward pass decodes all tokens that it reads, so this saves memory, not time. There are no sinks and
no residual window.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate
from math import lcm
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from kvcli.attention.attach import attach
from kvcli.cache.ranges import StepRanges
from kvcli.errors import UnsupportedModelError, UsageError
from kvcli.integrations.pages import LayerEncoder, check_codecs, device_of
from kvcli.methods.layer_codec import LayerCodec
from kvcli.models import LoadedModel
from kvcli.rope import Rope, Rotation
from kvcli.seam.probe import probe

try:
    from transformers.generation.continuous_batching import cache as paged
    from transformers.generation.continuous_batching.cache_allocators import FullAttentionCacheAllocator

    ALLOCATORS: dict[str, Any] = paged.ATTN_TYPE_TO_ALLOCATOR
except (ImportError, AttributeError) as error:
    raise UsageError(
        f"continuous batching on codes needs transformers 5.18 to 5.23, whose classes of allocators it takes the place "
        f"of: {error}"
    ) from error

_FULL = FullAttentionCacheAllocator.layer_type
_ALIGNMENT = 128


def block_bytes(codes: int, others: int) -> int:
    """Bytes of a block of so many bytes of codes, beside blocks of `others` bytes, 0 if there are none.

    A sector is a common multiple of both. To keep it small, a block is up to an eighth larger than its codes.
    """
    least = -(-codes // _ALIGNMENT) * _ALIGNMENT
    sizes = range(least, least + (least // 8 if others else 0) + 1, _ALIGNMENT)
    return min(sizes, key=lambda size: lcm(size, others or 1))


class CodesAllocator(FullAttentionCacheAllocator):
    """Keys and values of layers with full attention as codes. Slot s is token s % page_size of block s // page_size.

    A block of `page_size` tokens holds, layer after layer, the codes of keys and then those of values.
    """

    supports_block_table = False  # kernels of transformers read pages of numbers, not of codes

    def __init__(self, *, codecs: dict[int, LayerCodec], rope: Rope, **stock: Any) -> None:
        # a model of other heads per process would need codecs of its share
        if stock["num_key_value_heads"] != next(iter(codecs.values())).key.spec.num_kv_heads:
            raise UnsupportedModelError("codes of a model whose heads are divided among processes are not supported")
        layers, dtype, page_size = stock["layer_indices"], stock["cache_dtype"], stock["page_size"]
        self._codecs, self._rope = [codecs[index] for index in layers], rope
        self._ranges = StepRanges(2 * len(layers), device_of(self._codecs[0].key))
        self._prompts: set[str] = set()  # requests of whose prompt the last pass read a part
        self._stream: Any = None
        self._encoders = [
            LayerEncoder(codec, index, dtype, self._ranges) for index, codec in zip(layers, self._codecs, strict=True)
        ]
        self._fields = [encoder.fields(page_size) for encoder in self._encoders]
        self._starts = [0, *accumulate(side.nbytes for sides in self._fields for side in sides)]
        self.head_dim, self.num_key_value_heads = self._codecs[0].key.spec.head_dim, stock["num_key_value_heads"]
        self.cache_dtype = dtype
        others = (stock["config"].num_hidden_layers - len(layers)) * self.get_bytes_per_page(
            self.num_key_value_heads, self.head_dim, dtype, page_size
        )
        block = block_bytes(self._starts[-1], others)
        self._before_cache_tensor_init(
            index=stock["index"],
            layer_indices=layers,
            tokens_per_page=page_size,
            bytes_per_page=block,
            allow_block_sharing=stock["allow_block_sharing"],
        )
        # layers differ in their bytes, so a block is one page
        self.pages_per_block, self.tokens_per_block, self.bytes_per_block = 1, page_size, block
        self.block_physical_stride = page_size

    def register_cache_tensor(
        self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: Tensor, pool: Any
    ) -> None:
        """Makes views of each layer's codes of keys and values in a tensor of uint8."""
        self.bytes_per_sector = bytes_per_sector
        self._copy_view = blocks = cache_tensor.view(-1, self.bytes_per_block)
        self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)
        starts = iter(self._starts)
        self._pages = [tuple(side.view(blocks[:, next(starts) :]) for side in sides) for sides in self._fields]
        self._logical = torch.zeros(
            len(blocks), dtype=torch.int64, device=cache_tensor.device
        )  # of each physical block
        self._new = torch.full((len(blocks) * self.tokens_per_page,), -1, device=cache_tensor.device)

    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """Slots to read, as in the base class; the request's physical blocks are mapped to its logical ones."""
        self._map_blocks(request_id)
        return super().get_read_indices(request_id, past_length, query_length)

    def get_write_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """Slots to write, as in the base class. CacheError: encoded numbers exceed the range of the codes.

        The range is checked after passes over a prompt and at the start of a page, because a check waits for the GPU.
        """
        if request_id in self._prompts or past_length % self.tokens_per_page == 0:
            with self._in_order():
                self._ranges.check()
        (self._prompts.add if query_length > 1 else self._prompts.discard)(request_id)
        self._map_blocks(request_id)
        return super().get_write_indices(request_id, past_length, query_length)

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """As in the base class."""
        self._prompts.discard(request_id)
        super().free_blocks(request_id, no_cache)

    def _map_blocks(self, request_id: str) -> None:
        with self._in_order():
            table = torch.tensor(self.block_table.get(request_id, []), dtype=torch.int64, device=self._logical.device)
            self._logical[table] = torch.arange(len(table), device=table.device)
        if self._logical.is_cuda and self._stream is None:
            torch.cuda.synchronize()

    def _in_order(self) -> AbstractContextManager[Any]:
        """The stream of the forward passes, so that work runs after those that were launched and before the next."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, read_index: Tensor, write_index: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Encodes the new tokens of a pass, and decodes the tokens that it reads.

        Args:
            key_states, value_states: new tokens, [new, num_kv_heads, head_dim], keys after RoPE.
            read_index: int64 [read], slots to read, new ones included; empty if only new tokens are read.
            write_index: int64 [new], slots of the new tokens.

        Returns:
            Keys after RoPE and values, [read, num_kv_heads, head_dim] in the dtype of the new ones, which are returned
            unencoded.
        """
        if key_states.is_cuda:
            self._stream = torch.cuda.current_stream()
        at = self.layer_indices.index(layer_idx)
        codec, dtype = self._codecs[at], key_states.dtype
        rotation, encoder = self._rotation(codec, write_index), self._encoders[at]
        new = encoder.encode_keys(key_states, rotation), encoder.encode_values(value_states)
        sides = list(zip(self._fields[at], self._pages[at], strict=True))
        for (fields, pages), codes in zip(sides, new, strict=True):
            fields.put(pages, *self._place(write_index), codes)
        if read_index.numel() == 0:
            return key_states, value_states
        key_codes, value_codes = (fields.take(pages, *self._place(read_index)) for fields, pages in sides)
        old = (
            codec.decode_keys(key_codes, None, self._rotation(codec, read_index), dtype),
            codec.value.decode_to(value_codes, None, dtype),
        )
        self._new[write_index] = torch.arange(len(write_index), device=write_index.device)
        row = self._new[read_index]
        self._new[write_index] = -1
        exact = (row >= 0)[:, None, None]
        pairs = zip((key_states, value_states), old, strict=True)
        key, value = (torch.where(exact, x[row.clamp_min(0)], y[0].transpose(0, 1)) for x, y in pairs)
        return key, value

    def _place(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks of slots, and places in these."""
        return index // self.tokens_per_page, index % self.tokens_per_page

    def _rotation(self, codec: LayerCodec, index: Tensor) -> Rotation:
        """RoPE of the tokens in slots, float32 [1, 1, slots, rotary_dim / 2]; by 0 in a layer without RoPE."""
        block, place = self._place(index)
        positions = self._logical[block] * self.tokens_per_page + place
        rotation = self._rope.rotation(positions.unsqueeze(0), torch.float32)
        return rotation if codec.rotated else Rotation.none(rotation)


_enabled: dict[int, tuple[Any, dict[int, LayerCodec], Rope]] = {}
"""Configs of the models that are enabled by their ids, with codecs of their layers and RoPE."""
_lock = Lock()


class AllocatorByModel(CodesAllocator):
    """The allocator of a model that is enabled; of another one, that of transformers."""

    def __new__(cls, **arguments: Any) -> Any:
        if id(arguments["config"]) in _enabled:
            return super().__new__(cls)
        return FullAttentionCacheAllocator(**arguments)

    def __init__(self, **arguments: Any) -> None:
        _, codecs, rope = _enabled[id(arguments["config"])]
        super().__init__(codecs=codecs, rope=rope, **arguments)


@contextmanager
def enable(
    model: nn.Module | LoadedModel, method: str, *, artifact: str | Path | None = None, **settings: Any
) -> Iterator[nn.Module]:
    """Lets continuous batching of a model store codes inside the block, in layers with full attention.

    Args:
        model, method, artifact, settings: as in `kvcli.attach`; settings of sinks and windows are not taken.

    Yields:
        The model; caches that are made in the block, such as those of `generate_batch`, are ours.

    Raises:
        UsageError: a method whose codes depend on more than the token, a model that is enabled already or that has a
            manager with pages of its own, or a transformers that is not known.
        UnsupportedModelError: keys and values of different widths.
        Those of `kvcli.attach`.

    Example:
        >>> with continuous_batching.enable(model, "turboquant-3"):
        ...     outputs = model.generate_batch(prompts, generation_config=config)
    """
    if given := sorted({"sink_length", "residual_length", "flush_block"} & set(settings)):
        raise UsageError(f"all tokens of a paged cache are codes; omit {', '.join(given)}")
    with attach(model, method, artifact=artifact, **settings) as session:
        spec, codecs = session.spec, session.codecs
    module: Any = model.model if isinstance(model, LoadedModel) else model
    check_codecs(method, codecs)
    config = module.config.get_text_config()
    if id(config) in _enabled or getattr(module, "_cached_continuous_batching_manager", None) is not None:
        raise UsageError("the model is enabled already, or has a persistent manager with a cache of its own")
    by_layer = {spec.in_model(index): codec for index, codec in enumerate(codecs)}
    with _lock:
        _enabled[id(config)] = config, by_layer, probe(module).rope
        ALLOCATORS[_FULL] = AllocatorByModel
    try:
        yield module
    finally:
        with _lock:
            del _enabled[id(config)]
            if not _enabled:
                ALLOCATORS[_FULL] = FullAttentionCacheAllocator
