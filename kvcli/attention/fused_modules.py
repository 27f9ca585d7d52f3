"""Modules of a model around attention, run by kernels of few launches while decode steps run.

Norms, projections, gated MLPs and sums of a layer are found by what they compute, not by the name of the model: a
kernel stands in for one whose result it gives, up to rounding, for random input. Everything else runs as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from itertools import product
from threading import RLock, get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from kvcli.kernels.linear import MOST_ROWS, add_rms_norm, gated, linear, rms_norm
from kvcli.seam.decoder import decoder_layers
from kvcli.seam.layer import untraced
from kvcli.seam.versions import CACHE_ARGUMENT

_GATED = ("gate_proj", "up_proj", "down_proj")
_MERGED = ("q_proj", "k_proj", "v_proj")  # in the order in which attention calls them
_PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
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
        self._layers: dict[nn.Module, partial[Any]] = {}
        self._kept: list[Any] = [None]
        self._normed: list[Any] = [None]
        layers = decoder_layers(model)
        weights: list[Tensor] = [*layers.parameters()] or [torch.empty(0)]
        self._weight = weights[0]  # Triton launches on the current GPU, whatever its arguments are on
        with _ONE_AT_A_TIME, torch.cuda.device_of(self._weight), torch.no_grad():
            for module in layers.modules() if len({x.device for x in weights}) == 1 else ():
                self._take(module)
            for layer, after in zip(layers, [*layers[1:], None], strict=True):
                self._take_sums(layer, getattr(after, _PARTS[0], None))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Runs the kernels in this thread, inside the block, and leaves the modules as they were."""
        with _ONE_AT_A_TIME:
            try:
                for here, kernels in ((_here, self._kernels), (_layer_here, self._layers)):
                    for module, kernel in kernels.items():
                        if _is_plain(module):
                            module.forward = partial(here, get_ident(), kernel, module.forward)
                with torch.cuda.device_of(self._weight):
                    yield
            finally:
                self._kept[0] = self._normed[0] = None
                for module in (*self._kernels, *self._layers):
                    if getattr(vars(module).get("forward"), "func", None) in (_here, _layer_here):
                        del module.forward

    def launch(self, rows: int) -> None:
        """Launches all kernels that take so many rows, on zeros."""
        for module, kernel in self._kernels.items():
            weight = next(module.parameters())
            zeros = weight.new_zeros(rows, 1, weight.shape[-1])
            kernel(zeros)
            if kernel.func is _norm and self._layers:
                _sum_and_norm(zeros, zeros, kernel)

    def _take(self, module: Any) -> None:
        children, weights = dict(module.named_children()), [*module.parameters()]
        if not _is_plain(module) or not weights or not all(map(_is_stored, weights)):
            return
        if _is_linear(module):
            self._kernels.setdefault(module, partial(_linear, module))
        elif type(module).__name__.endswith("RMSNorm") and [*module.state_dict()] == ["weight"] and _eps(module):
            if weights[0].dim() == 1:
                settings = [{"offset": offset, "late": late} for offset, late in product((0.0, 1.0), (True, False))]
                self._try(module, partial(_norm, module, self._normed), settings, (1.0, 1e2, 1e-3))
        elif all(_is_linear(children.get(name)) for name in _GATED):
            own, biases = getattr(module, "act_fn", None), [children[name].bias for name in _GATED]
            plain = own is not None and (not isinstance(own, nn.Module) or _is_plain(own))
            if plain and biases == [None] * 3 and len(weights) == 3:
                named = [{"activation": name} for name, act in _ACTIVATIONS.items() if _agree(own, act)]
                self._try(module, partial(_mlp, module), named, (1.0, 1e2))
        elif all(_is_linear(children.get(name)) for name in _MERGED):
            merged = [children[name] for name in _MERGED]
            if len({(projection.in_features, projection.bias is None) for projection in merged}) == 1:
                for i, projection in enumerate(merged):
                    self._kernels[projection] = partial(_one_of, i, merged, self._kept)

    def _try(self, module: Any, kernel: partial[Any], settings: list[Any], scales: tuple[float, ...]) -> None:
        """Takes the settings, if there are any, with which a kernel gives what a module does."""
        weight = next(module.parameters())
        x = torch.randn(1, len(scales), weight.shape[-1], generator=torch.Generator().manual_seed(0))
        x = (x * torch.tensor(scales).unsqueeze(1)).to(weight)
        try:
            expected = module(x)
        except Exception:  # it takes other inputs
            return
        if not isinstance(expected, Tensor) or (expected.shape, expected.dtype) != (x.shape, x.dtype):
            return
        errors = [(_error(kernel(x, **some), expected), i) for i, some in enumerate(settings)]
        if errors and min(errors)[0] <= _TOLERANCE[x.dtype]:
            self._kernels[module] = partial(kernel, **settings[min(errors)[1]])

    def _take_sums(self, layer: Any, after: Any) -> None:
        """Takes a layer that adds to its input attention to one norm of it, and to this an MLP of another norm of it.

        The sum, and the norm of it that follows, in the next layer `after`, are one launch. Attention gets whatever the
        layer is called with.
        """
        parts: list[Any] = [getattr(layer, name, None) for name in _PARTS]
        first, attention, second, mlp = parts
        norms: list[Any] = [self._kernels.get(norm) for norm in (first, second, after)]
        norms = [norm if getattr(norm, "func", None) is _norm else None for norm in norms]
        if None in norms[:2] or not all(isinstance(x, nn.Module) and _is_plain(x) for x in (layer, attention, mlp)):
            return
        given = {name: object() for name in ("attention_mask", "position_ids", "position_embeddings", CACHE_ARGUMENT)}
        seen: list[Any] = []
        x = torch.randn(1, 2, len(first.weight), generator=torch.Generator().manual_seed(0))
        x = (x * torch.tensor([[1.0], [1e2]])).to(first.weight)
        trial = copy(layer)  # other threads may run the layer meanwhile
        trial._modules = {**layer._modules, _PARTS[1]: _Half(seen)}
        try:
            expected = trial(x, **given)
            defaults = {name: seen[0][name] for name in seen[0].keys() - given}
            ours = _layer(trial, norms[1], norms[2], [None], x, **defaults, **given)
        except Exception:  # it takes other inputs
            return
        same = isinstance(expected, Tensor) and expected.shape == x.shape and seen[0] == seen[1] == {**seen[0], **given}
        if same and isinstance(ours, Tensor) and _error(ours, expected) <= _TOLERANCE[x.dtype]:
            self._layers[layer] = partial(_layer, layer, norms[1], norms[2], self._normed, **defaults)


