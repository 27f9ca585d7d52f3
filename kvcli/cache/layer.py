"""One layer of the cache: window tokens in full precision, all others as codes, moved as a pass's counts say."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import sub
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcli.cache.counts import AnyEncoding, DeviceEncoding, Encoding, HostCounts, row_values
from kvcli.cache.forward import Forward, Passes
from kvcli.cache.ranges import Note
from kvcli.cache.record import Counts
from kvcli.cache.window import WindowLayout, ordinary_tensors, read_slots, write_slots
from kvcli.errors import CacheError
from kvcli.methods.base import Codec, Codes
from kvcli.methods.layer_codec import LayerCodec
from kvcli.rope import Unrotate
from kvcli.seam.layer import LayerAttention, untraced
from kvcli.seam.patch import Seam
from kvcli.seam.recorder import OwnLayer

HEADROOM = 128
"""Fewest tokens by which a buffer grows after its first allocation."""

DETACHED = "this cache's session was detached; attach the method again and make a new cache"
OTHER_MODEL = "this cache belongs to another model or session; pass a cache made by this session's new_cache()"


class CodeBuffer:
    """Codes of the keys, or of the values, of one layer, written at each row's own end; a token costs no concatenation.

    Attributes:
        codes: zeros where nothing was written.
        capacity: tokens that a row can hold without growing.
        tokens_per_entry: tokens that share an entry of a field, by its name.
    """

    def __init__(self, codec: Codec[Any], like: Tensor) -> None:
        """For tokens of a window buffer `like` [batch, num_kv_heads, capacity, head_dim]."""
        self.codec = codec
        group = codec.encoded_group(like)
        self.tokens_per_entry = {name: codec.tokens_per_group // x.shape[2] for name, x in group.tensors().items()}
        self.codes: Codes = group.map(lambda x: x.new_empty(like.shape[0], x.shape[1], 0, *x.shape[3:]))
        self.capacity = 0

    @ordinary_tensors
    def reserve(self, num_tokens: int) -> None:
        """Makes room for this many tokens per row; grows by an eighth, at least 128 tokens, after the first."""
        capacity = grown_capacity(self.capacity, num_tokens, max(self.tokens_per_entry.values()))
        if capacity == self.capacity:
            return
        grown = {}
        for name, x in self.codes.tensors().items():
            grown[name] = x.new_zeros(*x.shape[:2], capacity // self.tokens_per_entry[name], *x.shape[3:])
            grown[name][:, :, : x.shape[2]] = x
        self.codes, self.capacity = type(self.codes)(**grown), capacity

    def write(self, tokens: Tensor, state: Any, encoding: AnyEncoding) -> Codes:
        """Encodes tokens [rows, num_kv_heads, count, head_dim], where `reserve` made room; keeps no allocation."""
        codes: Codes
        if isinstance(encoding, DeviceEncoding):
            codes = self.codec.encode(tokens, state)
            for name, x in codes.tensors().items():
                first = (encoding.start // self.tokens_per_entry[name]).long()
                entry = first + torch.arange(x.shape[2], device=x.device)
                index = entry.view(-1, 1, x.shape[2], *(1,) * (x.ndim - 3)).expand(x.shape)
                buffer: Tensor = getattr(self.codes, name)
                # by bytes, because indexing knows no 8-bit floats
                integers = torch.uint8 if x.element_size() == 1 else x.dtype
                buffer.view(integers).scatter_(2, index, x.view(integers))
            return codes
        views = {}
        for name, x in self.codes.tensors().items():
            size = self.tokens_per_entry[name]  # the tokens share no entry with earlier ones
            views[name] = x[:, :, encoding.start // size : encoding.start // size - (-encoding.count // size)]
        if encoding.whole:
            target = type(self.codes)(**views)
            self.codec.encode_into(tokens, state, target)
            return target
        codes = self.codec.encode(tokens, state)
        for name, x in codes.tensors().items():
            views[name][encoding.rows] = x
        return codes

    def nbytes(self, lengths: Counts) -> int:
        """Bytes in use for rows of these lengths."""
        used = 0
        for name, x in self.codes.tensors().items():
            entry = x.shape[1] * x.shape[3:].numel() * x.element_size()
            used += sum(-(-length // self.tokens_per_entry[name]) * entry for length in lengths)
        return used


def grown_capacity(capacity: int, num_tokens: int, unit: int) -> int:
    """Tokens that a buffer has room for once it has to hold `num_tokens`: if it grows, a multiple of `unit` and of 16.

    So the strides of all fields are multiples of 16, for which kernels are compiled, whatever the capacity.
    """
    if num_tokens <= capacity:
        return capacity
    unit = math.lcm(unit, 16)
    headroom = max(HEADROOM, num_tokens // 8) if capacity else 0
    return -(-(num_tokens + headroom) // unit) * unit


class LayerStore:
    """Window and codes of one layer; made with the first tokens.

    Attributes:
        keys, values: windows [batch, num_kv_heads, capacity, head_dim], laid out as `layout` says; keys after RoPE.
        state: what the key codec keeps of each row, if anything.
    """

    @ordinary_tensors
    def __init__(self, codec: LayerCodec, key: Tensor, value: Tensor, layout: WindowLayout) -> None:
        self.codec, self.layout = codec, layout
        self.keys, self.values = (x.new_zeros(*x.shape[:2], layout.capacity, x.shape[3]) for x in (key, value))
        self.key_codes = CodeBuffer(codec.key, self.keys)
        self.value_codes = CodeBuffer(codec.value, self.values)
        self.state = codec.new_state(key.shape[0], key.device)

    def reserve(self, forward: Forward) -> None:
        """Makes room for new tokens in the windows, and for the codes of those that are encoded."""
        counts = forward.counts
        if counts.layout is not self.layout and counts.layout != self.layout:
            self._lay_out(counts.layout, forward, flushed=False)
        for codes, needed in zip((self.key_codes, self.value_codes), counts.room, strict=True):
            if needed > codes.capacity:
                codes.reserve(needed)

    def observe(self, queries: Tensor, keys: Tensor, forward: Forward) -> None:
        """Passes new tokens of the rows that have no codes yet to the codec, which keeps a state.

        Queries [batch, num_heads, query_len, head_dim] are in the codec's query space, keys after RoPE; where the mean
        of keys is kept, they are before it, and the sinks do not count.
        """
        assert isinstance(forward.counts, HostCounts)  # steps begin when every row has codes
        coded, counts = forward.counts.coded_keys, row_values(forward.new, keys.device, torch.float32)
        first = forward.counts.layout.sinks if self.codec.sequence_offset else 0
        if first or forward.real is not None or any(coded):
            index = forward.window.index  # -1 at padding
            if isinstance(index, int):
                index = torch.arange(index, index + keys.shape[2], device=keys.device)
            shown = (index >= first) & torch.tensor([not count for count in coded], device=keys.device).unsqueeze(1)
            queries, keys = (x * shown[:, None, :, None] for x in (queries, keys))
            counts = shown.sum(1, dtype=torch.float32)
        self.codec.observe(self.state, queries, keys, counts)

    def encode_keys(self, forward: Forward, unrotate: Unrotate, note: Note) -> None:
        """Encodes keys of the window as the pass says; those that stay there become what they decode to."""
        encodings: Sequence[AnyEncoding] = forward.counts.keys
        for i, encoding in enumerate(encodings):
            rotation = forward.key_rotations(self.codec)[i] if self.codec.needs_rotations else None
            state = self.state
            if state is not None and isinstance(encoding, Encoding):
                if encoding.is_first:
                    self.codec.finalize_state(state, encoding.rows)
                if not encoding.whole:
                    state = state.select(encoding.rows)
            keys = read_slots(self.keys, encoding.slots(self.layout), encoding.index)
            if rotation is not None:
                keys = self.codec.encoder_input(keys, rotation, unrotate, state)
            codes = self.key_codes.write(keys, state, encoding)
            note(encoding, keys, codes)
            if encoding.kept:
                skip = encoding.count - encoding.kept
                kept = None if rotation is None else rotation.last(encoding.kept)
                tokens = self.codec.decode_keys(codes.slice(skip, encoding.count), state, kept, self.keys.dtype)
                write_slots(self.keys, encoding.slots(self.layout, skip), tokens, encoding.index)

    def encode_values(self, forward: Forward, note: Note) -> None:
        """As `encode_keys`, for values; those that stay in the window by one kernel, if there is one."""
        codec, dtype = self.codec.value, self.values.dtype
        for encoding in forward.counts.values:
            if isinstance(encoding, DeviceEncoding) and encoding.kept:
                place = encoding.start, encoding.count, self.value_codes.codes
                if codec.round_in_place(self.values, self.layout.sinks, *place, note.peak(dtype)):
                    continue
            values = read_slots(self.values, encoding.slots(self.layout), encoding.index)
            codes = self.value_codes.write(values, None, encoding)
            note(encoding, values, codes)
            if encoding.kept:
                skip = encoding.count - encoding.kept
                tokens = codec.decode_to(codes.slice(skip, encoding.count), None, dtype)
                write_slots(self.values, encoding.slots(self.layout, skip), tokens, encoding.index)

    def shrink(self, forward: Forward) -> None:
        """Gives back the memory of the window that a long prompt took, after the flush."""
        layout = forward.counts.layout_after
        if layout is not self.layout and layout != self.layout:
            self._lay_out(layout, forward, flushed=True)

    @ordinary_tensors
    def map(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replaces every tensor by what a function makes of it."""
        self.keys, self.values = function(self.keys), function(self.values)
        for codes in (self.key_codes, self.value_codes):
            codes.codes = codes.codes.map(function)
        if self.state is not None:
            self.state = self.state.map(function)

    @ordinary_tensors
    def _lay_out(self, layout: WindowLayout, forward: Forward, *, flushed: bool) -> None:
        """Changes the layout of the windows, before the append or after the flush."""
        counts, former = forward.counts, self.layout
        assert isinstance(counts, HostCounts)  # no step changes a layout
        lengths, attended = (counts.lengths, counts.attended_after) if flushed else (counts.before, counts.attended)
        tokens = former.window_tokens(row_values(attended, self.keys.device), max(map(sub, lengths, attended)))
        windows = self.keys, self.values
        self.keys, self.values = (x.new_zeros(*x.shape[:2], layout.capacity, x.shape[3]) for x in windows)
        for new, old in zip((self.keys, self.values), windows, strict=True):
            write_slots(new, layout.slots(tokens), read_slots(old, former.slots(tokens)))
        self.layout = layout


