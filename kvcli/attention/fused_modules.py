"""Modules of a model around attention, run by kernels of few launches while decode steps run.

Norms, projections and gated MLPs are found by what they compute, not by the name of the model: a kernel stands in for
one whose result it gives, up to rounding, for random input. Everything else runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain, product
from typing import Any, get_args

import torch
from torch import Tensor, nn

from kvcli.kernels.linear import MOST_ROWS, Activation, gated, linear, rms_norm
from kvcli.seam.decoder import decoder_layers

_MERGED = ("q_proj", "k_proj", "v_proj")
"""Projections of one input, in the order in which attention calls them."""

_EPS = ("variance_epsilon", "eps", "epsilon")

_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest difference that is rounding, relative to a module's largest output."""

_Forward = Callable[..., Any]


class FusedModules:
    """The modules of a model that have kernels; they run them inside `active` blocks.

    Args:
        model: on one device, where Triton's kernels run.
    """

    def __init__(self, model: nn.Module) -> None:
        self._forwards: dict[nn.Module, partial[Any]] = {}
        self._verdicts: dict[Any, dict[str, Any] | None] = {}
        layers = decoder_layers(model)
        self._device = next(layers[0].parameters()).device
        with self._on_device():
            for module in chain.from_iterable(layer.modules() for layer in layers):
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

    def _on_device(self) -> AbstractContextManager[Any]:
        """Triton launches on the current GPU, whatever its arguments are on."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def launch(self, rows: int) -> None:
        """Launches the kernels of one module of each kind on zeros, where they take so many rows."""
        inputs: dict[int, Tensor] = {}
        kinds: dict[Any, tuple[Tensor, partial[Any]]] = {}
        for module, forward in self._forwards.items():
            index = forward.args[0] if forward.func is _one_of else None
            key = forward.func, index, *(x.shape for x in module.parameters())
            kinds.setdefault(key, (next(module.parameters()), forward))
        for weight, forward in kinds.values() if rows <= MOST_ROWS else ():
            x = inputs.setdefault(weight.shape[-1], weight.new_zeros(rows, 1, weight.shape[-1]))
            forward(x)

    def _take(self, module: Any) -> None:
        if not _is_plain(module):
            return
        if _is_linear(module):
            self._forwards.setdefault(module, partial(_linear, module, module.forward))
        elif type(module).__name__.endswith("RMSNorm") and _eps(module) is not None and module.weight is not None:
            settings = ({"offset": offset, "late": late} for offset, late in product((0.0, 1.0), (True, False)))
            self._try(module, partial(_norm, module, module.forward), settings, module.weight.shape[0])
        elif all(_is_linear(getattr(module, name, None)) for name in ("gate_proj", "up_proj", "down_proj")):
            settings = ({"activation": name} for name in get_args(Activation))
            self._try(module, partial(_mlp, module, module.forward), settings, module.gate_proj.in_features)
        elif all(_is_linear(getattr(module, name, None)) for name in _MERGED):
            merged = [getattr(module, name) for name in _MERGED]
            biased = {projection.bias is None for projection in merged}
            if len({projection.in_features for projection in merged}) == len(biased) == 1:
                kept: list[Any] = [None, ()]
                for i, projection in enumerate(merged):
                    self._forwards[projection] = partial(_one_of, i, merged, kept, projection.forward)

    def _try(self, module: Any, forward: partial[Any], settings: Iterator[dict[str, Any]], width: int) -> None:
        """Takes the settings with which a kernel gives what the first such module computes, if there are any."""
        tensors = list(module.parameters())
        if any(x.dtype not in _TOLERANCE or x.dtype != tensors[0].dtype for x in tensors):
            return
        plain = {name: x for name, x in vars(module).items() if isinstance(x, int | float | str)}
        key = type(module), *map(type, module.children()), *((x.shape, x.dtype) for x in tensors), *plain.items()
        if key not in self._verdicts:
            x = torch.randn(1, 2, width, generator=torch.Generator().manual_seed(0)).to(tensors[0])
            expected = module(x)
            errors = [(_error(forward(x, **some), expected), i, some) for i, some in enumerate(settings)]
            error, _, best = min(errors)
            self._verdicts[key] = best if error <= _TOLERANCE[x.dtype] else None
        if (found := self._verdicts[key]) is not None:
            self._forwards[module] = partial(forward, **found)


def _is_plain(module: Any) -> bool:
    """Whether a module's `forward` is its class's, and nothing else is called with it."""
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    return "forward" not in vars(module) and not any(hooks)


def _is_linear(module: Any) -> bool:
    if type(module) is not nn.Linear or not _is_plain(module):
        return False
    return bool(module.weight.is_contiguous() and module.weight.dtype in _TOLERANCE)


def _error(ours: Tensor, theirs: Tensor) -> float:
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return float("inf")
    difference = (ours.float() - theirs.float()).abs().max() / theirs.float().abs().max().clamp_min(1e-30)
    return float(difference.nan_to_num(float("inf")))


def _fits(x: Tensor, weight: Tensor) -> bool:
    """Whether the products take an input."""
    return x.dtype == weight.dtype and x.is_contiguous() and x.numel() <= MOST_ROWS * x.shape[-1]


def _linear(module: Any, own: _Forward, x: Tensor) -> Tensor:

    return linear(x, [module.weight], [module.bias])[0] if _fits(x, module.weight) else own(x)


def _one_of(index: int, merged: list[Any], kept: list[Any], own: _Forward, x: Tensor) -> Tensor:
    """A product of several with the same input, which are all computed when the first one is asked for."""
    if index == 0 and _fits(x, merged[0].weight):
        kept[:] = x, linear(x, [m.weight for m in merged], [m.bias for m in merged])
    if kept[0] is not x:
        return own(x)
    output: Tensor = kept[1][index]
    if index == len(merged) - 1:
        kept[:] = None, ()
    return output


def _mlp(module: Any, own: _Forward, x: Tensor, activation: Activation) -> Tensor:
    if not _fits(x, module.gate_proj.weight):
        return own(x)
    inner = gated(x, module.gate_proj.weight, module.up_proj.weight, activation)
    return linear(inner, [module.down_proj.weight], [module.down_proj.bias])[0]


def _norm(module: Any, own: _Forward, x: Tensor, offset: float, late: bool) -> Tensor:

    if x.dtype != module.weight.dtype or not x.is_contiguous():
        return own(x)
    return rms_norm(x, module.weight, _eps(module), offset=offset, late=late)


def _eps(module: Any) -> Any:
    """What a norm adds to the mean of squares; None: it says so nowhere."""
    return next((x for name in _EPS if isinstance(x := getattr(module, name, None), float)), None)