class _Half(nn.Module):
    """In the place of attention: half of what comes in; notes what else it was called with."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self._seen = seen

    def forward(self, hidden_states: Tensor, **named: Any) -> tuple[Tensor, None]:
        self._seen.append(named)
        return hidden_states / 2, None


def _error(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference of a row relative to its largest number; what overflows is not compared."""
    theirs, finite = theirs.float(), theirs.isfinite()
    difference = (ours.float() - theirs).abs().where(finite, 0).amax(-1)
    relative = difference / theirs.abs().where(finite, 0).amax(-1).clamp_min(1e-30)
    return float(relative.nan_to_num(torch.inf).max())


def _is_stored(weight: Tensor) -> bool:
    """Whether a weight lies in memory as its dtype says; torchao's, which do not, are weights of a `Linear`, too."""
    return type(weight) is nn.Parameter and weight.dtype in _TOLERANCE and weight.is_contiguous()


def _is_plain(module: Any) -> bool:
    """Whether a module's `forward` is its class's, and nothing else is called with it."""
    return "forward" not in vars(module) and module._compiled_call_impl is None and not _has_hooks(module)


def _has_hooks(module: Any) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _is_linear(module: Any) -> bool:
    return type(module) is nn.Linear and _is_plain(module) and all(map(_is_stored, module.parameters()))


