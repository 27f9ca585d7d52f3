"""Determines how a model attends, by running it on a few tokens.

Nothing is known of families. The model runs on twelve tokens with a recorder as its attention function; then eight
and four of them go through transformers' own cache, and every layer of full attention is called a second time with
the same input, but with queries and keys before RoPE and a cache that hands out new tokens as ours does. Where the
attention that follows from this equals the model's own up to rounding, the layer is understood.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kvcli.errors import ModelError, UnsupportedModelError
from kvcli.rope import NoRope
from kvcli.seam.decoder import decoder_layers, find_decoder, position_table, text_model
from kvcli.seam.model import ATTENTION_NAME, SHARED_CONFIG, ModelAttention, attention_of_config
from kvcli.seam.recorder import FAILURES, NotUnderstood, ProbeTokens, Recorder, module_name, one_line, record, running
from kvcli.seam.trial import LayerProbe
from kvcli.seam.versions import newer_than_tried, with_cache
from kvcli.spec import ModelSpec, general_fields, no_rope, rope_spec

_NAME = "kvcli_probe"
_TOKENS, _FIRST = 12, 8
_NOT_FROM_0 = "its own positions do not count from 0"

FULL = (
    "llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral", "olmo", "olmo2", "granite", "granitemoe",
    "phi", "phi3", "starcoder2", "stablelm", "smollm3", "glm", "glm4", "cohere", "nemotron", "gemma", "helium",
    "ernie4_5", "seed_oss", "hunyuan_v1_dense", "nanochat", "gpt2",
)  # fmt: skip
"""`model_type` of families that the tests run with every method, in which every layer attends to the whole context."""

HYBRID = (
    "gemma2", "gemma3_text", "gemma4_text", "gpt_oss", "qwen3_next",
    "olmo3", "olmo_hybrid", "cohere2", "exaone4", "lfm2", "jamba",
    "bamba", "granitemoehybrid", "nemotron_h", "ministral", "llama4_text", "qwen3_5_text",
)  # fmt: skip
"""Of families in which other layers do not."""

_ADAPTERS = {
    "is_prompt_learning": "puts tokens of its own before a text",
    "alora_invocation_tokens": "works on the end of a text alone (aLoRA)",
    "adapter_layers": "attends to tokens of its own in some layers (adaption prompt)",
}
"""Adapters of PEFT with which keys and values are not those of the tokens before them, by fields of their configs."""

_known: WeakKeyDictionary[nn.Module, ModelAttention] = WeakKeyDictionary()


def probe(model: nn.Module) -> ModelAttention:
    """Determines how a model attends.

    Args:
        model: a causal language model of transformers; it is as before afterwards. Of one on the `meta` device it is
            taken to be as its config says.

    Raises:
        UnsupportedModelError: a model without full attention, or attention that is not understood; the message names
            the layer and the property.
        ModelError: another model with the same config object is attached.
    """
    check_adapter(model)
    attention, implementation = _known.get(model), text_model(model).config._attn_implementation
    if implementation == ATTENTION_NAME:
        if attention is None:
            raise ModelError(SHARED_CONFIG)
        return attention
    if attention is not None and attention.implementation == implementation:
        there = {id(module) for module in model.modules()}
        needed = [*attention.modules, *([] if isinstance(attention.rope, NoRope) else [attention.rope.module])]
        if all(id(module) in there for module in needed):
            return attention
    config: Any = model.config
    text_config = config.get_text_config(decoder=True)
    try:
        probing = _Probe(model, implementation, text_config)
        if all(weight.is_meta for weight in model.parameters()):
            probing.glance()
            return attention_of_config(model)
        attention = probing.run()
    except NotUnderstood as error:
        kind = text_config.model_type
        why = "; ".join(filter(None, (str(error), newer_than_tried())))
        raise UnsupportedModelError(f"model type '{kind}' cannot be compressed: {why}") from error
    if probing.trial.is_finite:  # with NaN in the weights, nothing was compared
        _known[model] = attention
    return attention


def check_adapter(model: Any) -> None:
    """Raises UnsupportedModelError where the active adapter is one of those that are not supported."""
    config = None if getattr(model, "_adapters_disabled", False) else getattr(model, "active_peft_config", None)
    for name, what in _ADAPTERS.items():
        if getattr(config, name, None):
            raise UnsupportedModelError(
                f"adapter '{model.active_adapter}' {what}, which is not supported; attach the model without it"
            )


def _device(model: nn.Module) -> torch.device:
    """The device of the first weights that are in memory; embeddings may be offloaded."""
    return next(weight.device for weight in model.parameters() if not weight.is_meta)


class _Probe:
    """One probe of a model."""

    def __init__(self, model: Any, implementation: str | None, config: Any) -> None:
        self.model, self.implementation, self.config = model, implementation, config
        if getattr(model.config, "is_encoder_decoder", False):
            raise NotUnderstood("it has an encoder beside its decoder (is_encoder_decoder)")
        try:
            self.own_cache = DynamicCache(config=model.config)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise NotUnderstood(f"transformers has no cache for it ({one_line(error)})") from error
        self.recorder = Recorder(model, implementation)
        self.trial = LayerProbe(self.recorder, self.own_cache)

    def run(self) -> ModelAttention:
        """Runs the model and returns how it attends."""
        vocabulary = self.config.vocab_size
        tokens = (torch.arange(_TOKENS) * 7919 + 11) % max(1, vocabulary - 3) + min(3, vocabulary - 1)
        tokens = tokens.unsqueeze(0).to(_device(self.model))
        with _quiet(self.model):
            logits = self._run(tokens, use_cache=False)
            with self._recording():
                recorded = self._run(tokens, use_cache=False)
                modules = self._modules()
                self.trial.check(recorded, logits, "its logits change by {} when its attention is called through us")
                in_passes = self._check_layers(modules, tokens)
            try:
                self.trial.check(in_passes, logits, "")
            except NotUnderstood:  # each layer of full attention was compared by itself
                if not self.trial.is_finite:  # where, may differ between passes
                    return self._result(modules)
                from_zero = self._run(tokens, use_cache=False, **self._positions(tokens))
                self.trial.check(from_zero, logits, _NOT_FROM_0)
                return replace(self._result(modules), drops_state=True)
        return self._result(modules)

    def glance(self) -> None:
        """Refuses a model on the `meta` device for what a pass tells without numbers, as far as it gets."""
        with torch.no_grad(), self._recording(), _Zeros():  # type: ignore[no-untyped-call]
            try:
                self._run(torch.zeros(1, _FIRST, dtype=torch.int64, device="meta"), **with_cache(self.own_cache))
            except FAILURES as error:  # it needs numbers
                if not self.recorder.calls:
                    attention_of_config(self.model)  # which may know more of why
                    raise NotUnderstood("it cannot be planned: it reads weights before any layer attends") from error
            self._modules()
        tables = [x for name, x in self.model.named_modules() if name.endswith("position_embeddings")]
        counted = any(getattr(x, "padding_idx", None) is not None for x in tables)  # RoBERTa's, which count on from it
        if counted and position_table(self.model) is not None:
            raise NotUnderstood(_NOT_FROM_0)

    def _modules(self) -> list[nn.Module]:
        """The modules that attended, in their order."""
        modules = [call.module for call in self.recorder.calls]
        if not modules:
            raise NotUnderstood("no attention in it goes through transformers' attention interface")
        for module in modules:
            if (count := modules.count(module)) > 1:
                raise NotUnderstood(f"{module_name(self.model, module)} attends {count} times in one pass")
        attending = {id(module) for module in modules}
        for x in (x for layer in decoder_layers(self.model) for child in layer.children() for x in child.modules()):
            around = id(x) not in attending and any(id(part) in attending for part in x.modules())
            if around and next(x.parameters(recurse=False), None) is not None:  # it may need rotated queries, too
                raise NotUnderstood(f"{module_name(self.model, x)}, around attention, has weights of its own")
        return modules

    def _run(self, tokens: Tensor, **arguments: Any) -> Tensor:
        try:
            output = self.model(input_ids=tokens, **arguments)
        except FAILURES as error:
            if isinstance(error, torch.OutOfMemoryError) or (tokens.is_meta and "meta" in str(error).lower()):
                raise
            if ProbeTokens.__name__ in str(error):
                field = " (num_kv_shared_layers)" if hasattr(self.config, "num_kv_shared_layers") else ""
                raise NotUnderstood(f"a layer attends to what another one caches{field}") from error
            raise NotUnderstood(f"it cannot run on a few tokens of text ({one_line(error)})") from error
        if getattr(output, "logits", None) is None:
            raise NotUnderstood("it makes no logits; load it as a causal language model (AutoModelForCausalLM)")
        return output.logits

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """Makes the model's attention function record its calls."""
        AttentionInterface.register(_NAME, record)
        AttentionMaskInterface.register(_NAME, sdpa_mask)
        try:
            text_model(self.model).set_attn_implementation(_NAME)
        except (ValueError, AttributeError) as error:
            raise NotUnderstood(f"its attention cannot be replaced ({one_line(error)})") from error
        running.recorder = self.recorder
        try:
            yield
        finally:
            running.recorder = None
            text_model(self.model).set_attn_implementation(self.implementation)

    def _check_layers(self, modules: list[nn.Module], tokens: Tensor) -> Tensor:
        """Calls every layer of full attention again, in two passes over transformers' own cache; their logits."""
        full = [module for module in modules if self._is_full(module)]
        if not full:
            kinds = sorted({type(layer).__name__ for layer in self.own_cache.layers})
            raise NotUnderstood(
                "no layer attends to the whole context and caches keys and values alone: "
                f"it has a window, or its cache is of {', '.join(kinds)}"
            )
        inside = {id(x) for module in modules for x in module.modules()}
        outside = [x for x in find_decoder(self.model).modules() if not inside & {id(part) for part in x.modules()}]
        hooks: list[Any] = [module.register_forward_hook(self.trial.again, with_kwargs=True) for module in full]
        hooks += [module.register_forward_hook(self.recorder.note_rotary, with_kwargs=True) for module in outside]
        logits = []
        try:
            for start, part in ((0, tokens[:, :_FIRST]), (_FIRST, tokens[:, _FIRST:])):
                self.recorder.calls.clear()
                self.recorder.rotary_calls.clear()
                logits.append(self._run(part, **self._positions(part, start), **with_cache(self.own_cache)))
        finally:
            for hook in hooks:
                hook.remove()
        return torch.cat(logits, dim=1)

    def _positions(self, tokens: Tensor, start: int = 0) -> dict[str, Any]:
        """Where tokens stand: some models count from 0 in every pass where that is not given."""
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device).unsqueeze(0)
        return {"position_ids": positions} if "position_ids" in inspect.signature(self.model.forward).parameters else {}

    def _is_full(self, module: nn.Module) -> bool:
        call = next(call for call in self.recorder.calls if call.module is module)
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int) or not 0 <= index < len(self.own_cache.layers):
            raise NotUnderstood(f"{module_name(self.model, module)} has no index of its layer in the cache")
        return type(self.own_cache.layers[index]) is DynamicLayer and call.options.get("sliding_window") is None

    def _result(self, modules: list[nn.Module]) -> ModelAttention:
        """The attention of the model from that of its layers, if they have in common what a cache needs."""
        layers = list(self.trial.layers.values())
        indices = [int(x.layer.module.layer_idx) for x in layers]  # type: ignore[arg-type]
        if indices != sorted(set(indices)):
            raise NotUnderstood(f"its layers attend in the order {indices}")
        if len({(x.shape, x.layer.latent) for x in layers}) > 1:
            raise NotUnderstood("its layers of full attention have different shapes")
        ropes = {id(x.rope): x.rope for x in layers if x.rope is not None}
        if len(ropes) > 1 or len({x.layer.channels for x in layers if x.layer.rotated}) > 1:
            raise NotUnderstood("its layers of full attention are rotated in different ways")
        num_heads, num_kv_heads, head_dim, value_dim = layers[0].shape
        total, rotated = len(self.own_cache.layers), [x for x in layers if x.layer.rotated]
        told = rope_spec(self.config, head_dim) if rotated else no_rope(head_dim)
        try:
            spec = ModelSpec(
                **general_fields(self.config),
                num_layers=len(layers),
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                rope=replace(told, rotary_dim=rotated[0].layer.rotary_dim) if rotated else told,
                value_head_dim=None if value_dim == head_dim else value_dim,
                layer_indices=tuple(indices) if len(indices) < total else (),
                other_layers=total - len(layers),
                unrotated=tuple(x.layer.layer_idx for x in layers if rotated and not x.layer.rotated),
                latent=layers[0].layer.latent,
            )
        except (ValueError, AttributeError) as error:
            raise NotUnderstood(one_line(error)) from error
        rope = next(iter(ropes.values()), None) or NoRope(spec.rope.rotary_dim, _device(self.model))
        rope.switch = min((x.switch for x in layers if x.switch is not None), default=None)
        notes = [note] if (note := newer_than_tried()) else []
        if self.config.model_type not in FULL + HYBRID:
            notes.append(
                f"model type '{self.config.model_type}' is not among those that tests run with every method; on a few "
                "tokens, its attention is what kvcli computes"
            )
        if len(layers) < total:
            notes.append(f"{len(layers)} of {total} layers attend to the whole context and are compressed")
        if rotating := sum(x.layer.own_rotation for x in layers):
            notes.append(f"{rotating} layers rotate keys in a way of their own: these are compressed after RoPE")
        if rope.switch is not None:
            notes.append(f"texts of over {rope.switch} tokens are rotated otherwise: what grows beyond is read anew")
        return ModelAttention(
            tuple(x.layer for x in layers), tuple(modules), rope, spec, self.implementation, tuple(notes)
        )


class _Zeros(TorchDispatchMode):
    """On the `meta` device, a number that is read is 0, and experts take tokens of any dtype."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 0
        if func is torch.ops.aten._grouped_mm.default and args[0].is_meta:
            return args[0].new_empty(len(args[0]), args[1].shape[-1])
        return func(*args, **(kwargs or {}))


@contextmanager
def _quiet(model: nn.Module) -> Iterator[None]:
    """Runs a model without gradients, dropout, autocast and compilation, and puts it back as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with (
            torch.no_grad(),
            torch.autocast(_device(model).type, enabled=False),
            torch.compiler.set_stance("force_eager"),
        ):
            yield
    finally:
        for module in training:
            module.training = True
