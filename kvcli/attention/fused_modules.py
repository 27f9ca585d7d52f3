"""Modules of a model around attention, run by kernels of few launches while decode steps run.

Norms, projections and gated MLPs are found by what they compute, not by the name of the model: a kernel stands in for
one whose result it gives, up to rounding, for random input. Everything else runs as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from threading import RLock, get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from kvcli.kernels.linear import MOST_ROWS, gated, linear, rms_norm
from kvcli.seam.decoder import decoder_layers

_GATED = ("gate_proj", "up_proj", "down_proj")
_MERGED = ("q_proj", "k_proj", "v_proj")  # in the order in which attention calls them
_ACTIVATIONS: dict[str, Any] = {"silu": silu, "gelu_tanh": partial(gelu, approximate="tanh")}
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest difference that is rounding, relative to a module's largest output."""

_ONE_AT_A_TIME = RLock()  # threads may share a model


class FusedModules:
    """The modules of a model that have kernels; they run them inside `active` blocks.

    Args:
        model: on one device, where Triton's kernels run; of one on several, no modules have kernels.
    """

    def __init__(self, model: nn.Module) -> None:
        self._kernels: dict[nn.Module, partial[Any]] = {}
        self._verdicts: dict[Any, dict[str, Any] | None] = {}
        layers = decoder_layers(model)
        self._weight = next(layers.parameters())  # Triton launches on the current GPU, whatever its arguments are on
        with _ONE_AT_A_TIME, torch.cuda.device_of(self._weight), torch.no_grad():
            for module in layers.modules() if len({x.device for x in layers.parameters()}) == 1 else ():
                self._take(module)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Runs the kernels in this thread, inside the block, and leaves the modules as they were."""
        with _ONE_AT_A_TIME:
            for module, kernel in self._kernels.items():
                module.forward = partial(_here, get_ident(), kernel, module.forward)
            try:
                with torch.cuda.device_of(self._weight):
                    yield
            finally:
                for module in self._kernels:
                    del module.forward

    def launch(self, rows: int) -> None:
        """Launches all kernels that take so many rows, on zeros."""
        inputs: dict[int, Tensor] = {}
        for module, kernel in self._kernels.items():
            weight = next(module.parameters())
            kernel(inputs.setdefault(weight.shape[-1], weight.new_zeros(rows, 1, weight.shape[-1])))

    def _take(self, module: Any) -> None:
        children, weights = dict(module.named_children()), [*module.parameters()]
        if not _is_plain(module) or not weights or not all(map(_is_stored, weights)):
            return
        if _is_linear(module):
            self._kernels.setdefault(module, partial(_linear, module))
        elif type(module).__name__.endswith("RMSNorm") and [*module.state_dict()] == ["weight"] and _eps(module):
            settings = [{"offset": offset, "late": late} for offset, late in product((0.0, 1.0), (True, False))]
            self._try(module, partial(_norm, module), settings, weights)
        elif all(_is_linear(children.get(name)) for name in _GATED):
            own, biases = getattr(module, "act_fn", None), [children[name].bias for name in _GATED]
            if own is not None and biases == [None] * 3 and len(weights) == 3:
                named = [{"activation": name} for name, act in _ACTIVATIONS.items() if _agree(own, act)]
                self._try(module, partial(_mlp, module), named, weights)
        elif all(_is_linear(children.get(name)) for name in _MERGED):
            merged = [children[name] for name in _MERGED]
            if len({(projection.in_features, projection.bias is None) for projection in merged}) == 1:
                kept: list[Any] = [None]
                self._kernels |= {projection: partial(_one_of, i, merged, kept) for i, projection in enumerate(merged)}

    def _try(self, module: Any, kernel: partial[Any], settings: list[Any], weights: list[Tensor]) -> None:
        """Takes the settings with which a kernel gives what the first such module computes, if there are any."""
        plain = {name: x for name, x in vars(module).items() if isinstance(x, int | float | str)}
        key = type(module), *map(type, module.children()), *((x.shape, x.dtype) for x in weights), *plain.items()
        if key not in self._verdicts:
            x = torch.randn(1, 2, weights[0].shape[-1], generator=torch.Generator().manual_seed(0)).to(weights[0])
            x[:, 1] *= 1e-3
            expected = module(x).float()
            errors = [(float((kernel(x, **some) - expected).abs().max()), i) for i, some in enumerate(settings)]
            error, best = min(errors, default=(math.inf, 0))
            self._verdicts[key] = settings[best] if error <= _TOLERANCE[x.dtype] * expected.abs().max() else None
        if (found := self._verdicts[key]) is not None:
            self._kernels[module] = partial(kernel, **found)


def _is_stored(weight: Tensor) -> bool:
    """Whether a weight lies in memory as its dtype says; torchao's, which do not, are weights of a `Linear`, too."""
    return type(weight) is nn.Parameter and weight.dtype in _TOLERANCE and weight.is_contiguous()


def _is_plain(module: Any) -> bool:
    """Whether a module's `forward` is its class's, and nothing else is called with it."""
    return "forward" not in vars(module) and not module._forward_hooks and not module._forward_pre_hooks


def _is_linear(module: Any) -> bool:
    return type(module) is nn.Linear and _is_plain(module) and all(map(_is_stored, module.parameters()))


def _agree(ours: Any, theirs: Any) -> bool:
    """Whether two activations are one, by which GELU is told from its approximations."""
    x = torch.linspace(-9, 9, 181)
    return torch.allclose(ours(x), theirs(x), rtol=1e-5, atol=1e-5)


def _fits(x: Tensor, weight: Tensor) -> bool:
    return x.dtype == weight.dtype and x.is_contiguous() and x.numel() <= MOST_ROWS * x.shape[-1]


def _here(thread: int, kernel: Any, own: Any, *args: Any, **kwargs: Any) -> Any:
    """What a module's kernel makes of its one input, or it itself, if the kernel does not take that or elsewhere."""
    made: Tensor | None = kernel(*args) if get_ident() == thread and len(args) == 1 and not kwargs else None
    return own(*args, **kwargs) if made is None else made


def _linear(module: Any, x: Tensor) -> Tensor | None:
    return linear(x, [module.weight], [module.bias])[0] if _fits(x, module.weight) else None


def _one_of(index: int, merged: list[Any], kept: list[Any], x: Tensor) -> Tensor | None:
    """A product of several with the same input, which are all computed when the first one is asked for."""
    if index == 0 and _fits(x, merged[0].weight):
        kept[0] = x, linear(x, [m.weight for m in merged], [m.bias for m in merged])
    output: Tensor | None = kept[0][1][index] if kept[0] is not None and kept[0][0] is x else None
    kept[0] = None if index == len(merged) - 1 else kept[0]
    return output


def _mlp(module: Any, x: Tensor, activation: str) -> Tensor | None:
    if not _fits(x, module.gate_proj.weight):
        return None
    inner = gated(x, module.gate_proj.weight, module.up_proj.weight, activation)
    return linear(inner, [module.down_proj.weight], [None])[0]


def _norm(module: Any, x: Tensor, offset: float, late: bool) -> Tensor | None:
    if x.dtype != module.weight.dtype or not x.is_contiguous():
        return None
    return rms_norm(x, module.weight, _eps(module), offset=offset, late=late)


def _eps(module: Any) -> Any:
    """What a norm adds to the mean of squares; None: it says so nowhere."""
    found = (getattr(module, name, None) for name in ("variance_epsilon", "eps", "epsilon"))
    return next((x for x in found if isinstance(x, float)), None)