def _agree(ours: Any, theirs: Any) -> bool:
    """Whether two activations are one, by which GELU is told from its approximations."""
    x = torch.cat((torch.linspace(-9, 9, 181), torch.tensor([-1e4, -1e2, 1e2, 1e4])))
    try:
        return torch.allclose(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
    except Exception:  # it takes other inputs
        return False


def _fits(x: Tensor, weight: Tensor) -> bool:
    fits = x.dtype == weight.dtype and x.shape[-1] == weight.shape[1] and x.is_contiguous()
    return fits and x.numel() <= MOST_ROWS * x.shape[-1]


@untraced
def _here(thread: int, kernel: Any, own: Any, *args: Any, **kwargs: Any) -> Any:
    """What a module's kernel makes of its one input, or it itself, if the kernel does not take that or elsewhere."""
    made: Tensor | None = kernel(*args) if get_ident() == thread and len(args) == 1 and not kwargs else None
    return own(*args, **kwargs) if made is None else made


@untraced
def _layer_here(thread: int, kernel: Any, own: Any, *args: Any, **kwargs: Any) -> Any:
    """The same of a decoder layer, which is called with more than its input."""
    made: Tensor | None = kernel(*args, **kwargs) if get_ident() == thread and len(args) == 1 else None
    return own(*args, **kwargs) if made is None else made


def _layer(
    layer: Any, second: partial[Any], after: partial[Any] | None, normed: list[Any], x: Tensor, **kwargs: Any
) -> Any:
    """What a layer makes of its input; `normed` keeps the norm of it with which the next one begins."""
    first, attention, norm, mlp = (getattr(layer, name) for name in _PARTS)  # others, perhaps, since they were tried
    if norm is not second.args[0] or _has_hooks(norm) or not _takes(first, x):
        return None
    x, inner = _sum_and_norm(x, attention(hidden_states=first(x), **kwargs)[0], second)
    added = mlp(inner)
    if after is None or not _takes(after.args[0], x):
        return x + added
    x, inner = _sum_and_norm(x, added, after)
    normed[0] = x, after.args[0], inner
    return x


def _sum_and_norm(x: Tensor, added: Tensor, norm: partial[Any]) -> tuple[Tensor, Tensor]:
    module = norm.args[0]
    return add_rms_norm(x, added.contiguous(), module.weight, _eps(module), **norm.keywords)


def _linear(module: Any, x: Tensor) -> Tensor | None:
    return linear(x, [module.weight], [module.bias])[0] if _fits(x, module.weight) else None


def _one_of(index: int, merged: list[Any], kept: list[Any], x: Tensor) -> Tensor | None:
    """A product of several with the same input, which are all computed when the first one is asked for."""
    if index == 0 and _fits(x, merged[0].weight):
        kept[0] = x, merged, linear(x, [m.weight for m in merged], [m.bias for m in merged])
    found = kept[0] is not None and kept[0][0] is x and kept[0][1] is merged
    output: Tensor | None = kept[0][2][index] if found else None
    kept[0] = None if index == len(merged) - 1 else kept[0]
    return output


def _mlp(module: Any, x: Tensor, activation: str) -> Tensor | None:
    parts = [getattr(module, name) for name in _GATED]  # which may be others since they were tried
    if not _fits(x, parts[0].weight) or any(type(y) is not nn.Linear or _has_hooks(y) for y in parts):
        return None
    inner = gated(x, module.gate_proj.weight, module.up_proj.weight, activation)
    return linear(inner, [module.down_proj.weight], [None])[0]


def _norm(module: Any, normed: list[Any], x: Tensor, offset: float, late: bool) -> Tensor | None:
    found, normed[0] = normed[0], None
    if found is not None and found[0] is x and found[1] is module:
        return found[2]
    return rms_norm(x, module.weight, _eps(module), offset=offset, late=late) if _takes(module, x) else None


def _takes(norm: Any, x: Tensor) -> bool:
    return x.dtype == norm.weight.dtype and x.shape[-1:] == norm.weight.shape and x.is_contiguous()


def _eps(module: Any) -> Any:
    """What a norm adds to the mean of squares; None: it says so nowhere."""
    found = (getattr(module, name, None) for name in ("variance_epsilon", "eps", "epsilon"))
    return next((x for x in found if isinstance(x, float)), None)
