"""How many bytes of tensors are alive at once, traced on the `meta` device: shapes are computed, numbers are not.

Code that asks for numbers is answered as it hopes: all of them are finite, none of them is wrong.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

META = torch.device("meta")

_DOUBT = "kvcli_doubt"
"""Attribute of tensors that say whether any of several things is true."""

_CONNECTIVES = (torch.ops.aten.bitwise_or, torch.ops.aten.bitwise_and, torch.ops.aten.logical_or)

_ANSWERS: dict[Any, Callable[..., object]] = {
    torch.ops.aten._local_scalar_dense.default: lambda x: not hasattr(x, _DOUBT) if x.dtype == torch.bool else 1,
    torch.ops.aten.equal.default: lambda x, y: x.shape == y.shape,
    torch.ops.aten.nonzero.default: lambda x: x.new_empty(x.numel(), x.ndim, dtype=torch.int64),
}
"""What operations return whose results depend on numbers."""

_COPIES = (torch.ops.aten._to_copy.default,)
"""Operations that move tensors to another device."""


@dataclass(frozen=True)
class Peak:
    """The most bytes of tensors that were alive at once.

    Attributes:
        device: of those on the device.
        host: of copies to the host.
        total: of both together, which is what counts where the host is the device.
    """

    device: int
    host: int
    total: int


def peak_bytes(run: Callable[[], object]) -> Peak:
    """The most bytes that tensors made by a function of `meta` tensors take at once.

    Tensors on other devices are not counted, nor are those that were there before. Run it with `torch.no_grad`, not in
    inference mode, in which operations that consist of others are not seen to do so.
    """
    with _Answers(), _LiveBytes() as live:
        run()
    return Peak(live.peaks["device"], live.peaks["host"], live.peaks["total"])


class _LiveBytes(TorchDispatchMode):
    """Counts storages from their first operation until nothing refers to them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peaks = {"device": 0, "host": 0, "total": 0}
        self._now = dict(self.peaks)
        self._held: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = _ANSWERS.get(func)
        if answer is not None and args[0].is_meta:
            return answer(*args)
        packet = func.overloadpacket
        kwargs, place = dict(kwargs or {}), "device"
        if kwargs.get("device") is not None and func in _COPIES and args[0].is_meta:
            place = "host" if torch.device(kwargs["device"]).type == "cpu" else "device"
            kwargs["device"] = META
        result = func(*args, **kwargs)
        given = {x.untyped_storage()._cdata for x in _tensors((args, kwargs))}
        doubts = packet is torch.ops.aten.any or (
            packet in _CONNECTIVES and any(hasattr(x, _DOUBT) for x in _tensors(args))
        )
        for x in _tensors(result):
            if doubts:
                setattr(x, _DOUBT, True)
            if x.is_meta and x.untyped_storage()._cdata not in given:
                self._hold(x.untyped_storage(), place)
        return result

    def _hold(self, storage: torch.UntypedStorage, place: str) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._held:
            return

        def released(_: object) -> None:
            del self._held[key]
            self._count(place, -size)

        self._held[key] = weakref.ref(storage, released)
        self._count(place, size)

    def _count(self, place: str, size: int) -> None:
        for name in (place, "total"):
            self._now[name] += size
            self.peaks[name] = max(self.peaks[name], self._now[name])


class _Answers(TorchFunctionMode):
    """Lets `meta` tensors be made lists of and pass through experts, and attention keep no scores, as in kernels."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention and args[0].is_meta:
            batch, heads, time, width = args[0].shape
            return args[0].new_empty(batch, time, heads, width).transpose(1, 2)
        if func is torch._grouped_mm and args[0].is_meta:
            # on the meta device only bfloat16 is taken; what one expert returns of all rows has the same shape
            return args[0] @ args[1][0]
        if func is Tensor.tolist and args[0].is_meta:
            return torch.ones(args[0].shape, dtype=args[0].dtype).tolist()
        return func(*args, **(kwargs or {}))


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]
