"""How a model attends, found out by running it on a few tokens.

Nothing is known of families. The model runs on twelve tokens with a recorder as its attention function; then eight
and four of them go through transformers' own cache, and every layer of full attention is called a second time with
the same input, but with queries and keys before RoPE and a cache that hands out new tokens as ours does. Where the
attention that follows from this equals the model's own up to rounding, the layer is understood.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kvcli.errors import ModelError, UnsupportedModelError
from kvcli.rope import NoRope, Rope
from kvcli.seam.assumed import assume
from kvcli.seam.decoder import find_decoder
from kvcli.seam.layer import ChannelOrder, LayerAttention
from kvcli.seam.model import ATTENTION_NAME, SHARED_CONFIG, ModelAttention
from kvcli.seam.own_attention import own_attention
from kvcli.seam.rotary import RotaryCall, RotarySource, moved, nothing_turned, passes_on
from kvcli.seam.sdpa import causal_mask, plain_attention
from kvcli.spec import ModelSpec, general_fields, no_rope, rope_spec

_NAME = "kvcli_probe"
_TOKENS, _FIRST = 12, 8
_UNDERSTOOD = ("scaling", "dropout", "is_causal", "position_ids", "softcap", "s_aux", "sliding_window")
_FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError, AssertionError)
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference from the model's own attention, relative to its largest output."""


_known: WeakKeyDictionary[nn.Module, ModelAttention] = WeakKeyDictionary()


def probe(model: nn.Module) -> ModelAttention:
    """Finds out how a model attends.

    Args:
        model: a causal language model of transformers; it is as before afterwards. Of one on the `meta` device it is
            taken to be as its config says.

    Raises:
        UnsupportedModelError: a model without full attention, or attention that is not understood; the message names
            the layer and the property.
        ModelError: another model with the same config object is attached.
    """
    if next(iter(model.parameters())).is_meta:
        return assume(model)
    found = _known.get(model)
    if _implementation(model) == ATTENTION_NAME:
        if found is None:
            raise ModelError(SHARED_CONFIG)
        return found
    if found is None or found.implementation != _implementation(model) or not _still_there(found, model):
        probing = _Probe(model)
        found = probing.run()
        if probing.is_finite:  # with NaN in the weights, nothing was found out
            _known[model] = found
    return found


def find_rope(model: nn.Module) -> Rope:
    """The rotation of a model's keys."""
    return probe(model).rope


def _still_there(found: ModelAttention, model: nn.Module) -> bool:
    modules = {id(module) for module in model.modules()}
    needed = [*found.modules, *([] if found.source is None else [found.source.module])]
    return all(id(module) in modules for module in needed)


def _implementation(model: nn.Module) -> str | None:
    config: Any = model.config
    implementation: str | None = config._attn_implementation
    return implementation


@dataclass
class _Call:
    """One call of the attention function."""

    module: nn.Module
    query: Tensor
    key: Any
    value: Any
    mask: Tensor | None
    scaling: float
    options: dict[str, Any]
    output: Any = None


class _NewTokens:
    """What the probe's cache returns in place of the keys: those of all tokens so far."""

    def __init__(self, key: Tensor, value: Tensor, new_value: Tensor) -> None:
        self.key, self.value, self.new_value = key, value, new_value


class _Layer(CacheLayerMixin):
    """Keeps keys and values and hands them out as our cache does."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[tuple[Tensor, Tensor]] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.tokens.append((key_states, value_states))
        key, value = (torch.cat(x, dim=2) for x in zip(*self.tokens, strict=True))
        return _NewTokens(key, value, value_states), value_states

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do."""

    def get_seq_length(self) -> int:
        return sum(key.shape[2] for key, _ in self.tokens)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length


@dataclass(frozen=True)
class _Found:
    """A layer that is understood, with what rotates it and its shape."""

    layer: LayerAttention
    source: RotarySource | None
    shape: tuple[int, int, int, int]
    scaling: float


class _NotUnderstood(Exception):
    """The attention of a layer is not what we would compute; the text says why."""


