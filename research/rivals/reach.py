"""Bytes that are reachable from an object: storages of tensors, numpy arrays and bytes, each once."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy
import torch

_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
"""What belongs to the program, not to a cache."""


def reachable_bytes(root: Any, without: Iterable[torch.Tensor] = ()) -> int:
    """Bytes of all storages that are reachable from an object through attributes and containers, each counted once.

    Args:
        without: tensors whose storages are not counted, such as the weights of a model that the object refers to.
    """
    others = {x.untyped_storage().data_ptr() for x in without}
    return sum(size for key, size in dict(_storages(root)).items() if key not in others)


def _storages(root: Any) -> Iterator[tuple[int, int]]:
    """Addresses and sizes of storages."""
    waiting, seen = [root], dict[int, Any]()  # of objects that are kept, so that no other one is given their id
    while waiting:
        x = waiting.pop()
        if id(x) in seen or isinstance(x, _CODE):
            continue
        seen[id(x)] = x
        if isinstance(x, torch.Tensor) and not hasattr(x, "__tensor_flatten__"):  # else its parts are what is held
            yield x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()
        elif isinstance(x, bytes | bytearray):
            yield id(x), len(x)
        elif isinstance(x, numpy.ndarray):
            while isinstance(x.base, numpy.ndarray):
                x = x.base
            yield x.ctypes.data, x.nbytes
        waiting.extend(_inside(x))


def _inside(x: Any) -> Iterator[Any]:
    """Items of containers, and attributes."""
    if isinstance(x, Mapping):
        yield from x.keys()
        yield from x.values()
    elif isinstance(x, list | tuple | set | frozenset) or type(x).__name__ == "deque":
        yield from x
    yield from getattr(x, "__dict__", {}).values()
    for kind in type(x).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            yield getattr(x, name, None)
