"""Bytes that are reachable from an object: storages of tensors, numpy arrays and bytes, each once."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
"""What belongs to the program, not to a cache."""


def reachable_bytes(root: Any, without: Any = None) -> int:
    """Bytes of all storages that are reachable from an object through attributes and containers, each counted once.

    Args:
        without: an object, such as the model; what is reachable from it is not counted.
    """
    seen: set[int] = set()
    kept: list[Any] = []  # an object that is gone could give its id to another one
    others = dict(_storages(without, seen, kept))
    return sum(size for key, size in dict(_storages(root, seen, kept)).items() if key not in others)


def _storages(root: Any, seen: set[int], kept: list[Any]) -> Iterator[tuple[int, int]]:
    """Addresses and sizes of storages."""
    waiting = [root]
    while waiting:
        x = waiting.pop()
        if id(x) in seen or isinstance(x, _CODE):
            continue
        seen.add(id(x))
        kept.append(x)
        if isinstance(x, torch.Tensor) and not hasattr(x, "__tensor_flatten__"):  # else its parts are what is held
            storage = x.untyped_storage()
            yield storage.data_ptr(), storage.nbytes()
        elif isinstance(x, bytes | bytearray):
            yield id(x), len(x)
        elif type(x).__module__ == "numpy" and hasattr(x, "__array_interface__"):
            whole = x
            while type(getattr(whole, "base", None)).__module__ == "numpy":
                whole = whole.base
            yield whole.__array_interface__["data"][0], whole.nbytes
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