class _Probe:
    """One probe of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        self.decoder = find_decoder(model)
        self.implementation = _implementation(model)
        config: Any = model.config
        self.config = config.get_text_config(decoder=True)
        try:
            self.own_cache = DynamicCache(config=config)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._refusal(f"transformers has no cache for it ({_one_line(error)})") from error
        self.cache = Cache(layers=[_Layer() for _ in self.own_cache.layers])
        self.takes_positions = "position_ids" in inspect.signature(self.model.forward).parameters
        self.calls: list[_Call] = []
        self.rotary_calls: list[RotaryCall] = []
        self.again: Callable[[_Call], Tensor] | None = None
        self.sources: dict[tuple[int, tuple[Any, ...]], RotarySource | None] = {}
        self.found: dict[nn.Module, _Found] = {}
        self.is_finite = True

    def run(self) -> ModelAttention:
        """Returns what was found out."""
        vocabulary = self.config.vocab_size
        tokens = (torch.arange(_TOKENS) * 7919 + 11) % max(1, vocabulary - 3) + min(3, vocabulary - 1)
        tokens = tokens.unsqueeze(0).to(self.model.device)
        with _quiet(self.model):
            own = self._run(tokens, use_cache=False)
            with self._recorder():
                recorded = self._run(tokens, use_cache=False)
                modules = [call.module for call in self.calls]
                self._check_calls(modules)
                self._check_same(own, recorded)
                self._check_layers(modules, tokens)
        return self._result(modules)

    def _run(self, tokens: Tensor, **arguments: Any) -> Tensor:
        try:
            output = self.model(input_ids=tokens, **arguments)
        except _NotUnderstood as error:
            raise self._refusal(str(error)) from error
        except (*_FAILURES, NotImplementedError) as error:
            if _NewTokens.__name__ in str(error):
                raise self._refusal("a layer attends to what another one caches") from error
            raise self._refusal(f"it cannot run on a few tokens of text ({_one_line(error)})") from error
        return output.logits

    @contextmanager
    def _recorder(self) -> Iterator[None]:
        """Makes the model's attention function record its calls."""
        AttentionInterface.register(_NAME, self._attention)
        AttentionMaskInterface.register(_NAME, sdpa_mask)
        try:
            self.model.set_attn_implementation(_NAME)
        except (ValueError, AttributeError) as error:
            raise self._refusal(f"its attention cannot be replaced ({_one_line(error)})") from error
        try:
            yield
        finally:
            self.model.set_attn_implementation(self.implementation)

    def _attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Any,
        value: Any,
        attention_mask: Any = None,
        *args: Any,
        **options: Any,
    ) -> tuple[Tensor, Any]:
        scaling = options.get("scaling")
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        call = _Call(module, query, key, value, attention_mask, scaling, options)
        if self.again is not None:
            return self.again(call), None
        if attention_mask is not None and attention_mask.dtype != torch.bool:
            raise _NotUnderstood(f"{_name(self.model, module)} adds a bias to its scores")
        for name, option in options.items():
            # flags, such as use_cache, are passed on from the model's arguments
            if name not in _UNDERSTOOD and isinstance(option, Tensor | int | float) and not isinstance(option, bool):
                raise _NotUnderstood(f"{_name(self.model, module)} passes '{name}', which is not understood")
        if isinstance(scaling, Tensor):
            raise _NotUnderstood(f"{_name(self.model, module)} scales its scores by a tensor")
        # models that know only eager attention are always given a mask
        if attention_mask is None and self.implementation != "eager" and _is_bidirectional(module, options):
            raise _NotUnderstood(f"{_name(self.model, module)} is not causal")
        call.output = own_attention(module, self.implementation, query, key, value, attention_mask, **options)
        self.calls.append(call)
        output: tuple[Tensor, Any] = call.output
        return output

    def _check_calls(self, modules: list[nn.Module]) -> None:
        if not modules:
            raise self._refusal("no attention in it goes through transformers' attention interface")
        for module in modules:
            if modules.count(module) > 1:
                raise self._refusal(f"{_name(self.model, module)} attends {modules.count(module)} times in one pass")

    def _check_same(self, own: Tensor, recorded: Tensor) -> None:
        error = self._difference(recorded, own)
        if not error <= _tolerance(own):
            raise self._refusal(f"its logits change by {100 * error:.2g} % when its attention is called through us")

    def _check_layers(self, modules: list[nn.Module], tokens: Tensor) -> None:
        """Calls every layer of full attention again, in two passes over transformers' own cache."""
        full = [module for module in modules if self._is_full(module)]
        if not full:
            kinds = sorted({type(layer).__name__ for layer in self.own_cache.layers})
            raise self._refusal(
                "no layer attends to the whole context and caches keys and values alone: "
                f"it has a window, or its cache is of {', '.join(kinds)}"
            )
        inside = {id(x) for module in modules for x in module.modules()}
        outside = [x for x in self.decoder.modules() if not inside & {id(part) for part in x.modules()}]
        hooks: list[Any] = [module.register_forward_hook(self._again, with_kwargs=True) for module in full]
        hooks += [module.register_forward_hook(self._note_rotary, with_kwargs=True) for module in outside]
        try:
            for part in (range(_FIRST), range(_FIRST, _TOKENS)):
                self.calls.clear()
                self.rotary_calls.clear()
                # some models count from 0 in every pass where positions are not given
                positions = torch.tensor([part], device=tokens.device)
                given = {"position_ids": positions} if self.takes_positions else {}
                self._run(tokens[:, positions[0]], past_key_values=self.own_cache, use_cache=True, **given)
        finally:
            for hook in hooks:
                hook.remove()

    def _note_rotary(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = RotaryCall.of(module, args, kwargs, output)
        if call is not None:
            self.rotary_calls.append(call)

    def _is_full(self, module: nn.Module) -> bool:
        call = next(call for call in self.calls if call.module is module)
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int) or not 0 <= index < len(self.own_cache.layers):
            raise self._refusal(f"{_name(self.model, module)} has no index of its layer in the cache")
        return type(self.own_cache.layers[index]) is DynamicLayer and call.options.get("sliding_window") is None

    def _again(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Calls an attention module with the input that it just had, as it will be called with our cache."""
        name, own = _name(self.model, module), self.calls[-1]
        if own.module is not module:
            raise _NotUnderstood(f"{name} did not attend")
        call, known = self._rotary_of(args, kwargs), self.found.get(module)
        if known is not None and known.scaling != own.scaling:
            raise _NotUnderstood(f"{name} scales its scores by other factors as a context grows")
        tried = iter([known.layer]) if known is not None else self._candidates(module, own, call)
        reasons = []
        for layer in tried:
            rotary = None if layer.own_rotation else call
            try:
                self._try(layer, rotary, own, args, kwargs, output)
            except _NotUnderstood as error:
                reasons.append(str(error))
            else:
                source = self._source(call) if call is not None and layer.rotated else None
                heads, _, head_dim = own.query.shape[1:]
                shape = (heads, own.key.shape[1], head_dim, own.value.shape[3])
                self.found[module] = _Found(layer, source, shape, own.scaling)
                return
        raise _NotUnderstood(f"{name}: {reasons[-1]}")

    def _rotary_of(self, args: Any, kwargs: Any) -> RotaryCall | None:
        """The rotary module's call whose output is among the arguments of an attention module."""
        for value in (*args, *kwargs.values()):
            # of modules in each other, the outermost one ends last
            for call in reversed(self.rotary_calls):
                if passes_on(value, call.output) or moved(value, call.output):
                    return call
        return None

    def _candidates(self, module: nn.Module, own: _Call, call: RotaryCall | None) -> Iterator[LayerAttention]:
        """How a layer may attend, the most useful first."""
        layer = LayerAttention(len(self.found), module, rotated=False, **self._special(own))
        source = None if call is None else self._source(call)
        if source is not None:
            dim = 2 * len(source.rope.inv_freq)
            for order in get_args(ChannelOrder) if dim <= own.query.shape[3] else ():
                yield replace(layer, rotated=True, channels=order, rotary_dim=dim)
            yield layer
        yield replace(layer, own_rotation=call is not None)

    def _source(self, call: RotaryCall) -> RotarySource | None:
        key = (id(call.module), call.arguments)
        if key not in self.sources:
            self.sources[key] = call.source()
        return self.sources[key]

    def _special(self, own: _Call) -> dict[str, Any]:
        """Soft-capping and sinks."""
        sinks, heads = own.options.get("s_aux"), own.query.shape[1]
        if sinks is not None and sinks.shape != (heads,):
            raise _NotUnderstood(f"{_name(self.model, own.module)} has sinks of shape {list(sinks.shape)}")
        cap = own.options.get("softcap")
        return {"soft_cap": None if cap is None else float(cap), "has_sinks": sinks is not None}

    def _try(
        self, layer: LayerAttention, rotary: RotaryCall | None, own: _Call, args: Any, kwargs: Any, output: Any
    ) -> None:
        """Calls a layer as one of its candidates; raises _NotUnderstood if that is not what the model computes."""

        def swapped(x: Any) -> Any:
            if x is self.own_cache:
                return self.cache
            if rotary is not None and (passes_on(x, rotary.output) or moved(x, rotary.output)):
                return nothing_turned(x)
            return x

        held: list[Any] = self.cache.layers[layer.module.layer_idx].tokens
        before = len(held)
        self.again = lambda call: self._attend(layer, rotary, call, own)
        try:
            again = layer.module.forward(*map(swapped, args), **{name: swapped(x) for name, x in kwargs.items()})
            if len(held) != before + 1:
                raise _NotUnderstood("it attends to keys that do not come from its cache")
            ours, theirs = (x[0] if isinstance(x, tuple) else x for x in (again, output))
            error = self._difference(ours, theirs)
            if not error <= _tolerance(theirs):
                raise _NotUnderstood(f"its attention differs from ours by {100 * error:.2g} %")
        except _NotUnderstood:
            del held[before:]
            raise
        except _FAILURES as error:
            del held[before:]
            if _NewTokens.__name__ in str(error):
                raise _NotUnderstood("it computes keys from what it caches, as latent attention (MLA) does") from error
            raise _NotUnderstood(f"its keys and values cannot be taken from a cache ({_one_line(error)})") from error
        finally:
            self.again = None

    def _attend(self, layer: LayerAttention, rotary: RotaryCall | None, call: _Call, own: _Call) -> Tensor:
        """Attention as we compute it, over what the probe's cache holds."""
        if not isinstance(call.key, _NewTokens) or call.value is not call.key.new_value:
            raise _NotUnderstood("it changes keys or values between the cache and attention")
        if call.query.shape[1] % call.key.key.shape[1]:
            raise _NotUnderstood(f"{call.query.shape[1]} query heads cannot share {call.key.key.shape[1]} key heads")
        kv_len, query_len = call.key.key.shape[2], call.query.shape[2]
        if call.value.shape[2] != query_len:
            raise _NotUnderstood(f"it caches {call.value.shape[2]} keys for {query_len} tokens")
        causal = causal_mask(query_len, kv_len, call.query.device)
        if call.mask is not None and not torch.equal(call.mask.expand(1, 1, -1, -1)[0, 0], causal):
            raise _NotUnderstood("its mask is not causal")
        query, key = layer.in_order(call.query), layer.in_order(call.key.key)
        if layer.rotated:
            query, key = self._rotated(rotary, query, key)
        # rounding apart, the model's own rotated queries and keys are these
        for x, theirs in ((query, own.query), (key, own.key)):
            if not self._difference(x, layer.in_order(theirs)) <= _tolerance(theirs):
                raise _NotUnderstood("its rotation of queries and keys is not understood")
        sinks = call.options.get("s_aux")
        return plain_attention(query, key, call.key.value, None, call.scaling, layer.soft_cap, sinks)

    def _rotated(self, rotary: RotaryCall | None, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Queries of the last tokens and keys of all tokens, after RoPE."""
        source = None if rotary is None else self._source(rotary)
        assert rotary is not None
        assert source is not None
        query_len = query.shape[2]
        positions = torch.arange(key.shape[2], device=query.device).unsqueeze(0)
        if not torch.equal(rotary.positions.to(positions), positions[:, -query_len:]):
            raise _NotUnderstood("its positions do not count tokens")
        rotation = source.rope.rotation(positions, torch.float32).to(query.device)
        turned = rotation.last(query_len).apply(query.float()), rotation.apply(key.float())
        return turned[0].to(query.dtype), turned[1].to(key.dtype)

    def _result(self, modules: list[nn.Module]) -> ModelAttention:
        """Puts together what was found of all layers.

        Raises:
            UnsupportedModelError: layers that differ in what all layers of a cache have in common.
        """
        found = list(self.found.values())
        indices = [int(x.layer.module.layer_idx) for x in found]  # type: ignore[arg-type]
        if indices != sorted(set(indices)):
            raise self._refusal(f"its layers attend in the order {indices}")
        if len({x.shape for x in found}) > 1:
            raise self._refusal("its layers of full attention have different shapes")
        sources = {id(x.source): x.source for x in found if x.source is not None}
        if len(sources) > 1 or len({x.layer.channels for x in found if x.layer.rotated}) > 1:
            raise self._refusal("its layers of full attention are rotated in different ways")
        source = next(iter(sources.values()), None)
        spec = self._spec(found, indices)
        rope: Rope = NoRope(spec.rope.rotary_dim, self.model.device) if source is None else source.rope
        return ModelAttention(
            tuple(x.layer for x in found), tuple(modules), source, rope, spec, self.implementation, self._notes(found)
        )

    def _spec(self, found: list[_Found], indices: list[int]) -> ModelSpec:
        num_heads, num_kv_heads, head_dim, value_dim = found[0].shape
        total, rotated = len(self.own_cache.layers), [x for x in found if x.layer.rotated]
        rope = no_rope(head_dim)
        if rotated:
            rope = replace(rope_spec(self.config, head_dim), rotary_dim=rotated[0].layer.rotary_dim)
        try:
            return ModelSpec(
                **general_fields(self.config),
                num_layers=len(found),
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                rope=rope,
                value_head_dim=None if value_dim == head_dim else value_dim,
                layer_indices=tuple(indices) if len(indices) < total else (),
                other_layers=total - len(found),
                unrotated=tuple(x.layer.layer_idx for x in found if rotated and not x.layer.rotated),
            )
        except (ValueError, AttributeError) as error:
            raise self._refusal(_one_line(error)) from error

    def _notes(self, found: list[_Found]) -> tuple[str, ...]:
        """One line each about what is not as in most models."""
        notes, total = [], len(self.own_cache.layers)
        if len(found) < total:
            notes.append(f"{len(found)} of {total} layers attend to the whole context and are compressed")
        themselves = sum(x.layer.own_rotation for x in found)
        if themselves:
            notes.append(f"{themselves} layers rotate keys in a way of their own: these are compressed after RoPE")
        return tuple(notes)

    def _difference(self, x: Tensor, reference: Tensor) -> float:
        """The largest difference relative to the largest number of the reference, where that is finite."""
        if x.shape != reference.shape:
            return math.inf
        x, reference = x.float(), reference.float()
        finite = reference.isfinite()
        if not bool(finite.all()):
            self.is_finite = False
            x, reference = x.where(finite, 0), reference.where(finite, 0)
        return float((x - reference).abs().max() / reference.abs().max().clamp_min(1e-30))

    def _refusal(self, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"model type '{self.config.model_type}' cannot be compressed: {reason}")


def _is_bidirectional(module: nn.Module, options: dict[str, Any]) -> bool:
    """Whether a module that passes no mask wants none."""
    is_causal = options.get("is_causal")
    return not (getattr(module, "is_causal", True) if is_causal is None else is_causal)


def _tolerance(x: Tensor) -> float:
    return _TOLERANCE.get(x.dtype, 0.05)


def _name(model: nn.Module, module: nn.Module) -> str:
    return next(name for name, x in model.named_modules() if x is module)


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


@contextmanager
def _quiet(model: nn.Module) -> Iterator[None]:
    """Runs a model without gradients, dropout, autocast and compilation, and puts it back as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    device = next(iter(model.parameters())).device.type
    try:
        with torch.no_grad(), torch.autocast(device, enabled=False), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module in training:
            module.training = True
