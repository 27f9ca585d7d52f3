"""The codecs of one layer, with the constant part of keys that no codec sees, and attention over what they encoded."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic

import torch
from torch import Tensor, nn
from typing_extensions import TypeVar

from kvcli.methods.base import CachedFromBuffers, Codes, KeyCodec, State, ValueCodec
from kvcli.methods.pages import PageTable
from kvcli.rope import Rotation, TokenRotations, Unrotate

KeyT = TypeVar("KeyT", bound=KeyCodec[Any], default=KeyCodec[Any])
ValueT = TypeVar("ValueT", bound=ValueCodec[Any], default=ValueCodec[Any])


@dataclass(frozen=True)
class OffsetState(State):
    """The constant part of each sequence's keys, as `LayerCodec.key_offset`.

    Attributes:
        mean: float32 [batch, num_kv_heads, 1, head_dim], of its pre-RoPE keys after the sinks, up to the pass that
            encodes the first of them; until then their sum.
        count: float32 [batch], how many these are.
    """

    mean: Tensor
    count: Tensor


class LayerCodec(nn.Module, Generic[KeyT, ValueT]):
    """The two codecs of one layer; its `state_dict` is what an artifact stores.

    Attributes:
        key: codec of the keys, less the offset.
        rotated: whether the model rotates queries and keys of the layer; else the rotations that it is given are by 0.
        key_offset: None, or float32 [num_kv_heads, head_dim]: a constant pre-RoPE key b. Only k - b is encoded, as
            R(m)(k - b) where the codec works after RoPE; R(m) b is added to what is decoded.
        sequence_offset: whether b is the mean of each sequence's first keys instead, which its state holds.
        plain: whether keys or values are kept as they are, so that attention kernels of the method cannot read them.
    """

    plain = False

    key: KeyT
    value: ValueT
    key_offset: Tensor | None

    def __init__(self, key: KeyT, value: ValueT, key_offset: Tensor | None = None) -> None:
        super().__init__()
        self.key, self.value, self.rotated, self.sequence_offset = key, value, True, False
        self.register_buffer("key_offset", key_offset)
        self._offset_in_use: CachedFromBuffers[Tensor | None] = CachedFromBuffers()

    @property
    def bits(self) -> tuple[float, float]:
        """Stored bits per key and per value, scales and norms included."""
        key, value = (codec.bits_per_token() / codec.spec.kv_dim for codec in (self.key, self.value))
        return key, value

    @property
    def offset(self) -> Tensor | None:
        """`key_offset` as [1, num_kv_heads, 1, head_dim]; None if all of it is 0."""
        stored = self.key_offset
        if stored is None:
            return None
        return self._offset_in_use.get(lambda: stored[None, :, None] if stored.any() else None, stored)

    @property
    def needs_rotations(self) -> bool:
        """Whether encoding and decoding keys takes the RoPE of their positions."""
        return self.key.space != "post_rope" or self.sequence_offset or self.offset is not None

    def offset_of(self, state: Any) -> Tensor | None:
        """The constant [1 or batch, num_kv_heads, 1, head_dim] of sequences with this state."""
        return state.mean if isinstance(state, OffsetState) else self.offset

    def new_state(self, batch: int, device: torch.device) -> State | None:
        """The empty state of `batch` sequences: the mean of their keys, or what the key codec keeps, if anything."""
        if not self.sequence_offset:
            state: State | None = self.key.new_state(batch, device)
            return state
        spec = self.key.spec
        mean = torch.zeros(batch, spec.num_kv_heads, 1, spec.head_dim, device=device)
        return OffsetState(mean, torch.zeros(batch, device=device))

    def observe(self, state: Any, queries: Tensor, keys: Tensor, counts: Tensor) -> None:
        """As `KeyCodec.observe`; keys are before RoPE where their mean is kept."""
        if isinstance(state, OffsetState):
            state.mean.add_(keys.float().sum(2, keepdim=True))
            state.count.add_(counts)
        else:
            self.key.observe(state, queries, keys, counts)

    def finalize_state(self, state: Any, rows: list[int]) -> None:
        if isinstance(state, OffsetState):
            state.mean[rows] /= state.count[rows].clamp_min(1).view(-1, 1, 1, 1)
        else:
            self.key.finalize_state(state, rows)

    def encoder_input(self, keys: Tensor, rotation: Rotation, unrotate: Unrotate, state: Any = None) -> Tensor:
        """The input of `key.encode`, from keys of the window: in their dtype after RoPE, else float32.

        Keys are after RoPE, [batch, num_kv_heads, time, head_dim]; `rotation` is RoPE of their positions, float32.
        """
        offset = self.offset_of(state)
        if self.key.space == "pre_rope":
            before = unrotate(rotation, keys)
            return before if offset is None else before - offset
        if self.key.space == "tile":
            return unrotate(rotation.tile, keys, None if offset is None else (offset, rotation.block))
        less = keys if offset is None else keys.float() - self.key.rotated_offset(offset, rotation)
        return less.to(keys.dtype)

    def decode_keys(self, codes: Codes, state: Any, rotation: Rotation | None, dtype: torch.dtype) -> Tensor:
        """Keys after RoPE, [batch, num_kv_heads, time, head_dim], clamped to the range of float16 if that is `dtype`.

        `rotation` is RoPE of the tokens' positions, float32, if `needs_rotations`.
        """
        key, offset = self.key, self.offset_of(state)
        if rotation is None or (offset is None and key.space == "post_rope"):
            return key.decode_to(codes, state, dtype)
        return key.decode_rotated(codes, state, rotation, offset, dtype)

    def scores(self, query: Tensor, codes: Codes, state: Any, rotation: Rotation | None) -> Tensor:
        """`KeyCodec.scores`, offset included; `rotation` is RoPE of the tokens, float32, if `needs_rotations`."""
        key, offset = self.key, self.offset_of(state)
        scores = key.scores(query, codes, state, None if key.space == "post_rope" else rotation)
        if offset is None or rotation is None:
            return scores
        return scores + query @ key.rotated_offset(offset, rotation).transpose(-1, -2)

    def fitted_bytes(self) -> int:
        """Bytes that a model holds once: fitted buffers, and tables that kernels derived from them."""
        offset = 0 if self.key_offset is None else self.key_offset.nbytes
        return self.key.codebook_bytes() + self.value.codebook_bytes() + offset

    @property
    def tokens_per_group(self) -> int:
        """Tokens that are encoded together, keys or values."""
        return max(self.key.tokens_per_group, self.value.tokens_per_group)

    def blocks(self, length: int, most: int, page_size: int = 0) -> list[tuple[int, int]]:
        """Ranges [start, stop) that cover `length` tokens: whole groups and pages, at most `most` tokens or one each.

        They begin at multiples of 16 tokens, so that views of the fields begin where kernels are compiled for.
        """
        group = math.lcm(self.tokens_per_group, page_size or 16)
        size = max(1, most // group) * group
        return [(start, min(start + size, length)) for start in range(0, length, size)]

    def of_rank(self, rank: int, ranks: int) -> LayerCodec:
        """As `Codec.of_rank`, of keys, values and the constant of keys."""
        offset = None if self.key_offset is None else self.key_offset.tensor_split(ranks)[rank]
        codec = LayerCodec(self.key.of_rank(rank, ranks), self.value.of_rank(rank, ranks), offset)
        codec.rotated, codec.sequence_offset = self.rotated, self.sequence_offset
        return codec

    def use_kernels(self, fused: bool, device: torch.device | None = None) -> None:
        """Sets whether encoding and decoding run in Triton kernels, where the codecs have them that fit the device."""
        for part in (self.key, self.value):
            part.fused = fused and (device is None or part.fits(device))

    def make_kernel_tables(self) -> None:
        """Computes the tables that kernels read, from the buffers, so that `fitted_bytes` counts them."""
        self.key.make_kernel_tables()
        self.value.make_kernel_tables()


@dataclass(frozen=True)
class EncodedTokens:
    """The encoded tokens of one layer as attention over codes sees them.

    Attributes:
        key_codes: of `length` tokens, in the key codec's type of `Codes`.
        key_state: of the sequences, in the key codec's type of `State`; None for codecs without one.
        rotations: rotations of these tokens, if `LayerCodec.needs_rotations`; else None.
        lengths: tokens of each sequence, int32 [batch]; None when all have `length`.
        pages: in which pages the codes of each sequence are, if `key_codes` and `value_codes` are pages, not sequences.
        skip: how many of the first tokens of each sequence nobody attends to.

    UsageError: codes that are no pages of that size.
    """

    key_codes: Any
    key_state: Any
    value_codes: Any
    rotations: TokenRotations | None
    lengths: Tensor | None
    pages: PageTable | None = None
    skip: int = 0

    def __post_init__(self) -> None:
        if self.pages is not None:
            self.pages.check(self.key_codes)
            self.pages.check(self.value_codes)

    @cached_property
    def length(self) -> int:
        """Tokens of the longest sequence; of one that has all pages of the table."""
        return int(self.value_codes.num_tokens) if self.pages is None else self.pages.length

    @property
    def page_size(self) -> int:
        """Tokens of a page; 0 without pages."""
        return 0 if self.pages is None else self.pages.page_size

    @property
    def table(self) -> tuple[Tensor | None, int | None]:
        """The block table and its stride, as kernels take them; None without pages."""
        return (None, None) if self.pages is None else (self.pages.table, self.pages.table.stride(0))

    def codes(self, start: int, stop: int, *, masked: bool = False) -> tuple[Any, Any]:
        """Key and value codes of tokens [start, stop), whole pages, of each sequence: views, or copies out of pages.

        `masked`: copies are 0 after the end of a shorter sequence, where pages have any value.
        """
        if self.pages is None:
            return self.key_codes.slice(start, stop), self.value_codes.slice(start, stop)
        lengths = self.lengths if masked else None
        return (
            self.pages.gather(self.key_codes, start, stop, lengths),
            self.pages.gather(self.value_codes, start, stop, lengths),
        )

    def visible(self, start: int, stop: int) -> Tensor | None:
        """Boolean [batch or 1, stop - start], False for `skip` tokens and beyond the end of a shorter sequence.

        None when nothing is hidden.
        """
        if self.lengths is None and start >= self.skip:
            return None
        device = next(iter(self.value_codes.tensors().values())).device
        token = torch.arange(start, stop, device=device).unsqueeze(0)
        visible = token >= self.skip
        return visible if self.lengths is None else visible & (token < self.lengths.unsqueeze(1))


PartialAttention = tuple[Tensor, Tensor]
"""(out, lse): float32 [batch, num_heads, query_len, head_dim], normalized, and [batch, num_heads, query_len], natural
log; out is 0 and lse -inf where a sequence has no encoded token."""

AttendCodes = Callable[[LayerCodec, Tensor, EncodedTokens, float], PartialAttention]
"""Attention over encoded tokens: (codec, rotated query [batch, num_heads, query_len, head_dim], encoded, scaling)."""
