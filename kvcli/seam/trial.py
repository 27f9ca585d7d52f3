"""Calls a layer again, as it will be called with our cache, and compares that with what the model computed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from kvcli.rope import Rope
from kvcli.seam.latent import cache_latents, expand_again, has_latents
from kvcli.seam.layer import ChannelOrder, LayerAttention
from kvcli.seam.recorder import (
    FAILURES,
    NotUnderstood,
    ProbeLayer,
    ProbeTokens,
    RecordedCall,
    Recorder,
    module_name,
    one_line,
)
from kvcli.seam.rotary import RotaryCall, identity_like, passes_on
from kvcli.seam.sdpa import causal_mask, plain_attention

TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference from the model's own attention, relative to its largest output."""


@dataclass(frozen=True)
class LayerResult:
    """A layer that is understood; `shape` is (num_heads, num_kv_heads, head_dim, value_dim), `switch` as of `Rope`."""

    layer: LayerAttention
    rope: Rope | None
    switch: int | None
    shape: tuple[int, int, int, int]
    scaling: float


class LayerProbe:
    """Determines how each layer attends, by calling it again as each of its candidates.

    Args:
        recorder: of the model.
        own_cache: of transformers; the model fills it while its layers are called again.

    Attributes:
        layers: those that are understood, in the order of their calls.
        is_finite: whether everything compared so far was.
    """

    def __init__(self, recorder: Recorder, own_cache: Cache) -> None:
        self.recorder, self.own_cache = recorder, own_cache
        self.cache = Cache(layers=[ProbeLayer() for _ in own_cache.layers])
        self.ropes: dict[tuple[int, tuple[Any, ...]], Rope | None] = {}
        self.layers: dict[nn.Module, LayerResult] = {}
        self.is_finite = True

    def again(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Calls an attention module with the input that it just had, as it will be called with our cache."""
        name, stock = module_name(self.recorder.model, module), self.recorder.calls[-1]
        if stock.module is not module:
            raise NotUnderstood(f"{name} did not attend")
        # of rotary modules in each other, the outermost one ends last
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor | tuple | list)]
        rotary_calls = [(x, call) for x in given for call in reversed(self.recorder.rotary_calls)]
        call = next((call for x, call in rotary_calls if passes_on(x, call.output, elsewhere=True)), None)
        known = self.layers.get(module)
        if known is not None and known.scaling != stock.scaling:
            raise NotUnderstood(f"{name} scales its scores by other factors as a context grows")
        reasons = []
        for layer in self._candidates(module, stock, call) if known is None else [known.layer]:
            try:
                self._try(layer, None if layer.own_rotation else call, stock, args, kwargs, output)
            except NotUnderstood as error:
                reasons.append(str(error))
            else:
                rope = self._rope(call) if layer.rotated else None
                key, value = self.cache.layers[module.layer_idx].tokens[-1]
                shape = (stock.query.shape[1], key.shape[1], key.shape[3], value.shape[3])
                switch = None if call is None else call.switch
                self.layers[module] = LayerResult(layer, rope, switch, shape, stock.scaling)
                return
        raise NotUnderstood(f"{name}: {reasons[-1]}")

    def _candidates(self, module: Any, stock: RecordedCall, call: RotaryCall | None) -> Iterator[LayerAttention]:
        """The ways in which a layer may attend, the most useful first."""
        sinks, cap = stock.options.get("s_aux"), stock.options.get("softcap")
        if sinks is not None and sinks.shape != stock.query.shape[1:2]:
            raise NotUnderstood(f"{module_name(self.recorder.model, module)} has sinks of shape {list(sinks.shape)}")
        soft_cap = None if cap is None else float(cap)
        layer = LayerAttention(len(self.layers), module, rotated=False, soft_cap=soft_cap, has_sinks=sinks is not None)
        if has_latents(module):
            # the channels of the key that heads share are the last ones of theirs, rotated or not
            layer = replace(layer, latent=True, channels="last halves", rotary_dim=module.qk_rope_head_dim)
        if (rope := self._rope(call)) is not None:
            dim = 2 * len(rope.inv_freq)
            for order in get_args(ChannelOrder) if dim <= stock.query.shape[3] else ():
                yield replace(layer, rotated=True, channels=order, rotary_dim=dim)
            yield layer
        yield replace(layer, own_rotation=call is not None)

    def _rope(self, call: RotaryCall | None) -> Rope | None:
        if call is None:
            return None
        key = (id(call.module), call.arguments)
        if key not in self.ropes:
            self.ropes[key] = call.rope()
        return self.ropes[key]

    def _try(
        self, layer: LayerAttention, rotary: RotaryCall | None, stock: RecordedCall, args: Any, kwargs: Any, output: Any
    ) -> None:
        """Calls a layer as one of its candidates; raises NotUnderstood if that is not what the model computes."""

        def swapped(x: Any) -> Any:
            if x is self.own_cache:
                return self.cache
            if rotary is not None and passes_on(x, rotary.output, elsewhere=True):
                return identity_like(x)
            return x

        cached: list[Any] = self.cache.layers[layer.module.layer_idx].tokens
        before, self.cache.layers[layer.module.layer_idx].latent = len(cached), layer.latent
        self.recorder.again = lambda call: self._attend(layer, rotary, call, stock)
        if layer.latent:
            cache_latents(layer.module)
        try:
            again = layer.module.forward(*map(swapped, args), **{name: swapped(x) for name, x in kwargs.items()})
            if len(cached) != before + 1:
                raise NotUnderstood("it attends to keys that do not come from its cache")
            ours, theirs = (x[0] if isinstance(x, tuple) else x for x in (again, output))
            self.check(ours, theirs, "its output differs by {} when it is called with our cache")
        except NotUnderstood:
            del cached[before:]
            raise
        except torch.OutOfMemoryError:
            raise
        except FAILURES as error:
            del cached[before:]
            if ProbeTokens.__name__ in str(error):
                raise NotUnderstood("it computes keys from what it caches, as latent attention (MLA) does") from error
            raise NotUnderstood(f"its keys and values cannot be taken from a cache ({one_line(error)})") from error
        finally:
            self.recorder.again = None
            if layer.latent:
                expand_again(layer.module)

    def _attend(
        self, layer: LayerAttention, rotary: RotaryCall | None, call: RecordedCall, stock: RecordedCall
    ) -> Tensor:
        """The model's own attention, if it is what we compute over what the probe's cache holds."""
        if not isinstance(call.key, ProbeTokens) or call.value is not call.key.new_value:
            raise NotUnderstood("it changes keys or values between the cache and attention")
        if call.query.shape[1] % call.key.key.shape[1]:
            raise NotUnderstood(f"{call.query.shape[1]} query heads cannot share {call.key.key.shape[1]} key heads")
        kv_len, query_len = call.key.key.shape[2], call.query.shape[2]
        if call.value.shape[2] != query_len:
            raise NotUnderstood(f"it caches {call.value.shape[2]} keys for {query_len} tokens")
        causal = causal_mask(query_len, kv_len, call.query.device)
        if call.mask is not None and not torch.equal(call.mask.expand(1, 1, -1, -1)[0, 0], causal):
            raise NotUnderstood("its mask is not causal")
        query, key, value = layer.in_order(call.query), layer.in_order(call.key.key), call.key.value
        if layer.rotated and rotary is not None and (rope := self._rope(rotary)) is not None:
            positions = torch.arange(kv_len, device=query.device).unsqueeze(0)
            if not torch.equal(rotary.positions.to(positions), positions[:, -query_len:]):
                raise NotUnderstood("its positions do not count tokens")
            rotation = rope.rotation(positions, torch.float32).to(query.device)
            query = rotation.last(query_len).apply(query.float()).to(query.dtype)
            key = rotation.apply(key.float()).to(key.dtype)
        # rounding apart, the model's own rotated queries and keys are these, also in channels beside much larger ones
        rotated = [(query, layer.in_order(stock.query)), (layer.expanded(key, value)[0], layer.in_order(stock.key))]
        for x, theirs in rotated:
            self.check(x, theirs, "its rotation of queries and keys is not understood", layer.rotary_dim)
        if not layer.latent:  # with biases of hundreds, as Qwen2.5 has, rounding in the rotation alone moves scores
            query, key = (theirs for _, theirs in rotated)
        sinks, all_of_key = call.options.get("s_aux"), torch.cat((key, value), dim=-1) if layer.latent else key
        rows = layer.absorbed(query, key, value) if layer.latent else query
        ours = plain_attention(rows, all_of_key, value, None, call.scaling, layer.soft_cap, sinks)
        ours = layer.projected(ours, query, key) if layer.latent else ours
        output: Tensor = stock.output[0]
        self.check(ours, output, "its attention differs from ours by {}")
        # what follows in the module may quantize it, which makes steps of differences that are rounding
        return output

    def check(self, x: Tensor, reference: Tensor, wrong: str, pairs: int = 0) -> None:
        """Raises NotUnderstood if numbers differ, where the reference is finite, by more than rounding explains.

        So many of their channels are pairs that were rotated, each of which is looked at by itself.
        """
        error = math.inf
        if x.shape == reference.shape:
            finite = reference.isfinite()
            self.is_finite = self.is_finite and bool(finite.all())
            ours, theirs = (y.float().where(finite, 0) for y in (x, reference))
            largest = theirs.abs().max()
            if pairs:
                rotated = theirs[..., :pairs].unflatten(-1, (2, -1)).abs().amax((0, 1, 2, 3)).repeat(2)
                largest = torch.cat((rotated, largest.expand(theirs.shape[-1] - pairs)))
            error = float(((ours - theirs).abs() / largest.clamp_min(1e-30)).max())
        if not error <= TOLERANCE.get(reference.dtype, 0.05):
            raise NotUnderstood(wrong.format(f"{100 * error:.2g} %"))
