"""One layer of the cache as transformers sees it: it hands its new tokens to the attention function."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvcli.cache.forward import Forward, ordinary_tensors
from kvcli.cache.sequences import Sequences
from kvcli.cache.store import LayerStore
from kvcli.errors import CacheError
from kvcli.methods.config import CacheConfig
from kvcli.methods.layer_codec import LayerCodec
from kvcli.seam.layer import LayerAttention
from kvcli.seam.patch import Seam
from kvcli.seam.untraced import untraced

DETACHED = "this cache's session was detached; attach the method again and make a new cache"
OTHER_MODEL = "this cache belongs to another model or session; pass a cache made by this session's new_cache()"


class NewTokens(NamedTuple):
    """What `CompressedLayer.update` returns in place of the keys: the new tokens and the layer that is to store them.

    Attributes:
        layer: of the cache.
        key: before RoPE, [batch, num_kv_heads, query_len, head_dim].
        value: like key.
    """

    layer: CompressedLayer
    key: Tensor
    value: Tensor


class CompressedLayer(CacheLayerMixin):
    """Keys and values of one layer of full attention."""

    is_sliding = False
    supports_early_init = False

    def __init__(
        self, codec: LayerCodec, config: CacheConfig, sequences: Sequences, seam: Seam, attention: LayerAttention
    ) -> None:
        super().__init__()
        self.attention = attention
        self.codec, self.config, self.sequences, self.seam = codec, config, sequences, seam
        self.store: LayerStore | None = None
        self._device_before_offload: torch.device | None = None

    @untraced
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Hands new pre-RoPE keys and values, [batch, num_kv_heads, query_len, head_dim] each, to the attention.

        Raises:
            CacheError: the session of this cache was detached, or this is not a forward pass of its model.
        """
        if not self.seam.is_open:
            raise CacheError(DETACHED)
        if not self.seam.current.is_running:
            raise CacheError(OTHER_MODEL)
        self.is_initialized = True
        return NewTokens(self, self.attention.in_order(key_states), value_states), value_states

    @ordinary_tensors
    def make_store(self, new: NewTokens, forward: Forward) -> LayerStore:
        """The store, made for the first tokens."""
        self.store = LayerStore(self.codec, new.key, new.value, forward.plan.layout)
        return self.store

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: buffers are made by the first tokens."""

    def get_seq_length(self) -> int:
        """Slots seen so far, padding included."""
        return self.sequences.slots

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Length and offset of the mask; before transformers 5.4 the argument was a tensor of positions."""
        new = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.sequences.slots + new, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.17

    def select(self, rows: Tensor) -> None:
        """Keeps, repeats or reorders rows."""
        if self.store is not None:
            self.store.select(rows)

    def restart(self, rows: list[int]) -> None:
        """Empties the codec's state of rows that hold no token any more."""
        if self.store is not None:
            self.store.restart(rows)

    def offload(self) -> None:
        """Moves the layer's tensors to the CPU."""
        if self.store is not None:
            self._device_before_offload = self._device_before_offload or self.store.keys.device
            self.store.to("cpu")

    def prefetch(self) -> None:
        """Moves the layer's tensors back to where they were."""
        if self.store is not None:
            self.store.to(self._device_before_offload or self.store.keys.device)
        self._device_before_offload = None
