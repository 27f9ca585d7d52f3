"""Codes, and the codecs that write and read them.

A codec sees tensors of one layer. It does not know about caches, models, files or the command line.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, Self

import torch
from torch import Tensor, nn
from typing_extensions import TypeVar

from kvcli.kernels.cached import CachedFromBuffers

Space = Literal["pre_rope", "post_rope"]


@dataclass(frozen=True)
class Tensors:
    """A record of tensors whose axis 0 is the batch; a subclass lists them with shape, dtype and meaning."""

    def tensors(self) -> dict[str, Tensor]:
        """The stored tensors by field name."""
        return dict(vars(self))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.nbytes for x in self.tensors().values())

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The same record with a function applied to every tensor."""
        return type(self)(**{name: function(x) for name, x in self.tensors().items()})

    def select(self, rows: Tensor | list[int]) -> Self:
        """Some rows of the batch, in the given order: tensors [batch, ...] become [len(rows), ...]."""
        return self.map(lambda x: x[rows])


@dataclass(frozen=True)
class State(Tensors):
    """What a codec keeps of each sequence, such as a subspace of its prompt's queries; axis 0 of each is the batch."""


@dataclass(frozen=True)
class Codes(Tensors):
    """Stored tensors of some tokens.

    Axis 0 of each is the batch, axis 1 the kv heads (1 where they are coded jointly), axis 2 the time. The first field
    has one entry per token; others may have one entry for several tokens.
    """

    @property
    def num_tokens(self) -> int:
        """Tokens stored."""
        first: Tensor = next(iter(vars(self).values()))
        return first.shape[2]

    def slice(self, start: int, stop: int) -> Self:
        """Tokens [start, stop) as views; the range must not cut an entry that several tokens share."""
        total = self.num_tokens

        def cut(x: Tensor) -> Tensor:
            shared = total // x.shape[2] if x.shape[2] else 1
            return x[:, :, start // shared : stop // shared]

        return self.map(cut)


CodesT = TypeVar("CodesT", bound=Codes)
StateT = TypeVar("StateT", bound=State | None, default=Any)


class Codec(nn.Module, ABC, Generic[CodesT, StateT]):
    """Encodes the keys or the values of one layer; fitted state is in its buffers.

    `StateT` is the type of what it keeps of each sequence, None for most codecs.
    """

    tokens_per_group: int = 1
    """Tokens that are encoded together; `encode` takes whole groups."""

    fused: bool = False
    """Whether `encode` runs in Triton kernels, where the codec has them; set by the session."""

    @abstractmethod
    def encode(self, x: Tensor, state: StateT) -> CodesT:
        """Encodes tokens, deterministically given the finalized state of their sequences.

        Args:
            x: [batch, num_kv_heads, time, head_dim] in any float dtype and with any strides.
            state: of the same sequences; None for codecs without one.
        """

    def encode_into(self, x: Tensor, state: StateT, codes: CodesT) -> None:
        """`encode` that writes into given tensors.

        Args:
            x: [batch, num_kv_heads, time, head_dim].
            state: as for `encode`.
            codes: of `time` tokens, views of longer tensors; overwritten.
        """
        for name, x_codes in self.encode(x, state).tensors().items():
            getattr(codes, name).copy_(x_codes)

    @abstractmethod
    def decode(self, codes: CodesT, state: StateT) -> Tensor:
        """Inverse of `encode`: float32 [batch, num_kv_heads, time, head_dim]."""

    def decode_to(self, codes: CodesT, state: StateT, dtype: torch.dtype) -> Tensor:
        """`decode` in another dtype [batch, num_kv_heads, time, head_dim], by a kernel if `fused` and there is one."""
        return self.decode(codes, state).to(dtype)

    def new_state(self, batch: int, device: torch.device) -> StateT | None:
        """An empty state of `batch` sequences; None for codecs that keep nothing of a sequence."""
        return None

    @abstractmethod
    def bits_per_token(self) -> float:
        """Stored bits per token, over all kv heads, scales and norms included; 8 * codes.nbytes / tokens exactly."""

    def codebook_bytes(self) -> int:
        """Bytes that a model holds once: the fitted buffers, and tables that kernels derived from them."""
        derived = sum(value.nbytes for value in vars(self).values() if isinstance(value, CachedFromBuffers))
        return derived + sum(buffer.nbytes for buffer in self.buffers())


class KeyCodec(Codec[CodesT, StateT]):
    """A codec of keys, which says whether it wants them before or after RoPE.

    A codec with a state observes queries and keys of every sequence until the first keys of that sequence are encoded;
    then its state is final.
    """

    space: Space = "post_rope"
    query_space: Space = "post_rope"

    def observe(self, state: StateT, queries: Tensor, keys: Tensor, counts: Tensor) -> None:
        """Adds new tokens to the state, in place.

        Args:
            state: the sequences' state.
            queries: [batch, num_heads, time, head_dim] in `query_space`, 0 at padding and in finalized sequences.
            keys: [batch, num_kv_heads, time, head_dim] after RoPE, 0 at the same places.
            counts: float32 [batch], new tokens of each sequence, 0 in finalized ones.
        """

    def finalize_state(self, state: StateT, rows: list[int]) -> None:
        """Computes, in place, what encoding needs from what was observed.

        Args:
            state: the sequences' state.
            rows: those sequences of the batch whose first keys are about to be encoded.
        """


class ValueCodec(Codec[CodesT, Any]):
    """A codec of values; it keeps no state, so `state` is None."""


KeyT = TypeVar("KeyT", bound=KeyCodec[Any], default=KeyCodec[Any])
ValueT = TypeVar("ValueT", bound=ValueCodec[Any], default=ValueCodec[Any])


class LayerCodec(nn.Module, Generic[KeyT, ValueT]):
    """The two codecs of one layer; its `state_dict` is what an artifact stores."""

    key: KeyT
    value: ValueT

    def __init__(self, key: KeyT, value: ValueT) -> None:
        super().__init__()
        self.key = key
        self.value = value

    @property
    def tokens_per_group(self) -> int:
        """Tokens that are encoded together, keys or values."""
        return max(self.key.tokens_per_group, self.value.tokens_per_group)

    def blocks(self, length: int, most: int) -> list[tuple[int, int]]:
        """Ranges [start, stop) that cover `length` tokens: whole groups, at most `most` tokens or one group each."""
        size = max(1, most // self.tokens_per_group) * self.tokens_per_group
        return [(start, min(start + size, length)) for start in range(0, length, size)]

    def use_kernels(self, fused: bool) -> None:
        """Says whether encoding and decoding run in Triton kernels, where the codecs have them."""
        self.key.fused = self.value.fused = fused
