"""The states of layers that keep transformers' own cache, as tensors: windows, convolutions, recurrences.

They belong to the tokens that the cache holds and to no shorter text, so a snapshot with states is used whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers.cache_utils import DynamicLayer

from kvcli.cache.snapshot import Snapshot
from kvcli.errors import CacheError

_PREFIX = "others."


@dataclass(frozen=True)
class EndOfPass:
    """The states at the end of a pass, to which a cache can be cut after others, as `states_of` gives them."""

    slots: int
    tensors: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the states."""
        return sum(x.nbytes for x in self.tensors.values())

    def added_to(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot, of as many slots, with the states; it cannot be cut then."""
        if not self.tensors:
            return snapshot
        return Snapshot(replace(snapshot.counts, observed=snapshot.counts.lengths), snapshot.tensors | self.tensors)


def states_of(layers: Mapping[int, Any], new: Sequence[Any], device: torch.device | str | None) -> dict[str, Tensor]:
    """Copies of states; layers by their index in the model, beside `new`, all layers as they are without tokens.

    Tensors are named `others.L.state.NAME`; numbers and flags have no axis.
    """
    return {
        f"{_PREFIX}{layer_idx}.state.{name}": torch.as_tensor(value).to(device, copy=True)
        for layer_idx, layer in layers.items()
        for name, value in _values(layer)
        if not _equal(value, dict(_values(new[layer_idx])).get(name))
    }


def take_states(tensors: dict[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """Takes the states out of a snapshot's tensors: those of each layer by their names."""
    states: dict[int, dict[str, Tensor]] = {}
    for name in [x for x in tensors if x.startswith(_PREFIX)]:
        layer_idx, _, rest = name.removeprefix(_PREFIX).partition(".state.")
        states.setdefault(int(layer_idx) if layer_idx.isdecimal() else -1, {})[rest] = tensors.pop(name)
    return states


def fill(layer: Any, states: Mapping[str, Tensor], rows: int, device: torch.device) -> None:
    """Gives a new layer the states of another one of its kind; CacheError: it cannot have had them."""
    for name, x in states.items():
        attribute, _, key = name.partition(".")
        holder, place = (
            (vars(layer), attribute) if not key else (vars(layer).get(attribute), int(key) if key.isdecimal() else key)
        )
        if not isinstance(holder, dict) or place not in holder or not isinstance(holder[place], Tensor | int | None):
            raise CacheError(f"the snapshot has a state {name}, for which a {type(layer).__name__} has no place")
        if x.dim() and (not x.is_floating_point() or len(x) != rows):
            raise CacheError(f"the snapshot's state {name} is {x.dtype} {list(x.shape)}, which is not of {rows} rows")
        holder[place] = x.to(device, copy=True) if x.dim() else x.item()
    tensors = [x for x in states.values() if x.dim()]
    layer.device, layer.dtype = device, tensors[0].dtype if tensors else None
    for name, value in _values(layer):
        if isinstance(value, Tensor) and name in vars(layer):
            setattr(layer, name, value.to(device))


def make_writable(layers: Sequence[Any]) -> None:
    """Copies states that were made in inference mode, outside which they cannot be written to."""
    for layer in layers:
        if any(isinstance(x, Tensor) and x.is_inference() for _, x in _values(layer)):
            layer.__dict__ |= tree_map_only(Tensor, torch.clone, vars(layer))


def can_be_static(layers: Sequence[Any]) -> bool:
    """Whether what layers hold has the same size after every token, once their windows are full."""
    known = all(type(layer).__module__ == DynamicLayer.__module__ for layer in layers)  # not of a model's own file
    return known and not any(isinstance(x, DynamicLayer) and not hasattr(x, "sliding_window") for x in layers)


def windows_are_full(layers: Sequence[Any], lengths: Sequence[int]) -> bool:
    """Whether every row has as many tokens, without padding, as each layer's window holds beside a new one."""
    windows = [layer for layer in layers if isinstance(layer, DynamicLayer)]
    longest = max((layer.sliding_window for layer in windows), default=0)
    return min(lengths) >= longest and all(x.keys.shape[2] == x.sliding_window - 1 for x in windows if x.is_initialized)


class StaticStates:
    """States that stay in the same memory from pass to pass, so that a pass which is a CUDA graph goes on from them.

    What a pass does to numbers, which only the host reads, it does to them every time.

    Args:
        layers: of transformers' own, for which `can_be_static` and `windows_are_full` hold.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        places = [(holder, name, value) for layer in layers for holder, name, value in _places(layer)]
        self._tensors = [(x, name, y.contiguous()) for x, name, y in places if isinstance(y, Tensor) and y.dim()]
        self._numbers = [(x, name, y) for x, name, y in places if type(y) is int]
        self._steps = [0] * len(self._numbers)
        self._put_back()

    def settle(self) -> None:
        """After a pass, or as its last part: moves what it made to where it was before."""
        for holder, name, static in self._tensors:
            if (made := holder[name]) is not static:
                static.copy_(made)
        self._steps = [holder[name] - before for holder, name, before in self._numbers]
        self._put_back()

    def advance(self) -> None:
        """After a pass, or its replay: counts its tokens, and forgets what a capture that failed has left."""
        self._numbers = [(x, name, y + step) for (x, name, y), step in zip(self._numbers, self._steps, strict=True)]
        self._put_back()

    def _put_back(self) -> None:
        for holder, name, value in (*self._tensors, *self._numbers):
            holder[name] = value


def _places(layer: Any) -> Iterator[tuple[dict[Any, Any], Any, Tensor | int | None]]:
    """The places of a layer's tensors, numbers and flags, also those in its dicts: a dict and a key of it."""
    for holder in (vars(layer), *(x for x in vars(layer).values() if isinstance(x, dict))):
        yield from ((holder, name, x) for name, x in holder.items() if isinstance(x, Tensor | int))


def _values(layer: Any) -> Iterator[tuple[str, Tensor | int]]:
    """Tensors, numbers and flags of a layer, also those of its dicts."""
    for name, value in vars(layer).items():
        inner = {f"{name}.{key}": x for key, x in value.items()} if isinstance(value, dict) else {name: value}
        yield from ((name, x) for name, x in inner.items() if isinstance(x, Tensor | int))


def _equal(value: Tensor | int, other: Any) -> bool:
    if isinstance(value, Tensor):
        return isinstance(other, Tensor) and value.shape == other.shape and torch.equal(value.cpu(), other.cpu())
    return type(value) is type(other) and bool(value == other)
