"""Several pretended devices on a CPU, `cpu:0`, `cpu:1` and so on, which do not compute with each other's tensors.

Torch takes an index of a CPU for another device than the CPU, and has no such device: a tensor of one wraps a tensor
of the CPU. Autograd runs on them as on any device. Memory, streams and kernels are not pretended, and inference mode
is one without gradients, because tensors made in it cannot be wrapped.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

HOST = torch.device("cpu")
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
_INDEXING = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default)


class PretendedTensor(Tensor):
    """A tensor of a pretended device; its numbers are those of `on_host`."""

    on_host: Tensor

    @staticmethod
    def __new__(cls, on_host: Tensor, device: torch.device) -> PretendedTensor:
        places = {"strides": on_host.stride(), "storage_offset": on_host.storage_offset()}
        made = torch.Tensor._make_wrapper_subclass(cls, on_host.shape, **places, dtype=on_host.dtype, device=device)
        made.on_host = on_host
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        return _compute(func, args, kwargs or {})


def _compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What an operation gives, on the device of its arguments or the one that it names."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    indices = {id(x) for x in args[1]} if func in _INDEXING else set()
    # as on GPUs, single numbers and indices may be on the host
    devices = {x.device for x in tensors if x.device != HOST or (x.dim() and id(x) not in indices)}
    if len(devices) > 1 and func not in _COPIES:
        names = " and ".join(sorted(map(str, devices)))
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {names} ({func})")
    device = kwargs.get("device")
    if device is None:
        device = tensors[0].device if func in _COPIES else next(iter(devices), HOST)
    if "device" in kwargs:
        kwargs["device"] = HOST
    host_args, host_kwargs = tree_map_only(PretendedTensor, lambda x: x.on_host, (args, kwargs))
    output = func(*host_args, **host_kwargs)
    if device == HOST:
        return output
    output = tree_map_only(Tensor, lambda x: PretendedTensor(x, device), output)
    return return_and_correct_aliasing(func, args, kwargs, output)


class _Factories(TorchDispatchMode):
    """Makes tensors on pretended devices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        return _compute(func, args, dict(kwargs or {}))


class _Conversions(TorchFunctionMode):
    """Functions that read or fill memory without an operation that torch dispatches."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        if func is Tensor.tolist:
            args = (args[0].to(HOST),)
        return func(*args, **kwargs)


@contextmanager
def pretended_devices() -> Iterator[None]:
    """Lets `device="cpu:0"` and the like make tensors of pretended devices, inside the block."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # weights keep their type otherwise
    try:
        inference = patch.object(torch._C, "_InferenceMode", lambda mode: torch.set_grad_enabled(not mode))
        with _Factories(), _Conversions(), inference:
            yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
