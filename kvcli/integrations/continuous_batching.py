"""transformers' continuous batching (`model.generate_batch`) on codes.

The paged cache of transformers is one tensor of bytes, divided into blocks that requests with a common prefix share. An
allocator class lays out keys and values of layers with full attention in the blocks. `enable` replaces that class for
one model, and attention to these layers is `kvcli.paged.attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from math import lcm
from pathlib import Path
from threading import Lock, local
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface

from kvcli.artifact.artifact import Artifact
from kvcli.artifact.choice import MethodChoice
from kvcli.attention.attach import attach
from kvcli.attention.session import Session
from kvcli.cache.ranges import StepRanges
from kvcli.errors import UnsupportedModelError, UsageError
from kvcli.models.load import LoadedModel
from kvcli.paged.attention import Page, PagedAttention
from kvcli.paged.batch import Batch
from kvcli.paged.pages import LayerEncoder, check_codecs
from kvcli.paged.rings import RESIDUAL_LENGTH, ResidualRings
from kvcli.rope import NoRope, Rope
from kvcli.seam.probe import probe
from kvcli.seam.versions import CACHE_ARGUMENT, NEWEST

try:
    from transformers.generation.continuous_batching import cache as paged
    from transformers.generation.continuous_batching.cache_allocators import FullAttentionCacheAllocator

    ALLOCATORS: dict[str, Any] = paged.ATTN_TYPE_TO_ALLOCATOR
    _FULL: str = paged.FULL_ATTENTION
except (ImportError, AttributeError) as error:
    raise UsageError(
        f"continuous batching on codes needs transformers 5.18 to {NEWEST}, whose classes of allocators it takes the "
        f"place of: {error}"
    ) from error

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

    A block of `page_size` tokens holds a page of each layer, one after another, laid out by `paged_attention.Page`.
    """

    supports_block_table = False  # kernels of transformers read pages of numbers, not of codes

    def __init__(self, *, session: Session, residual_length: int, rope: Rope, **stock: Any) -> None:
        self.session, spec = session, session.spec
        codecs = {spec.in_model(index): codec for index, codec in enumerate(session.codecs)}
        # a model of other heads per process would need codecs of its share
        if stock["num_key_value_heads"] != spec.num_kv_heads:
            raise UnsupportedModelError("codes of a model whose heads are divided among processes are not supported")
        layers, dtype, page_size = stock["layer_indices"], stock["cache_dtype"], stock["page_size"]
        self.num_key_value_heads, self.head_dim, self.cache_dtype = spec.num_kv_heads, spec.head_dim, dtype
        self._rope, self._backends = rope, dict(zip(codecs, session.backends, strict=True))
        self._ranges = StepRanges(2 * len(layers), session.model.device)
        self._encoders = {index: LayerEncoder(codecs[index], index, dtype, self._ranges) for index in layers}
        self._sinks = session.config.sink_length
        self._layout = {
            index: Page(encoder, dtype, page_size, self._sinks) for index, encoder in self._encoders.items()
        }
        kinds, device = set(map(self._kind, layers)), session.model.device
        self._residual_rings = {kind: ResidualRings(0, residual_length, kind[1], device) for kind in kinds}
        shape = 2, spec.num_kv_heads, spec.head_dim
        self._rings = {
            index: torch.zeros(0, self._residual_rings[self._kind(index)].length, *shape, dtype=dtype, device=device)
            for index in layers
        }
        others = (stock["config"].num_hidden_layers - len(layers)) * self.get_bytes_per_page(
            spec.num_kv_heads, spec.head_dim, dtype, page_size
        )
        block = block_bytes(sum(page.nbytes for page in self._layout.values()), others)
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
        self._pass: Any = None
        self._batches: dict[tuple[bool, int], Batch] = {}

    def register_cache_tensor(
        self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: Tensor, pool: Any
    ) -> None:
        """Makes views of each layer's pages in a tensor of uint8."""
        self.bytes_per_sector = bytes_per_sector
        self._copy_view = blocks = cache_tensor.view(-1, self.bytes_per_block)
        self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)
        sizes = [page.nbytes for page in self._layout.values()]
        parts = blocks[:, : sum(sizes)].split(sizes, 1)
        self._pages = dict(zip(self._layout, parts, strict=True))

    def _kind(self, layer_idx: int) -> tuple[bool, int]:
        """What layers have in common that share a batch: whether they are rotated, and tokens in a group of keys."""
        codec = self._encoders[layer_idx].codec
        return codec.rotated, codec.key.tokens_per_group

    def fork_blocks(self, source: str, copy: str, past_length: int) -> Any:
        """As in the base class; exact recent tokens of the request are copied, too."""
        copied = super().fork_blocks(source, copy, past_length)
        last = max(past_length - 1, 0) // self.tokens_per_page
        pages = [self.block_table[request][last] for request in (source, copy)]
        for kind, rings in self._residual_rings.items() if pages[0] != pages[1] else ():
            rings.grow(len(self.block_table))
            if (slots := rings.fork(*pages)) is not None:
                for index in self.layer_indices:
                    if self._kind(index) == kind:
                        tokens = self._rings_of(index)
                        tokens[slots[1]] = tokens[slots[0]]
        return copied

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """As in the base class."""
        for page in self.block_table.get(request_id, [])[-1:]:
            for rings in self._residual_rings.values():
                rings.release(page)
        super().free_blocks(request_id, no_cache)

    def _rings_of(self, layer_idx: int) -> Tensor:
        """The rings of a layer, as many as requests have."""
        rings = self._rings[layer_idx]
        if (more := self._residual_rings[self._kind(layer_idx)].count - len(rings)) > 0:
            rings = self._rings[layer_idx] = torch.cat((rings, rings.new_zeros(more, *rings.shape[1:])))
        return rings

    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """The blocks of a request, which is all that `attend` needs of where its tokens are."""
        return self.block_table[request_id][: -(-(past_length + query_length) // self.tokens_per_page)]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(self, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        """New tokens as they are: layers call it before our attention, up to 5.23 only other attention, refused."""
        if CACHE_ARGUMENT != "cache" or self.session.model.config._attn_implementation not in _replaced:
            raise UsageError("this cache holds codes; use it inside the block of `enable` in which it was made")
        _updated.allocator = self
        return key, value

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None = None, **call: Any
    ) -> Tensor:
        """Encodes the new tokens of a pass, and attends to them and to earlier ones.

        Args:
            query: after RoPE, [1, num_heads, new, head_dim], padding at the end.
            key, value: the same of kv heads, [1, num_kv_heads, new, head_dim].
            call: of transformers: `cu_seq_lens_q` and `cu_seq_lens_k`, where tokens of each request begin;
                `write_index`, slots of new tokens; `read_index`, `get_read_indices` of the requests, empty if there are
                no earlier tokens; `softcap` and `s_aux`.

        Returns:
            [1, new, num_heads, head_dim] in the dtype of the query.

        Raises:
            CacheError: numbers of the pass exceed the range of the codes.
            UsageError: the pass is captured as a CUDA graph.
        """
        encoder, page = self._encoders[layer_idx], self._layout[layer_idx]
        if self._pass is not call["cu_seq_lens_q"]:  # a tensor of this pass
            self._pass, self._batches = call["cu_seq_lens_q"], {}
        kind = self._kind(layer_idx)
        if kind not in self._batches:
            self._batches[kind] = self._batch(call, *kind)
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        output = torch.zeros_like(query, memory_format=torch.contiguous_format)
        rings, extra = self._rings_of(layer_idx), (call.get("softcap"), call.get("s_aux"))
        attention = PagedAttention(encoder, self._backends[layer_idx], scaling, rings, *extra)
        attention(page, self._pages[layer_idx], self._batches[kind], query, key, value, output)
        if layer_idx == self.layer_indices[-1]:
            self._ranges.check()
        return output.unsqueeze(0)

    def _batch(self, call: dict[str, Any], rotated: bool, group: int) -> Batch:
        """The tokens of a pass for layers that are rotated or not and encode keys in groups of so many."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise UsageError("attention to codes is not captured in CUDA graphs; say use_cuda_graph=False")
        size, ends, rings = self.tokens_per_page, call["cu_seq_lens_k"], self._residual_rings[rotated, group]
        starts = call["cu_seq_lens_q"].tolist()
        counts = [stop - start for start, stop in pairwise(starts)]
        lengths = (ends[_FULL] if isinstance(ends, dict) else ends).diff()
        tokens = lengths.tolist()
        slots, blocks = call["write_index"][self.index][: starts[-1]], call["read_index"][self.index]
        pages = [-(-length // size) for length in tokens]
        if len(blocks):
            rows = blocks[: sum(pages)].split(pages)
        else:
            rows = tuple(x[::size] // size for x in slots.split(tokens))
        rings.grow(len(self.block_table))
        batch = Batch.of(
            counts,
            lengths,
            pad_sequence(rows, True),
            slots,
            self._rope if rotated else NoRope(2 * len(self._rope.inv_freq), slots.device),
            page_size=size,
            group=group,
            sinks=self._sinks,
            rings=rings,
            has_codes=tokens != counts,
        )
        rings.check()
        return batch


_enabled: dict[int, tuple[Any, dict[str, Any]]] = {}
"""Configs of the models that are enabled by their ids, with arguments of `CodesAllocator`."""
_replaced: dict[str, Callable[..., Any]] = {}
"""Functions of attention of transformers by their names, where ours take their place."""
_updated = local()
"""The allocator that the layer which attends in this thread has updated."""
_lock = Lock()


class AllocatorByModel(CodesAllocator):
    """The allocator of a model that is enabled; of another one, that of transformers."""

    def __new__(cls, **arguments: Any) -> Any:
        if id(arguments["config"]) in _enabled:
            return super().__new__(cls)
        return FullAttentionCacheAllocator(**arguments)

    def __init__(self, **arguments: Any) -> None:
        _, ours = _enabled[id(arguments["config"])]
        super().__init__(**ours, **arguments)
        name = arguments["config"]._attn_implementation
        with _lock:
            if name not in _replaced:
                _replaced[name] = AttentionInterface()[name]
                AttentionInterface.register(name, partial(attend_paged, _replaced[name]))


def attend_paged(
    stock: Callable[..., Any], module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **call: Any
) -> Any:
    """Attention of transformers: to codes by `CodesAllocator.attend`, of other layers and models by `stock`."""
    cache = call.get("cache")  # before 5.24
    allocator = vars(_updated).pop("allocator", None) if cache is None else cache.layer_to_allocator[module.layer_idx]
    if isinstance(allocator, CodesAllocator):
        return allocator.attend(module.layer_idx, query, key, value, **call), None
    return stock(module, query, key, value, mask, **call)


@contextmanager
def enable(
    model: nn.Module | LoadedModel,
    method: str | MethodChoice = "",
    *,
    artifact: str | Path | Artifact | None = None,
    recipe: str | Path | None = None,
    impl: str = "auto",
    layers: Collection[int] | None = None,
    **settings: Any,
) -> Iterator[nn.Module]:
    """Lets continuous batching of a model store codes inside the block, in layers with full attention.

    Args:
        model, method, artifact, recipe, impl, layers, settings: as in `kvcli.attach`, but `residual_length` is 32 by
            default, and `flush_block` as in `MethodChoice.for_pages`.

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
    choice = MethodChoice.of(method, artifact, recipe, settings).for_pages()
    with attach(model, choice, impl=impl, layers=layers) as session:
        check_codecs(choice.method, session.codecs)
    module: Any = session.model
    attention, config = module.config._attn_implementation, module.config.get_text_config()
    if id(config) in _enabled or getattr(module, "_cached_continuous_batching_manager", None) is not None:
        raise UsageError("the model is enabled already, or has a persistent manager with a cache of its own")
    with _lock:
        residual_length = choice.named.get("residual_length", RESIDUAL_LENGTH)
        ours = {"session": session, "residual_length": residual_length, "rope": probe(module).rope}
        _enabled[id(config)] = config, ours
        ALLOCATORS[_FULL] = AllocatorByModel
    try:
        yield module
    finally:
        if module.config._attn_implementation != attention:  # 5.18 leaves its own after an error
            module.set_attn_implementation(attention)
        with _lock:
            del _enabled[id(config)]
            if not _enabled:
                ALLOCATORS[_FULL] = FullAttentionCacheAllocator
                while _replaced:
                    AttentionInterface.register(*_replaced.popitem())
