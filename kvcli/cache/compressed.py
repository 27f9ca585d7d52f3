"""The cache as transformers sees it: a `Cache` whose layers hand themselves to the attention function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kvcli.cache.ledger import Ledger
from kvcli.cache.memory import MemoryReport
from kvcli.cache.stream import Stream
from kvcli.cache.timeline import Timeline
from kvcli.errors import CacheError
from kvcli.methods.base import LayerCodec
from kvcli.methods.config import CacheConfig
from kvcli.methods.method import Method
from kvcli.seam import Seam
from kvcli.spec import ModelSpec


class CompressedLayer(CacheLayerMixin):
    """One layer's keys and values; `update` keeps the new ones aside and returns the layer itself."""

    is_sliding = False
    supports_early_init = False

    def __init__(self, codec: LayerCodec, config: CacheConfig, timeline: Timeline, seam: Seam) -> None:
        super().__init__()
        self.codec, self.timeline, self.seam = codec, timeline, seam
        self.keys_stream = Stream(codec.key, config.sink_length)
        self.values_stream = Stream(codec.value, config.sink_length)
        self.pending: tuple[Tensor, Tensor] | None = None
        self._home: torch.device | None = None

    @property
    def streams(self) -> tuple[Stream, Stream]:
        """Keys and values."""
        return self.keys_stream, self.values_stream

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Takes new pre-RoPE keys and values, [batch, num_kv_heads, query_len, head_dim] each."""
        if not self.seam.is_open:
            raise CacheError("this cache's session was detached; attach the method again and make a new cache")
        self.pending = (key_states, value_states)
        self.is_initialized = True
        return self, self

    def take_pending(self) -> tuple[Tensor, Tensor]:
        """The keys and values of this forward pass, once."""
        assert self.pending is not None
        pending, self.pending = self.pending, None
        return pending

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: buffers are made by the first tokens."""

    def get_seq_length(self) -> int:
        """Slots seen so far, padding included."""
        return self.timeline.slots

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Length and offset of the mask; before transformers 5.4 the argument was a tensor of positions."""
        new = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.timeline.slots + new, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.17

    def select(self, rows: Tensor) -> None:
        """Keeps, repeats or reorders rows."""
        for stream in self.streams:
            stream.select(rows)

    def offload(self) -> None:
        """Moves the layer's tensors to the CPU."""
        if self.keys_stream.exact is not None and self._home is None:
            self._home = self.keys_stream.exact.device
        for stream in self.streams:
            stream.to("cpu")

    def prefetch(self) -> None:
        """Moves the layer's tensors back to where they were."""
        if self._home is not None:
            for stream in self.streams:
                stream.to(self._home)
        self._home = None


class CompressedCache(Cache):
    """A drop-in `past_key_values` that stores codes.

    Args:
        spec: the model's shapes.
        method: how keys and values are coded.
        config: its settings.
        codecs: one fitted codec a layer.
        seam: the patch on the model that the cache is for.
    """

    def __init__(
        self, spec: ModelSpec, method: Method, config: CacheConfig, codecs: list[LayerCodec], seam: Seam
    ) -> None:
        self.spec, self.method, self.config = spec, method, config
        self._codecs, self._seam = codecs, seam
        self.timeline = self._new_timeline()
        super().__init__(layers=self._new_layers())

    def _new_timeline(self) -> Timeline:
        codecs = (self._codecs[0].key, self._codecs[0].value)
        keys, values = (
            Ledger(schedule, self.config.sink_length, codec.tokens_per_group)
            for schedule, codec in zip(self.method.schedules(self.config), codecs, strict=True)
        )
        return Timeline(self._seam.rope, keys, values, len(self._codecs))

    def _new_layers(self) -> list[Any]:
        return [CompressedLayer(codec, self.config, self.timeline, self._seam) for codec in self._codecs]

    def reset(self) -> None:
        """Forgets all tokens."""
        self.timeline = self._new_timeline()
        self.layers = self._new_layers()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorders the rows for beam search."""
        self.timeline.select(beam_idx)
        for layer in self.layers:
            layer.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps some rows."""
        rows = torch.as_tensor(indices)
        self.reorder_cache(rows.nonzero()[:, 0] if rows.dtype == torch.bool else rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row."""
        self.reorder_cache(torch.arange(len(self.timeline.lengths)).repeat_interleave(repeats))

    @property
    def is_croppable(self) -> bool:
        """False: a rollback cannot bring back the full precision of what was encoded meanwhile."""
        return False

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last tokens.

        Args:
            tokens_to_remove: a negative count of slots; a positive number is the length to keep, as before 5.18.

        Raises:
            CacheError: more than the cache holds, or part of a group that was encoded together.
        """
        slots = -tokens_to_remove if tokens_to_remove <= 0 else self.timeline.slots - tokens_to_remove
        if slots <= 0:
            return
        if slots > self.timeline.slots:
            raise CacheError(f"cannot remove {slots} tokens from a cache of {self.timeline.slots}")
        self.timeline.crop(slots, self.timeline.tokens_in_last(slots))

    def memory(self) -> MemoryReport:
        """Measures the cache from its live tensors."""
        ledgers = {"key": self.timeline.keys, "value": self.timeline.values}
        used = dict.fromkeys(ledgers, 0)
        exact = allocated = state = 0
        for layer in self.layers:
            for (kind, ledger), stream in zip(ledgers.items(), layer.streams, strict=True):
                in_use, reserved = stream.buffer.nbytes(ledger.encoded)
                used[kind] += in_use
                allocated += reserved
                state += stream.state.nbytes if stream.state is not None else 0
                if stream.exact is not None:
                    exact += sum(ledger.exact) * stream.exact[0, :, 0].nbytes
                    allocated += stream.exact.nbytes
        encoded = {kind: sum(ledger.encoded) * len(self.layers) for kind, ledger in ledgers.items()}

        def bits(kind: str) -> float:
            return 8 * used[kind] / (encoded[kind] * self.spec.kv_dim) if encoded[kind] else 0.0

        num_tokens = sum(self.timeline.lengths)
        return MemoryReport(
            num_tokens=num_tokens,
            num_encoded=sum(self.timeline.keys.encoded),
            code_bytes=used["key"] + used["value"],
            exact_bytes=exact,
            position_bytes=self.timeline.nbytes,
            state_bytes=state,
            allocated_bytes=allocated + state + self.timeline.nbytes,
            artifact_bytes=sum(codec.key.codebook_bytes() + codec.value.codebook_bytes() for codec in self._codecs),
            fp16_bytes=num_tokens * self.spec.fp16_bytes_per_token(),
            key_bits=bits("key"),
            value_bits=bits("value"),
            nominal_bits=self.method.nominal_bits(self.spec, self.config),
        )
