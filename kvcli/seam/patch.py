"""The patch of transformers' models: pre-RoPE queries and keys, and kvcli's attention function.

The model's rotary module is wrapped to keep the rotation and return the identity, so that q and k stay pre-RoPE on
their way to the cache and to the attention function, which rotates them itself. No modelling code is copied, and
nothing is patched before `Seam.open`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from itertools import chain
from threading import local
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, GenerationMixin
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kvcli.errors import CacheError, ModelError
from kvcli.rope import NoRope, Rope
from kvcli.seam.decoder import decoder_layers, find_decoder, position_table, replace_module, text_model
from kvcli.seam.identity import Shortcut
from kvcli.seam.latent import cache_latents, expand_again
from kvcli.seam.layer import AttendFunction, AttentionCall, LayerAttention, RotaryOutput, untraced
from kvcli.seam.model import ATTENTION_NAME, SHARED_CONFIG, ModelAttention
from kvcli.seam.probe import check_adapter, probe
from kvcli.seam.rotary import PreRopeRotary, passes_on
from kvcli.seam.sdpa import own_attention
from kvcli.seam.versions import cache_of

_ATTRIBUTE = "kvcli_seam"
_INPUTS = ("input_ids", "inputs_embeds")


class _CurrentPass(local):
    """The forward pass that is running in this thread, if one is.

    Attributes:
        output: what the rotary module computed for it; None before that, and after the last layer.
        original: what the rotary module returned.
        replacement: what the model got instead.
        on_failure: called if the pass raises, once it has added tokens to a cache; None before that.
        rope: the rotation of the text that the pass continues, where its angles depend on that; None: not known.
        attend: called in place of the seam's function, in passes of this thread.
    """

    is_running = False
    output: RotaryOutput | None = None
    original: Any = None
    replacement: Any = None
    on_failure: Callable[[], None] | None = None
    rope: Rope | None = None
    attend: AttendFunction | None = None


class Seam:
    """The patch on one model; `open` applies it, `close` restores the model exactly.

    Args:
        model: a causal language model of transformers whose attention goes through `AttentionInterface`.
        attend: called in place of the model's attention, in every layer.
        check_call: given the arguments of each forward pass of the decoder by name, `use_cache` always among them;
            raises where it refuses them.
        check_drafts: given the cache of a speculative generation before it starts; raises where it refuses that. Called
            only by versions of transformers that do not ask the cache themselves (before `activate_past_recording`).

    Attributes:
        attention: how the model's layers attend.
        is_open: whether the model is patched.
        current: the forward pass that is running in this thread.
    """

    def __init__(
        self,
        model: nn.Module,
        attend: AttendFunction,
        check_call: Callable[[Mapping[str, Any]], None] = lambda call: None,
        check_drafts: Callable[[Any], None] = lambda cache: None,
    ) -> None:
        self.model: Any = model
        self.attend, self.check_call, self.check_drafts = attend, check_call, check_drafts
        self.is_open = False
        self.current = _CurrentPass()
        self._decoder = find_decoder(model)
        self._parameters = tuple(inspect.signature(self._decoder.forward).parameters)
        self._text: Any = text_model(model)
        self._positions = position_table(model)
        self._refuse_attached()
        self.attention: ModelAttention = probe(model)
        self._num_layers = getattr(self._text.config, "num_hidden_layers", None)
        self._keeps_positions = any(hasattr(module, "rope_deltas") for module in model.modules())
        self._rotary: PreRopeRotary | None = None
        self._hooks: list[Any] = []
        self._rotary_sees_other_positions = False  # other ones than those that layers are given
        self._generator: Any = None

    @property
    def devices(self) -> set[torch.device]:
        """The devices of the model's layers and embeddings."""
        return {x.device for x in self._decoder.parameters()}

    @property
    def rope(self) -> Rope:
        """The rotation of the layers' keys."""
        return self.attention.rope

    def open(self) -> None:
        """Patches the model; ModelError if it, or another model with the same config object, is patched already."""
        self._refuse_attached()
        AttentionInterface.register(ATTENTION_NAME, _attention)
        AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
        attention = self.attention
        in_layers = {x.device for layer in decoder_layers(self.model) for x in layer.parameters()}
        if attention.rotating_themselves and len(in_layers) > 1:
            raise ModelError("layers on several devices of which some rotate by themselves are not supported")
        if not isinstance(self.rope, NoRope):
            self._rotary = PreRopeRotary(self.rope, self._on_rotary, lambda: self.current.rope)
            replace_module(self.model, self.rope.module, self._rotary)
        of_module = {layer.module: layer for layer in attention.layers}
        for module in attention.modules:
            setattr(module, _ATTRIBUTE, (self, of_module.get(module)))
        for layer in attention.layers:
            if layer.latent:
                cache_latents(layer.module)
        self._text.set_attn_implementation(ATTENTION_NAME)
        self._hooks = [
            self._decoder.register_forward_pre_hook(self._before_pass, with_kwargs=True),
            self._decoder.register_forward_hook(self._after_pass, always_call=True),
        ]
        if self._rotary is not None:
            spec, width = attention.spec, attention.spec.rope.rotary_dim // (2 if self.rope.layout == "pairs" else 1)
            for module in {type(module): module for module in attention.modules}.values():
                for channels in {spec.head_dim, spec.rope.rotary_dim}:
                    self._hooks.append(Shortcut(module, (spec.num_heads, spec.num_kv_heads), channels, width))
        for module in attention.rotating_themselves:
            self._hooks.append(module.register_forward_pre_hook(self._give_own_rotation, with_kwargs=True))
        if not hasattr(Cache, "activate_past_recording"):
            self._check_drafts_first()
        self.is_open = True

    def close(self) -> None:
        """Restores the model; closing twice is harmless."""
        if not self.is_open:
            return
        for hook in self._hooks:
            hook.remove()
        if self._generator is not None:
            del self._generator._get_candidate_generator
            self._generator = None
        if self._rotary is not None:
            replace_module(self.model, self._rotary, self._rotary.inner)
        for layer in self.attention.layers:
            if layer.latent:
                expand_again(layer.module)
        for module in self.attention.modules:
            delattr(module, _ATTRIBUTE)
        self._text.set_attn_implementation(self.attention.implementation)
        self._rotary, self.is_open = None, False

    def rotary_output(self, query: Tensor, positions: Tensor | None) -> RotaryOutput:
        """Positions and RoPE of the forward pass that an attention module was called in.

        Args:
            query: [batch, num_heads, query_len, head_dim].
            positions: the pass's `position_ids` [batch or 1, query_len], as the attention module was given them.

        Raises:
            ModelError: the attention module was called without positions, outside a forward pass.
        """
        output = self.current.output
        if output is not None and (self.current.is_running or positions is None or positions is output.positions):
            same = self._rotary is None or positions is None or positions is output.positions
            self._rotary_sees_other_positions = self._rotary_sees_other_positions or not same
            return output
        # gradient checkpointing calls a layer again after the pass, on CUDA in another thread
        if self._rotary is not None and (positions is None or self._rotary_sees_other_positions):
            raise ModelError("the attention was called outside a forward pass of the model")
        known = positions is not None and self._rotary is not None
        if positions is None or self._rotary is None:
            positions = torch.arange(query.shape[2], device=query.device).unsqueeze(0)
        output = RotaryOutput(positions, self.rope.rotation(positions, query.dtype), known)
        self.current.output = output
        return output

    def _refuse_attached(self) -> None:
        if getattr(self._text.config, "_attn_implementation", None) == ATTENTION_NAME:
            attached = any(hasattr(module, _ATTRIBUTE) for module in self.model.modules())
            again = "the model is attached already; detach the first session before attaching another"
            raise ModelError(again if attached else SHARED_CONFIG)

    def _on_rotary(self, output: RotaryOutput, original: Any, replacement: Any) -> None:
        self.current.output, self.current.original, self.current.replacement = output, original, replacement

    def forget_pass(self) -> None:
        """Keeps nothing of the pass that ran in this thread."""
        self.current.output = self.current.original = self.current.replacement = None

    @untraced
    def _give_own_rotation(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Gives an attention module that rotates by itself what the rotary module returned."""
        original, replacement = self.current.original, self.current.replacement
        if replacement is None:
            return None
        like = replacement if isinstance(replacement, Tensor) else replacement[0]
        if any(x.device != like.device for x in chain(module.parameters(), module.buffers())):
            # what is handed out was copied on its way, so that it would not be recognised
            raise ModelError(
                "a layer that rotates by itself is on another device than what the rotary module returns "
                f"({like.device}), which is not supported"
            )
        args = tuple(original if passes_on(x, replacement) else x for x in args)
        return args, {name: original if passes_on(x, replacement) else x for name, x in kwargs.items()}

    @untraced
    def _before_pass(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Refuses arguments and settings that this attention would ignore, and gives positions where there are none.

        Some models count from 0 then, whatever the cache holds; none knows of positions that a cache leaves out.
        """
        call, config = {**dict(zip(self._parameters, args, strict=False)), **kwargs}, self._text.config
        self._check_model(config)
        weights = call.get("output_attentions")
        if config.output_attentions if weights is None else weights:
            raise ModelError("attention weights are not computed while a model is attached; drop output_attentions")
        if call.get("use_cache") is None:
            call["use_cache"] = config.use_cache
        if decoder.training and getattr(decoder, "gradient_checkpointing", False) and torch.is_grad_enabled():
            call["use_cache"] = False  # as transformers does, before 5.24 also without gradients
        if self.current.is_running:  # hooks are not called after a KeyboardInterrupt
            self._after_pass(decoder, args, None)
        self.check_call(call)
        cache, tokens = cache_of(call), next((call[x] for x in _INPUTS if call.get(x) is not None), None)
        if cache is not None and kwargs.get("use_cache") is False:
            raise CacheError(
                "use_cache=False, with a cache: it would get the tokens that it holds again; drop one of them"
            )
        if cache is not None and tokens is not None and tokens.shape[1] > 1 and cache.get_seq_length():
            self.attention.check_later_passes()
        given = kwargs.get("position_ids")
        if self._keeps_positions and given is not None and given.dim() == 3 and hasattr(cache, "sequences"):
            kwargs["position_ids"] = cache.sequences.follow(given)
        self._check_positions(call.get("position_ids"), tokens, cache)
        self.current.is_running = True
        positional, gap = self._parameters[: len(args)], getattr(cache, "gap", 0)
        if cache is None or tokens is None or "position_ids" not in self._parameters or "position_ids" in positional:
            if gap:
                raise ModelError("documents stand side by side in this cache: pass position_ids by name, or none")
            return None
        if gap:
            given = call.get("position_ids"), call.get("attention_mask")
            kwargs["position_ids"] = cache.placed(*given, tokens.shape[1], tokens.device)
        elif call.get("position_ids") is None and call.get("attention_mask") is None:
            start = cache.get_seq_length()
            kwargs["position_ids"] = torch.arange(start, start + tokens.shape[1], device=tokens.device).unsqueeze(0)
        return args, kwargs

    def _check_model(self, config: Any) -> None:
        """Refuses what was changed in the model since it was attached."""
        if config._attn_implementation != ATTENTION_NAME:
            other = config._attn_implementation
            raise ModelError(
                f"the attention implementation was set to '{other}' while the model is attached; detach first"
            )
        check_adapter(self.model)
        if getattr(config, "num_hidden_layers", None) != self._num_layers:  # transformers leaves it so after an error
            config.num_hidden_layers = self._num_layers
            raise ModelError("drafts of the model's first layers (assistant_early_exit) are not supported")

    def _check_positions(self, given: Tensor | None, tokens: Tensor | None, cache: Any) -> None:
        """Refuses tokens that a table has no positions for: on a GPU, they would end the process."""
        if self._positions is None or tokens is None:
            return
        length = tokens.shape[1] + (0 if cache is None else cache.get_seq_length())
        if length > self._positions and given is not None:  # with padding, positions are fewer
            length = int(given.max()) + 1
        if length > self._positions:
            raise ModelError(f"the model has positions for {self._positions} tokens, not for {length}")

    @untraced
    def _after_pass(self, decoder: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forgets the pass; one that raised, whose output is None, is reported by `on_failure` of the current pass."""
        on_failure, self.current.on_failure = self.current.on_failure, None
        if output is None and on_failure is not None:
            on_failure()
        self.current.is_running = False
        self.forget_pass()

    def _check_drafts_first(self) -> None:
        """Makes `generate` call `check_drafts` before it drafts tokens that it may remove from the cache again."""
        self._generator = next((module for module in self.model.modules() if isinstance(module, GenerationMixin)), None)
        if self._generator is None:
            return
        make = self._generator._get_candidate_generator

        def checked(*args: Any, **kwargs: Any) -> Any:
            self.check_drafts(cache_of(kwargs.get("model_kwargs") or {}))
            return make(*args, **kwargs)

        self._generator._get_candidate_generator = checked

    def __reduce__(self) -> Any:
        """Raises: neither `copy.deepcopy` nor `pickle` can make a second patch of a model."""
        raise ModelError("an attached model or its session cannot be copied or pickled; detach first")

    def __enter__(self) -> Seam:
        self.open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@untraced
def _attention(
    module: nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_ids: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Registered with transformers; finds the seam of the module's model."""
    attached: tuple[Seam, LayerAttention | None] | None = getattr(module, _ATTRIBUTE, None)
    if attached is None:
        raise ModelError(SHARED_CONFIG)
    seam, layer = attached
    if is_causal is False:
        raise ModelError("is_causal=False is not supported while a model is attached: its attention is causal")
    if dropout:
        raise ModelError("attention dropout is not applied while a model is attached; call model.eval()")
    if layer is None:
        if attention_mask is not None and attention_mask.shape[3] == 1 < key.shape[2]:  # of a step: all are visible
            attention_mask = None
        kwargs.update(scaling=scaling, dropout=dropout, position_ids=position_ids)
        output: tuple[Tensor, Tensor | None] = own_attention(
            module, seam.attention.implementation, query, key, value, attention_mask, **kwargs
        )
    else:
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        rotary = seam.rotary_output(query, position_ids)
        if layer.channels != "halves":
            query, key = layer.in_order(query), layer.in_order(key) if isinstance(key, Tensor) else key
        sinks = kwargs.get("s_aux") if layer.has_sinks else None
        call = AttentionCall(layer, query, key, value, attention_mask, scaling, rotary, sinks)
        output = (seam.current.attend or seam.attend)(call), None
    if module is seam.attention.modules[-1]:  # nothing of the pass is kept
        seam.forget_pass()
    return output
