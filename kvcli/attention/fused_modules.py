"""Modules of a model around attention, run by kernels of few launches while decode steps run.

Norms, projections, gated MLPs and sums of a layer are found by what they compute, not by the name of the model: a
kernel stands in for one whose result it gives, up to rounding, for random input. Everything else runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from inspect import Parameter, signature
from itertools import product
from threading import RLock, get_ident
from typing import Any, NamedTuple

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
_PASSED = ("attention_mask", "position_ids", "position_embeddings", "cache_position", "use_cache", CACHE_ARGUMENT)
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
        self._sums: dict[nn.Module, _Sums] = {}
        self._kept: list[Any] = [None]
        self._normed: Any = None
        layers = decoder_layers(model)
        weights: list[Tensor] = [*layers.parameters()] or [torch.empty(0)]
        self._weight = weights[0]  # Triton launches on the current GPU, whatever its arguments are on
        with _ONE_AT_A_TIME, torch.cuda.device_of(self._weight), torch.no_grad():
            for module in layers.modules() if len({x.device for x in weights}) == 1 else ():
                self._take(module)
            for layer, following in zip(layers, [*layers[1:], None], strict=True):
                self._take_sums(layer, following)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Runs the kernels in this thread, inside the block, and leaves the modules as they were."""
        with _ONE_AT_A_TIME:
            try:
                for module, kernel in self._kernels.items():
                    if _is_plain(module):
                        module.forward = partial(_here, get_ident(), kernel, module.forward)
                for layer, sums in self._sums.items():
                    if _is_plain(layer):
                        run = partial(self._run, layer, sums)
                        layer.forward = partial(_layer_here, get_ident(), run, layer.forward)
                with torch.cuda.device_of(self._weight):
                    yield
            finally:
                self._kept[0] = self._normed = None
                for module in (*self._kernels, *self._sums):
                    if getattr(vars(module).get("forward"), "func", None) in (_here, _layer_here):
                        del module.forward

    def launch(self, rows: int) -> None:
        """Launches all kernels that take so many rows, on zeros."""
        for module, kernel in self._kernels.items():
            weight = next(module.parameters())
            kernel(weight.new_zeros(rows, 1, weight.shape[-1]))
        for norm in {norm for sums in self._sums.values() for norm in (sums.first, sums.second)}:
            zeros = norm.args[0].weight.new_zeros(rows, 1, len(norm.args[0].weight))
            _sum_and_norm(zeros, zeros, norm)

    def _take(self, module: Any) -> None:
        children, weights = dict(module.named_children()), [*module.parameters()]
        if not _is_plain(module) or not weights or not all(map(_is_stored, weights)):
            return
        if _is_linear(module):
            self._kernels.setdefault(module, partial(_linear, module))
        elif type(module).__name__.endswith("RMSNorm") and [*module.state_dict()] == ["weight"] and _eps(module):
            if weights[0].dim() == 1:
                settings = [{"offset": offset, "late": late} for offset, late in product((0.0, 1.0), (True, False))]
                self._try(module, partial(_norm, module), settings, (1.0, 1e2, 1e-3))
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

    def _take_sums(self, layer: Any, following: Any) -> None:
        """Takes a layer of y = x + attention(norm(x)) and y + mlp(norm(y)), x [batch, time, hidden_size].

        Stand-ins for its attention and its MLP note what they are given, which is compared, and so is what it returns.
        """
        parts: list[Any] = [getattr(layer, name, None) for name in _PARTS]
        first, attention, second, mlp = parts
        norms: list[Any] = [self._kernels.get(norm) for norm in (first, second)]
        if any(getattr(norm, "func", None) is not _norm for norm in norms):
            return
        if layer.training or not all(isinstance(x, nn.Module) and _is_plain(x) for x in (layer, attention, mlp)):
            return
        attend, feed = _StandIn(lambda x: (x.flip(-1) / 2, None)), _StandIn(lambda x: x.roll(1, -1) / 3)
        trial = copy(layer)  # other threads may run the layer meanwhile
        trial._modules = {**layer._modules, _PARTS[1]: attend, _PARTS[3]: feed}
        taken = signature(layer.forward).parameters
        passes_all = any(x.kind is Parameter.VAR_KEYWORD for x in taken.values())
        given = {name: object() for name in _PASSED if name in taken or passes_all}
        x = torch.randn(1, 2, len(first.weight), generator=torch.Generator().manual_seed(0)).to(first.weight)
        try:
            whole, named = trial(x, **given), {**attend.named}
            own = named.pop("hidden_states")
            attended = x + attend.made[0]
            made = mlp(x)
            pairs = [(own, first(x)), (feed.x, second(attended)), (whole, attended + feed.made)]
        except Exception:  # it takes other inputs, or calls its parts otherwise
            return
        omitted = {name: x.default for name, x in taken.items() if name in given and x.default is not Parameter.empty}
        rest = omitted | {name: value for name, value in named.items() if name not in given}
        same = all(named.get(name) is value for name, value in given.items()) and not feed.named
        same = same and all(value is None or isinstance(value, (bool, int, float, str)) for value in rest.values())
        for ours, theirs in [*pairs, (made, x)]:
            same = same and isinstance(ours, Tensor) and (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        if same and max(_error(*pair) for pair in pairs) <= _TOLERANCE[x.dtype]:
            self._sums[layer] = _Sums(norms[0], norms[1], following, rest, frozenset(named))

    def _run(self, layer: Any, sums: _Sums, x: Tensor, **kwargs: Any) -> Tensor | None:
        """What a layer makes of its input; None where it, or what it is called with, is not as it was tried."""
        first, attention, second, mlp = (getattr(layer, name) for name in _PARTS)
        found, self._normed = self._normed, None
        as_tried = second is sums.second.args[0] and kwargs.keys() <= sums.named
        runs = as_tried and _runs(first, _here) and _runs(second, _here) and not layer.training
        others = (child for child in layer.children() if child not in (attention, mlp))
        if not runs or any(map(_has_hooks, others)) or not _takes(first, x):
            return None
        is_next = found is not None and found[0] is x and found[1:3] == (x._version, first)
        inner = found[3] if is_next else first(x)
        x, inner = _sum_and_norm(x, attention(hidden_states=inner, **{**sums.rest, **kwargs})[0], sums.second)
        added, following = mlp(inner), self._sums.get(sums.following)
        if following is None or not _runs(sums.following, _layer_here) or not _takes(following.first.args[0], x):
            return x + added
        x, inner = _sum_and_norm(x, added, following.first)
        self._normed = x, x._version, following.first.args[0], inner
        return x


class _Sums(NamedTuple):
    """How a layer computes: kernels of its norms, the layer that follows, what attention is given.

    Attributes:
        rest: what attention gets where the layer is not called with it, by name.
        named: all that it can get.
    """

    first: partial[Any]
    second: partial[Any]
    following: Any
    rest: dict[str, Any]
    named: frozenset[str]


class _StandIn(nn.Module):
    """In the place of a part of a layer: computes something simple, and notes what it was called with."""

    x: Tensor
    named: dict[str, Any]
    made: Any

    def __init__(self, compute: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self._compute = compute

    def forward(self, *args: Tensor, **named: Any) -> Any:
        (self.x,) = args or (named["hidden_states"],)
        self.named, self.made = named, self._compute(self.x)
        return self.made


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


def _runs(module: Any, here: Any) -> bool:
    """Whether a module's kernel runs in this block, and nothing else is called with it."""
    return getattr(vars(module).get("forward"), "func", None) is here and not _has_hooks(module)


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
    if any(type(y) is not nn.Linear or _has_hooks(y) for y in parts) or not _fits(x, parts[0].weight):
        return None
    inner = gated(x, module.gate_proj.weight, module.up_proj.weight, activation)
    return linear(inner, [module.down_proj.weight], [None])[0]


def _norm(module: Any, x: Tensor, offset: float, late: bool) -> Tensor | None:
    return rms_norm(x, module.weight, _eps(module), offset=offset, late=late) if _takes(module, x) else None


def _takes(norm: Any, x: Tensor) -> bool:
    return x.dtype == norm.weight.dtype and x.shape[-1:] == norm.weight.shape and x.is_contiguous()


def _eps(module: Any) -> Any:
    """What a norm adds to the mean of squares; None: it says so nowhere."""
    found = (getattr(module, name, None) for name in ("variance_epsilon", "eps", "epsilon"))
    return next((x for x in found if isinstance(x, float)), None)
