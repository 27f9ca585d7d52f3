"""What a cache holds, counted from its live tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of a cache over all layers and sequences.

    Attributes:
        num_tokens: tokens held, summed over the sequences.
        num_encoded: tokens of them whose keys are codes.
        code_bytes: codes with their scales and norms, as far as they are in use.
        window_bytes: sinks and residual window, as far as they are in use; with tokens that are codes too (KIVI).
        position_bytes: positions, padding marks and cached RoPE tables of encoded tokens.
        state_bytes: what codecs keep per sequence, such as a subspace; it does not grow with the context.
        allocated_bytes: all tensors of the cache with the headroom of their buffers.
        artifact_bytes: codec buffers (codebooks, encoders, projections) and kernel tables derived from them, held once
            per model however many caches there are.
        fp16_bytes: the same tokens uncompressed in 16 bits.
        uncompressed_bytes: the same tokens uncompressed in the model's dtype.
        key_bits: true stored bits per key value of encoded tokens, scales and norms included; 0 without encoded tokens.
        value_bits: the same for values.
        nominal_bits: the paper's bits for K and V.
        layers: how many layers are compressed.
        other_layers: how many layers keep transformers' own cache (sliding windows, linear attention and the like);
            all other figures are of the layers that attend to the whole context.
        other_bytes: what the caches of these hold.
    """

    num_tokens: int
    num_encoded: int
    code_bytes: int
    window_bytes: int
    position_bytes: int
    state_bytes: int
    allocated_bytes: int
    artifact_bytes: int
    fp16_bytes: int
    uncompressed_bytes: int
    key_bits: float
    value_bits: float
    nominal_bits: tuple[float, float]
    layers: int = 0
    other_layers: int = 0
    other_bytes: int = 0

    @property
    def cache_bytes(self) -> int:
        """Everything a cache holds: codes, sinks, window, positions and state."""
        return self.code_bytes + self.window_bytes + self.position_bytes + self.state_bytes

    @property
    def ratio(self) -> float:
        """fp16 bytes over cache bytes."""
        return self.fp16_bytes / self.cache_bytes if self.cache_bytes else 1.0

    @property
    def share(self) -> float:
        """What share of the model's whole cache, uncompressed, the layers of full attention have."""
        whole = self.uncompressed_bytes + self.other_bytes
        return self.uncompressed_bytes / whole if whole else 1.0

    @property
    def true_bits(self) -> float:
        """True bits per value of encoded tokens, keys and values averaged."""
        return (self.key_bits + self.value_bits) / 2

    @property
    def effective_bits(self) -> float:
        """Bits per value of all tokens: sinks, residual window and positions included."""
        return 16 / self.ratio

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain JSON values."""
        derived = ("cache_bytes", "ratio", "share", "true_bits", "effective_bits")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


def own_bytes(layers: Iterable[Any]) -> int:
    """Bytes of the keys, values and states that transformers' own layers of a cache hold."""
    return sum(x.nbytes for x in own_tensors(layers))


def own_tensors(layers: Iterable[Any]) -> list[Tensor]:
    """The keys, values and states that transformers' own layers of a cache hold."""
    tensors = (x for layer in layers for x in tree_leaves(vars(layer)) if isinstance(x, Tensor))
    return [x for x in tensors if x.is_floating_point()]
