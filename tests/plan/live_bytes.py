"""How many bytes of tensors are alive at once, traced on the `meta` device: shapes are computed, numbers are not.

Code that asks for numbers is answered as it hopes: all of them are finite, none of them is wrong.
"""

import weakref
from collections.abc import Callable
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


def peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes that tensors made by a function of `meta` tensors take at once, copies to the host included.

    Tensors on other devices are not counted, nor are those that were there before. Run it with `torch.no_grad`, not in
    inference mode, in which operations that consist of others are not seen to do so.
    """
    with _Answers(), _LiveBytes() as live:
        run()
    return live.peak


class _LiveBytes(TorchDispatchMode):
    """Counts storages from their first operation until nothing refers to them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self._now = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = _ANSWERS.get(func)
        if answer is not None and args[0].is_meta:
            return answer(*args)
        packet = func.overloadpacket
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None and func is torch.ops.aten._to_copy.default and args[0].is_meta:
            kwargs["device"] = META
        result = func(*args, **kwargs)
        inputs = {x.untyped_storage()._cdata for x in _tensors((args, kwargs))}
        doubted = any(hasattr(x, _DOUBT) for x in _tensors(args))
        doubts = packet is torch.ops.aten.any or (packet in _CONNECTIVES and doubted)
        for x in _tensors(result):
            if doubts:
                setattr(x, _DOUBT, True)
            if x.is_meta and x.untyped_storage()._cdata not in inputs:
                self._count(x.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return

        def released(_: object) -> None:
            del self._alive[key]
            self._now -= size

        self._alive[key] = weakref.ref(storage, released)
        self._now += size
        self.peak = max(self.peak, self._now)


class _Answers(TorchFunctionMode):
    """Lets `meta` tensors be made lists of and pass through experts, and attention keep no scores, as in kernels."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention and args[0].is_meta:
            batch, heads, time, _ = args[0].shape
            return args[0].new_empty(batch, time, heads, args[2].shape[-1]).transpose(1, 2)
        if func is torch._grouped_mm and args[0].is_meta:
            # on the meta device only bfloat16 is taken; what one expert returns of all rows has the same shape
            return args[0] @ args[1][0]
        if func is Tensor.tolist and args[0].is_meta:
            return torch.ones(args[0].shape, dtype=args[0].dtype).tolist()
        return func(*args, **(kwargs or {}))


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]
