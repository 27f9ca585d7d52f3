"""What a compression method is: codes it stores, codecs that make and read them, and the record that names it.

A method sees tensors of one layer. It does not know about caches, models, files or the command line.
"""

from __future__ import annotations

import dataclasses
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, Self, TypeVar

import torch
from torch import Tensor, nn

from kvcli.kernels.derived import Derived
from kvcli.methods.config import CacheConfig
from kvcli.rope import TokenRotations
from kvcli.samples import LayerSamples
from kvcli.spec import ModelSpec

Space = Literal["pre_rope", "post_rope"]


@dataclass(frozen=True)
class Schedule:
    """When tokens leave full precision: `block` or more beyond the last `keep`, in multiples of `granule`."""

    keep: int
    block: int
    granule: int = 1

    def evict(self, num_exact: int) -> int:
        """How many of the oldest of `num_exact` tokens (sinks not counted) are to be encoded now."""
        surplus = num_exact - self.keep
        return 0 if surplus < self.block else surplus - surplus % self.granule


def sliding_window(config: CacheConfig) -> tuple[Schedule, Schedule]:
    """The same window for keys and values; `flush_block` spares an encoding per token while decoding."""
    schedule = Schedule(config.residual_length, config.flush_block or max(1, config.residual_length // 4))
    return schedule, schedule


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
        """Some rows of the batch."""
        return self.map(lambda x: x[rows])


@dataclass(frozen=True)
class State(Tensors):
    """What a codec keeps of each sequence, such as a subspace found from its prompt."""


@dataclass(frozen=True)
class Codes(Tensors):
    """Stored tensors of some tokens.

    Axis 0 of each is the batch, axis 1 the kv heads (1 where they are coded jointly), axis 2 the time. The first field
    has one entry a token; others may have one entry for several tokens.
    """

    @property
    def num_tokens(self) -> int:
        """Tokens stored."""
        first: Tensor = next(iter(vars(self).values()))
        return first.shape[2]

    def slice(self, start: int, stop: int) -> Self:
        """Tokens [start, stop), which must not cut an entry that several tokens share."""
        total = self.num_tokens

        def cut(x: Tensor) -> Tensor:
            shared = total // x.shape[2] if x.shape[2] else 1
            return x[:, :, start // shared : stop // shared]

        return self.map(cut)


CodesT = TypeVar("CodesT", bound=Codes)


class Codec(nn.Module, ABC, Generic[CodesT]):
    """Encodes the keys or the values of one layer; fitted state is in its buffers."""

    tokens_per_group: int = 1
    """Tokens that are encoded together; `encode` takes whole groups."""

    fused: bool = False
    """Whether `encode` runs in Triton kernels, where the codec has them; set by the session."""

    @abstractmethod
    def encode(self, x: Tensor, state: State | None = None) -> CodesT:
        """Encodes x [batch, num_kv_heads, time, head_dim], deterministically, given the sequences' settled state."""

    def encode_into(self, x: Tensor, state: State | None, codes: CodesT) -> None:
        """`encode` with the codes written into given tensors, views of longer ones."""
        for name, found in self.encode(x, state).tensors().items():
            getattr(codes, name).copy_(found)

    @abstractmethod
    def decode(self, codes: CodesT, state: State | None = None) -> Tensor:
        """Inverse of `encode`: float32 [batch, num_kv_heads, time, head_dim]."""

    def decode_to(self, codes: CodesT, state: State | None, dtype: torch.dtype) -> Tensor:
        """`decode` in another dtype, by a kernel where the codec is fused and has one."""
        return self.decode(codes, state).to(dtype)

    def new_state(self, batch: int, device: torch.device) -> State | None:
        """An empty state for some sequences; None for codecs that keep nothing of a sequence."""
        return None

    @abstractmethod
    def bits_per_token(self) -> float:
        """Stored bits a token, over all kv heads, scales and norms included."""

    def codebook_bytes(self) -> int:
        """Bytes that a model holds once: the fitted buffers, and tables that kernels derived from them."""
        derived = sum(value.nbytes for value in vars(self).values() if isinstance(value, Derived))
        return derived + sum(buffer.nbytes for buffer in self.buffers())


class KeyCodec(Codec[CodesT]):
    """A codec of keys, which says whether it wants them before or after RoPE.

    A codec with a state is shown queries and keys of every sequence until the first keys of that sequence are encoded;
    then its state is settled and stays.
    """

    space: Space = "post_rope"
    query_space: Space = "post_rope"

    def observe(self, state: State, queries: Tensor, keys: Tensor, counts: Tensor) -> None:
        """Takes in new tokens, in place.

        Args:
            state: the sequences' state.
            queries: [batch, num_heads, time, head_dim] in `query_space`, 0 at padding and in settled sequences.
            keys: [batch, num_kv_heads, time, head_dim] after RoPE, 0 at the same places.
            counts: float32 [batch], new tokens of each sequence, 0 in settled ones.
        """

    def settle(self, state: State, rows: list[int]) -> None:
        """Derives from what was observed what encoding some sequences needs, in place."""


class ValueCodec(Codec[CodesT]):
    """A codec of values."""


class LayerCodec(nn.Module):
    """The two codecs of one layer; its `state_dict` is what an artifact stores."""

    def __init__(self, key: KeyCodec[Any], value: ValueCodec[Any]) -> None:
        super().__init__()
        self.key = key
        self.value = value

    @property
    def tokens_per_group(self) -> int:
        """Tokens that are encoded together, keys or values."""
        return max(self.key.tokens_per_group, self.value.tokens_per_group)

    def blocks(self, length: int, most: int) -> list[tuple[int, int]]:
        """Cuts encoded tokens into ranges of whole groups, of at most `most` tokens unless a group is longer."""
        size = max(1, most // self.tokens_per_group) * self.tokens_per_group
        return [(start, min(start + size, length)) for start in range(0, length, size)]

    def use_kernels(self, fused: bool) -> None:
        """Says whether encoding runs in Triton kernels, where the codecs have them."""
        self.key.fused = self.value.fused = fused


@dataclass(frozen=True)
class EncodedPart:
    """The encoded tokens of one layer as an attention form sees them.

    Attributes:
        key_codes: codes of the keys of `length` tokens.
        key_state: the sequences' state, for codecs that keep one.
        value_codes: codes of the values of the same tokens.
        rotations: rotations of these tokens; None for post-RoPE codecs.
        lengths: tokens of each sequence, int32 [batch]; None when all have `length`.
    """

    key_codes: Any
    key_state: State | None
    value_codes: Any
    rotations: TokenRotations | None
    lengths: Tensor | None

    @property
    def length(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.value_codes.num_tokens)

    def visible(self, start: int, stop: int) -> Tensor | None:
        """Boolean [batch, stop - start], False beyond the end of a shorter sequence; None when nothing is hidden."""
        if self.lengths is None:
            return None
        return torch.arange(start, stop, device=self.lengths.device) < self.lengths.unsqueeze(1)


PartialAttention = tuple[Tensor, Tensor]
"""(out, lse): float32 [batch, num_heads, query_len, head_dim] and [batch, num_heads, query_len]."""

PartialAttend = Callable[[LayerCodec, Tensor, EncodedPart, float], PartialAttention]
"""Attention of rotated queries [batch, num_heads, query_len, head_dim] over an encoded part, scores times a factor."""


def kernel_form(module: str) -> PartialAttend:
    """The `fused_attend` of a module of kernels, imported when it is first used: Triton is not needed before."""

    def attend(codec: LayerCodec, query: Tensor, part: EncodedPart, scaling: float) -> PartialAttention:
        attend_codes: PartialAttend = importlib.import_module(module).fused_attend
        return attend_codes(codec, query, part, scaling)

    return attend


@dataclass(frozen=True)
class FitReport:
    """What fitting one layer found out, as plain numbers for the artifact's metadata."""

    metrics: Mapping[str, Any]


FitLayer = Callable[[LayerCodec, LayerSamples, LayerSamples, Any, torch.Generator], FitReport]
"""Fits a layer's codec in place from training and held-out samples, a method config and a seeded generator."""


@dataclass(frozen=True)
class Method:
    """One compression method.

    Attributes:
        name: as on the command line.
        summary: one line.
        bits: bits it can be asked for, as shown to users.
        paper: where it comes from.
        config_cls: its settings.
        build: makes the unfitted codec of a layer from the model's shapes, the settings and the layer's index.
        nominal_bits: the paper's bits a value for K and V, without scales.
        schedules: when keys and when values are encoded.
        fit: fits a layer; None for methods without calibration.
        needs_artifact: whether nothing works without fitting.
        for_bits: settings for a number of bits asked for as in `kivi-2`.
        attend_forms: other forms of attention over the encoded part, by name, beside the generic reference.
    """

    name: str
    summary: str
    bits: str
    paper: str
    config_cls: type[CacheConfig]
    build: Callable[[ModelSpec, Any, int], LayerCodec]
    nominal_bits: Callable[[ModelSpec, Any], tuple[float, float]]
    schedules: Callable[[Any], tuple[Schedule, Schedule]] = sliding_window
    fit: FitLayer | None = None
    needs_artifact: bool = False
    for_bits: Callable[[int], dict[str, Any]] | None = None
    attend_forms: Mapping[str, PartialAttend] = dataclasses.field(default_factory=dict)