class NewTokens(NamedTuple):
    """What `CompressedLayer.update` returns in place of the keys: the layer of the cache that is to store new tokens.

    Keys, before RoPE, and values are [batch, num_kv_heads, query_len, head_dim].
    """

    layer: CompressedLayer
    key: Tensor
    value: Tensor


class CompressedLayer(OwnLayer):
    """Keys and values of one layer of full attention."""

    def __init__(self, codec: LayerCodec, passes: Passes, seam: Seam, attention: LayerAttention) -> None:
        super().__init__()
        self.codec, self.passes, self.seam, self.attention = codec, passes, seam, attention
        self.store: LayerStore | None = None
        self._device_before_offload: torch.device | None = None

    @untraced
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Hands new tokens to the attention; CacheError unless this is a pass of the model of this cache's session."""
        if not self.seam.is_open:
            raise CacheError(DETACHED)
        if not self.seam.current.is_running:
            raise CacheError(OTHER_MODEL)
        self.is_initialized = True
        if self.attention.latent:  # transformers takes the latent for the key
            key_states, value_states = value_states, key_states
        if self.attention.channels != "halves":
            key_states = self.attention.in_order(key_states)
        return NewTokens(self, key_states, value_states), value_states

    def get_seq_length(self) -> int:
        """Slots seen so far, padding included."""
        return self.passes.sequences.slots

    def offload(self) -> None:
        """Moves the layer's tensors to the CPU."""
        if self.store is not None:
            self._device_before_offload = self._device_before_offload or self.store.keys.device
            self.store.map(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Moves the layer's tensors back to where they were."""
        if self.store is not None and (device := self._device_before_offload) is not None:
            self.store.map(lambda x: x.to(device, non_blocking=True))
        self._device_before_offload = None
