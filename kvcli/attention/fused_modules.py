"""Modules of a model around attention, run by kernels of few launches while decode steps run.

Norms, projections and gated MLPs are found by what they compute, not by the name of the model: a kernel stands in for
one whose result it gives, up to rounding, for random input. Everything else runs as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from kvcli.kernels.linear import MOST_ROWS, Activation, gated, linear, rms_norm
from kvcli.seam.decoder import decoder_layers

_GATED = ("gate_proj", "up_proj", "down_proj")
_MERGED = ("q_proj", "k_proj", "v_proj")
"""Projections of one input, in the order in which attention calls them."""

_ACTIVATIONS: dict[Activation, Any] = {"silu": silu, "gelu_tanh": partial(gelu, approximate="tanh")}
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest difference that is rounding, relative to a module's largest output."""


class FusedModules:
    """The modules of a model that have kernels; they run them inside `active` blocks.

    Args:
        model: on one device, where Triton's kernels run; of one on several, no modules have kernels.
    """

    def __init__(self, model: nn.Module) -> None:
        self._forwards: dict[nn.Module, partial[Any]] = {}
        self._verdicts: dict[Any, dict[str, Any] | None] = {}
        layers = decoder_layers(model)
        self._device, *others = {x.device for x in layers.parameters()}
        with self._on_device(), torch.no_grad():
            for module in () if others else layers.modules():
                self._take(module)

    @property
    def modules(self) -> list[nn.Module]:
        """Those that have kernels."""
        return [*self._forwards]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Runs the kernels inside the block, and leaves the modules as they were."""
        for module, forward in self._forwards.items():
            module.forward = forward
        try:
            with self._on_device():
                yield
        finally:
            for module in self._forwards:
                del module.forward

    def launch(self, rows: int) -> None:
        """Launches all kernels that take so many rows, on zeros."""
        inputs: dict[int, Tensor] = {}
        for module, forward in self._forwards.items():
            weight = next(module.parameters())
            forward(inputs.setdefault(weight.shape[-1], weight.new_zeros(rows, 1, weight.shape[-1])))

    def _on_device(self) -> AbstractContextManager[Any]:
        """Triton launches on the current GPU, whatever its arguments are on."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def _take(self, module: Any) -> None:
        children, weights = dict(module.named_children()), [*module.parameters()]
        if not _is_plain(module) or not weights or not all(map(_is_stored, weights)):
            return
        if _is_linear(module):
            self._forwards.setdefault(module, partial(_linear, module, module.forward))
        elif type(module).__name__.endswith("RMSNorm") and [*module.state_dict()] == ["weight"] and _eps(module):
            settings = [{"offset": offset, "late": late} for offset, late in product((0.0, 1.0), (True, False))]
            self._try(module, partial(_norm, module, module.forward), settings, weights)
        elif all(_is_linear(children.get(name)) for name in _GATED):
            own, biases = getattr(module, "act_fn", None), [children[name].bias for name in _GATED]
            if own is not None and biases == [None] * 3 and len(weights) == 3:
                named = [{"activation": name} for name, act in _ACTIVATIONS.items() if _agree(own, act)]
                self._try(module, partial(_mlp, module, module.forward), named, weights)
        elif all(_is_linear(children.get(name)) for name in _MERGED):
            merged = [children[name] for name in _MERGED]
            biased = {projection.bias is None for projection in merged}
            if len({projection.in_features for projection in merged}) == len(biased) == 1:
                kept: list[Any] = [None, ()]
                for i, projection in enumerate(merged):
                    self._forwards[projection] = partial(_one_of, i, merged, kept, projection.forward)

    def _try(self, module: Any, forward: partial[Any], settings: list[Any], weights: list[Tensor]) -> None:
        """Takes the settings with which a kernel gives what the first such module computes, if there are any."""
        plain = {name: x for name, x in vars(module).items() if isinstance(x, int | float | str)}
        key = type(module), *map(type, module.children()), *((x.shape, x.dtype) for x in weights), *plain.items()
        if key not in self._verdicts:
            x = torch.randn(1, 2, weights[0].shape[-1], generator=torch.Generator().manual_seed(0)).to(weights[0])
            x[:, 1] *= 1e-3
            expected = module(x).float()
            errors = [(float((forward(x, **some) - expected).abs().max()), i) for i, some in enumerate(settings)]
            error, best = min(errors, default=(math.inf, 0))
            self._verdicts[key] = settings[best] if error <= _TOLERANCE[x.dtype] * expected.abs().max() else None
        if (found := self._verdicts[key]) is not None:
            self._forwards[module] = partial(forward, **found)


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
    """Whether the products take an input."""
    return x.dtype == weight.dtype and x.is_contiguous() and x.numel() <= MOST_ROWS * x.shape[-1]


def _linear(module: Any, own: Any, x: Tensor) -> Tensor:
    return linear(x, [module.weight], [module.bias])[0] if _fits(x, module.weight) else own(x)


def _one_of(index: int, merged: list[Any], kept: list[Any], own: Any, x: Tensor) -> Tensor:
    """A product of several with the same input, which are all computed when the first one is asked for."""
    if index == 0 and _fits(x, merged[0].weight):
        kept[:] = x, linear(x, [m.weight for m in merged], [m.bias for m in merged])
    if kept[0] is not x:
        return own(x)
    output: Tensor = kept[1][index]
    if index == len(merged) - 1:
        kept[:] = None, ()
    return output


def _mlp(module: Any, own: Any, x: Tensor, activation: Activation) -> Tensor:
    if not _fits(x, module.gate_proj.weight):
        return own(x)
    inner = gated(x, module.gate_proj.weight, module.up_proj.weight, activation)
    return linear(inner, [module.down_proj.weight], [None])[0]


def _norm(module: Any, own: Any, x: Tensor, offset: float, late: bool) -> Tensor:
    if x.dtype != module.weight.dtype or not x.is_contiguous():
        return own(x)
    return rms_norm(x, module.weight, _eps(module), offset=offset, late=late)


def _eps(module: Any) -> Any:
    """What a norm adds to the mean of squares; None: it says so nowhere."""
    found = (getattr(module, name, None) for name in ("variance_epsilon", "eps", "epsilon"))
    return next((x for x in found if isinstance(x, float)), None)
