"""Codes, and the codecs that write and read them.

A codec sees tensors of one layer. It does not know about caches, models, files or the command line.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Literal, Self, cast

import torch
from torch import Tensor, nn
from typing_extensions import TypeVar

from kvcli.errors import UsageError
from kvcli.kernels.launch import FP16_MAX, has_hopper_shared_memory
from kvcli.rope import Rotation
from kvcli.spec import ModelSpec

Space = Literal["pre_rope", "post_rope", "tile"]
"""Which keys a codec takes: before RoPE, after it, or rotated by their position within a tile of `rope.ROPE_TILE`."""


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
    """State of a codec for each sequence, such as a subspace of its prompt's queries; axis 0 is the batch."""


@dataclass(frozen=True)
class Codes(Tensors):
    """Stored tensors of some tokens.

    Axis 0 of each is the batch, axis 1 the kv heads (1 where they are coded jointly), axis 2 the time. The first field
    has one entry per token; others may have one entry for several tokens.
    """

    @property
    def num_tokens(self) -> int:
        """Tokens stored."""
        return int(next(iter(vars(self).values())).shape[2])

    def slice(self, start: int, stop: int) -> Self:
        """Tokens [start, stop) as views; the range must not cut an entry that several tokens share."""
        total = self.num_tokens
        if (start, stop) == (0, total):
            return self
        parts = []
        for x in vars(self).values():
            tokens = max(1, total // (x.shape[2] or 1))
            parts.append(x[:, :, start // tokens : stop // tokens])
        return type(self)(*parts)


CodesT = TypeVar("CodesT", bound=Codes)
StateT = TypeVar("StateT", bound=State | None, default=Any)
ValueT = TypeVar("ValueT")


class CachedFromBuffers(Generic[ValueT]):
    """A value computed from tensors, and computed again after one of them was replaced, moved or written to."""

    def __init__(self) -> None:
        self._cached: tuple[tuple[tuple[object, ...], ...], ValueT] | None = None

    def get(self, make: Callable[[], ValueT], *sources: Tensor) -> ValueT:
        """The value of `make()`, a function of `sources`."""
        # a tensor made in inference mode has no version counter
        versions: tuple[tuple[object, ...], ...] = ()
        for x in sources:
            versions += ((x.data_ptr(), x.device, x.shape, 0 if x.is_inference() else x._version),)
        cached = self._cached  # read once: another thread may replace it
        if cached is None or cached[0] != versions:
            cached = self._cached = (versions, make())
        return cached[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors: the value itself, or the tensors among its attributes."""
        value = self._cached and self._cached[1]
        tensors = [value] if value is None or isinstance(value, Tensor) else vars(value).values()
        return sum(x.nbytes for x in tensors if isinstance(x, Tensor))


class Codec(nn.Module, ABC, Generic[CodesT, StateT]):
    """Encodes the keys or the values of one layer; fitted state is in its buffers.

    `StateT` is the type of what it keeps of each sequence, None for most codecs. `state` arguments are those of the
    sequences whose tokens are encoded or decoded.
    """

    spec: ModelSpec

    tokens_per_group: int = 1
    """Tokens that are encoded together; `encode` takes whole groups."""

    max_magnitude: float = FP16_MAX
    """Largest `peak` of what codes hold; a cache refuses more."""

    calibrated_range: bool = False
    """Whether `peak` is relative to what was calibrated, so that float16 numbers can exceed the range, too."""

    exact: bool = False
    """Whether tokens are stored as they are, so that decoding to their dtype copies nothing."""

    fused: bool = False
    """Whether `encode` runs in Triton kernels, where the codec has them; set by the session."""

    def __init__(self) -> None:
        super().__init__()
        self._encoded_groups: dict[tuple[torch.dtype, torch.device], CodesT] = {}

    @abstractmethod
    def encode(self, x: Tensor, state: StateT) -> CodesT:
        """Encodes tokens x [batch, num_kv_heads, time, head_dim] of any float dtype and with any strides.

        The codes follow from x and the finalized state of the sequences alone.
        """

    def encode_noted(self, x: Tensor, peak: Tensor) -> CodesT:
        """`encode` of a codec that keeps nothing of a sequence; `peak`, float32 [], grows as in `round_in_place`."""
        codes = self.encode(x, cast("StateT", None))
        torch.maximum(peak, self.peak(x, codes), out=peak)
        return codes

    def encode_into(self, x: Tensor, state: StateT, codes: CodesT) -> None:
        """`encode` that overwrites codes of as many tokens, views of longer tensors."""
        for stored, new in zip(vars(codes).values(), vars(self.encode(x, state)).values(), strict=True):
            stored.copy_(new)

    def round_in_place(
        self, window: Tensor, sinks: int, first: Tensor, count: int, codes: CodesT, peak: Tensor | None = None
    ) -> bool:
        """Encodes tokens of a ring window and overwrites them there with what their codes decode to, in one kernel.

        Args:
            window: [batch, num_kv_heads, sinks + ring, head_dim]; token t after the sinks is in slot sinks + t % ring.
            sinks: slots before the ring.
            first: first token of each row, counted after the sinks, int32 [batch, 1].
            codes: of all tokens of each row from its first on; written at each row's place.
            peak: float32 [], grows to the `peak` of the tokens, at least if that is beyond a limit of codes.

        Returns:
            False where there is no such kernel; nothing has changed then.
        """
        return False

    def peak(self, x: Tensor, codes: CodesT) -> Tensor:
        """What `max_magnitude` limits, float32 []: the largest magnitude of tokens x, or in their codes."""
        return torch.linalg.vector_norm(x, float("inf"), dtype=torch.float32)

    @abstractmethod
    def decode(self, codes: CodesT, state: StateT) -> Tensor:
        """Inverse of `encode`: float32 [batch, num_kv_heads, time, head_dim]."""

    def decode_to(self, codes: CodesT, state: StateT, dtype: torch.dtype) -> Tensor:
        """`decode` in another dtype [batch, num_kv_heads, time, head_dim], by a kernel if `fused` and there is one.

        Decoded values can lie a little beyond the encoded ones, so they are clamped to the range of float16.
        """
        return _in_range(self.decode(codes, state), dtype)

    def new_state(self, batch: int, device: torch.device) -> StateT | None:
        """An empty state of `batch` sequences, all zeros; None for codecs that keep nothing of a sequence."""
        return None

    def encoded_group(self, like: Tensor) -> CodesT:
        """Codes of one group of zeros, batch 1, which show the shapes and dtypes of what is stored.

        `like` [batch, num_kv_heads, time, head_dim] has the dtype and the device of what is encoded.
        """
        key = (like.dtype, like.device)
        if key not in self._encoded_groups:
            # a copy that shares all tensors: other threads may be encoding with this codec
            reference: Any = copy.copy(self)
            reference.fused = False
            state = reference.new_state(1, like.device)
            if state is not None:
                reference.finalize_state(state, [0])
            group = like.new_zeros(1, like.shape[1], self.tokens_per_group, like.shape[3])
            with without_autocast(like):
                self._encoded_groups.setdefault(key, reference.encode(group, state))
        return self._encoded_groups[key]

    def kernel_note(self, device: torch.device) -> str | None:
        """How and why encoding on a device does without its kernels; None if it uses them or has none."""
        if self.fits(device):
            return None
        return f"{self.spec.head_dim} channels are coded in PyTorch: kernels need more shared memory than the GPU has"

    def fits(self, device: torch.device) -> bool:
        """Whether kernels of these channels fit into the shared memory of a device."""
        return self.spec.head_dim <= 256 or has_hopper_shared_memory(device)

    def make_kernel_tables(self) -> None:
        """Computes the tables that kernels read, from the buffers, as the first call of a kernel would."""

    def randomize_(self, generator: torch.Generator) -> None:
        """Fills the buffers that a fit would fill with random values, in place, for measuring speed and memory.

        This fills every floating-point buffer that is all zeros, so that its product with a vector of unit variance
        has about unit variance. A codec whose fitted buffers are of other kinds overrides it. The generator is on the
        codec's device.
        """
        for buffer in self.buffers():
            if buffer.is_floating_point() and buffer.numel() and not buffer.count_nonzero():
                buffer.normal_(generator=generator).mul_(max(buffer.shape) ** -0.5)

    def of_rank(self, rank: int, ranks: int) -> Any:
        """The fitted codec of the kv heads of one process of `ranks`, each of which has as many, one after the other.

        Raises:
            UsageError: heads of different processes are coded together.
        """
        raise UsageError(f"{ranks} ranks cannot divide codes of {self.spec.num_kv_heads} kv heads")

    @abstractmethod
    def bits_per_token(self) -> float:
        """Stored bits per token, over all kv heads, scales and norms included; 8 * codes.nbytes / tokens exactly."""

    def codebook_bytes(self) -> int:
        """Bytes that a model holds once: the fitted buffers, and tables that kernels derived from them."""
        derived = sum(value.nbytes for value in vars(self).values() if isinstance(value, CachedFromBuffers))
        return derived + sum(buffer.nbytes for buffer in self.buffers())


class KeyCodec(Codec[CodesT, StateT]):
    """A codec of keys; `space` says how those that it takes are rotated.

    A codec with a state observes queries and keys of every sequence until the first keys of that sequence are encoded;
    then its state is final.
    """

    space: Space = "post_rope"
    query_space: Space = "post_rope"

    def observe(self, state: StateT, queries: Tensor, keys: Tensor, counts: Tensor) -> None:
        """Adds new tokens to the state, in place.

        Queries [batch, num_heads, time, head_dim] are in `query_space`, keys [batch, num_kv_heads, time, head_dim] are
        after RoPE; both are 0 at padding and in finalized sequences. `counts`, float32 [batch], are the new tokens of
        each sequence, 0 in finalized ones.
        """

    def scores(self, query: Tensor, codes: CodesT, state: StateT, rotation: Rotation | None) -> Tensor:
        """Products of a few queries with the keys; a codec overrides it where it need not decode for that.

        Queries are float32 [batch, num_kv_heads, rows, head_dim], rotated; rows are all queries of a kv head. RoPE of
        the tokens is float32; None if `space` is `post_rope`. Returns float32 [batch, num_kv_heads, rows, time].
        """
        keys = self.decode(codes, state)
        if rotation is not None:
            keys = (rotation.tile if self.space == "tile" else rotation).apply(keys)
        return query @ keys.transpose(-1, -2)

    def use_units(self, units: Tensor) -> None:
        """Takes units of channels, float32 [head_dim], 1 or more, for codes that would err alike in all channels."""

    def rotated_offset(self, offset: Tensor, rotation: Rotation) -> Tensor:
        """A constant pre-RoPE key [1 or batch, heads, 1, head_dim] at each token's position; at that of its block if
        `space` is `tile`, so that a query has one product with it per block.
        """
        return (rotation.block if self.space == "tile" else rotation).at_each_position(offset)

    def decode_rotated(
        self, codes: CodesT, state: StateT, rotation: Rotation, offset: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """Keys after RoPE with the layer's offset; a codec overrides it where a kernel does all of it.

        Args:
            rotation: RoPE of the tokens, float32.
            offset: None, or float32 [1, num_kv_heads, 1, head_dim], the constant pre-RoPE key that is not coded.
            dtype: of the result, [batch, num_kv_heads, time, head_dim], clamped to its range if that is float16.
        """
        keys = self.decode_to(codes, state, torch.float32)
        if self.space == "pre_rope":
            keys = rotation.apply(keys if offset is None else keys + offset)
        else:
            keys = rotation.tile.apply(keys) if self.space == "tile" else keys
            keys = keys if offset is None else keys + self.rotated_offset(offset, rotation)
        return _in_range(keys, dtype)

    def finalize_state(self, state: StateT, rows: list[int]) -> None:
        """Computes, in place, from the observed tokens what encoding needs, for sequences `rows` of the batch."""

    def reset_state(self, state: StateT, rows: list[int]) -> None:
        """Makes the state of sequences `rows` empty again, in place: none of their tokens is a code any more."""
        if isinstance(state, State) and rows:
            for x in vars(state).values():
                x[rows] = 0


class ValueCodec(Codec[CodesT, Any]):
    """A codec of values; it keeps no state, so `state` is None."""

    def weighted_sum(self, weights: Tensor, codes: CodesT) -> Tensor:
        """Weighted sums of the values; a codec overrides it where it need not decode for that.

        `weights` are float32 [batch, num_kv_heads, rows, time] of all query rows of a kv head, a few; the result is
        float32 [batch, num_kv_heads, rows, head_dim].
        """
        return weights @ self.decode(codes, None)


def _in_range(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in another dtype, clamped to the range of float16 if it is that."""
    return (x.clamp(-FP16_MAX, FP16_MAX) if dtype == torch.float16 else x).to(dtype)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Disables autocast on a tensor's device, so that codes and subspaces do not depend on it."""
    on = not x.is_meta and torch.is_autocast_enabled(x.device.type)
    return torch.autocast(x.device.type, enabled=False) if on else nullcontext()
