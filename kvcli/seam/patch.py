"""Where kvcli meets transformers: pre-RoPE queries and keys, and an attention function of our own.

The model's rotary module is wrapped to keep the rotation and hand out the identity, so that q and k stay pre-RoPE on
their way to the cache and to the attention function, which rotates them itself. No modelling code is copied, and
nothing is patched before `Seam.open`. This module does not know what the attention function does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from threading import local
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface, Cache, GenerationMixin
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kvcli.errors import ModelError
from kvcli.rope import Rope, Rotation
from kvcli.seam.identity import identity_factors
from kvcli.seam.untraced import untraced

_ATTENTION_NAME = "kvcli"
_ATTRIBUTE = "kvcli_seam"
_SHARED_CONFIG = "another model that has the same config object is attached; detach it, or load a copy of the config"


class RotaryOutput(NamedTuple):
    """What the model's rotary module computed for one forward pass.

    Attributes:
        positions: [batch or 1, query_len] RoPE positions of the new tokens.
        rotation: their RoPE, in the model's dtype.
    """

    positions: Tensor
    rotation: Rotation


class AttendFunction(Protocol):
    """Attention of one layer, given pre-RoPE queries and whatever the cache's `update` returned as key and value."""

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Any,
        value: Any,
        mask: Tensor | None,
        scaling: float,
        rotary: RotaryOutput,
    ) -> Tensor:
        """Returns the attention output, [batch, query_len, num_heads, head_dim]."""
        ...


class _CurrentPass(local):
    """What the rotary module computed for the forward pass that is running in this thread; None between passes."""

    output: RotaryOutput | None = None


class _PreRopeRotary(nn.Module):
    """Replaces the model's rotary module: keeps (cos, sin) of this forward pass, returns (1, 0)."""

    def __init__(self, inner: nn.Module, seam: Seam) -> None:
        super().__init__()
        self.inner = inner
        self.seam = seam

    @untraced
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.inner(x, position_ids=position_ids)
        self.seam.current.output = RotaryOutput(position_ids, Rotation.from_model(cos, sin))
        return identity_factors(cos)


def _accept(anything: Any) -> None:
    """Refuses nothing."""


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
        is_open: whether the model is patched.
        current: its `output` belongs to the forward pass that is running in this thread.
    """

    def __init__(
        self,
        model: nn.Module,
        attend: AttendFunction,
        check_call: Callable[[Mapping[str, Any]], None] = _accept,
        check_drafts: Callable[[Any], None] = _accept,
    ) -> None:
        self.model: Any = model
        self.attend = attend
        self.check_call = check_call
        self.check_drafts = check_drafts
        self.is_open = False
        self.current = _CurrentPass()
        self._decoder = find_decoder(model)
        self._last_layer = len(self._decoder.layers) - 1  # type: ignore[arg-type]
        self._parameters = tuple(inspect.signature(self._decoder.forward).parameters)
        self._rotary: _PreRopeRotary | None = None
        self._hooks: list[Any] = []
        self._generator: Any = None
        self._implementation: str | None = None

    @property
    def rope(self) -> Rope:
        """The model's own rotary embedding."""
        rotary = self._decoder.rotary_emb
        return Rope(rotary.inner if isinstance(rotary, _PreRopeRotary) else rotary)  # type: ignore[arg-type]

    def open(self) -> None:
        """Patches the model.

        Raises:
            ModelError: the model is patched already, or another model with the same config object.
        """
        if isinstance(self._decoder.rotary_emb, _PreRopeRotary):
            raise ModelError("the model is attached already; detach the first session before attaching another")
        if self.model.config._attn_implementation == _ATTENTION_NAME:
            raise ModelError(_SHARED_CONFIG)
        AttentionInterface.register(_ATTENTION_NAME, _attention)
        AttentionMaskInterface.register(_ATTENTION_NAME, sdpa_mask)
        self._implementation = self.model.config._attn_implementation
        self._rotary = _PreRopeRotary(self._decoder.rotary_emb, self)  # type: ignore[arg-type]
        self._decoder.rotary_emb = self._rotary
        for layer in self._decoder.layers:  # type: ignore[union-attr]
            setattr(layer.self_attn, _ATTRIBUTE, self)
        self.model.set_attn_implementation(_ATTENTION_NAME)
        self._hooks = [
            self._decoder.register_forward_pre_hook(self._before_pass, with_kwargs=True),
            self._decoder.register_forward_hook(self._after_pass, always_call=True),
        ]
        if not hasattr(Cache, "activate_past_recording"):
            self._check_drafts_first()
        self.is_open = True

    def close(self) -> None:
        """Restores the model; closing twice is harmless."""
        if self._rotary is None:
            return
        for hook in self._hooks:
            hook.remove()
        if self._generator is not None:
            del self._generator._get_candidate_generator
            self._generator = None
        self._decoder.rotary_emb = self._rotary.inner
        for layer in self._decoder.layers:  # type: ignore[union-attr]
            delattr(layer.self_attn, _ATTRIBUTE)
        self.model.set_attn_implementation(self._implementation)
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
        if output is None or (positions is not None and positions is not output.positions):
            # gradient checkpointing calls a layer again after the pass, on CUDA in another thread
            if positions is None:
                raise ModelError("the attention was called outside a forward pass of the model")
            output = RotaryOutput(positions, self.rope.rotation(positions, query.dtype))
            self.current.output = output
        return output

    def layer_done(self, module: nn.Module) -> None:
        """Notes that an attention module is done; after the last one nothing of the pass is kept."""
        if module.layer_idx == self._last_layer:
            self.current.output = None

    @untraced
    def _before_pass(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuses arguments and settings that this attention would ignore."""
        call, config = {**dict(zip(self._parameters, args, strict=False)), **kwargs}, self.model.config
        if config._attn_implementation != _ATTENTION_NAME:
            raise ModelError(
                f"the attention implementation was set to '{config._attn_implementation}' while the model is attached; "
                "detach first"
            )
        wanted = call.get("output_attentions")
        if config.output_attentions if wanted is None else wanted:
            raise ModelError("attention weights are not computed while a model is attached; drop output_attentions")
        if call.get("use_cache") is None:
            call["use_cache"] = config.use_cache
        if decoder.training and getattr(decoder, "gradient_checkpointing", False):
            call["use_cache"] = False  # as transformers does
        self.check_call(call)

    @untraced
    def _after_pass(self, *args: Any) -> None:
        """Forgets the pass, also one that died between two layers."""
        self.current.output = None

    def _check_drafts_first(self) -> None:
        """Makes `generate` call `check_drafts` before it drafts tokens that it may remove from the cache again."""
        self._generator = next((module for module in self.model.modules() if isinstance(module, GenerationMixin)), None)
        if self._generator is None:
            return
        make = self._generator._get_candidate_generator

        def checked(*args: Any, **kwargs: Any) -> Any:
            self.check_drafts((kwargs.get("model_kwargs") or {}).get("past_key_values"))
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
) -> tuple[Tensor, None]:
    """Registered with transformers; finds the seam of the module's model."""
    seam: Seam | None = getattr(module, _ATTRIBUTE, None)
    if seam is None:
        raise ModelError(_SHARED_CONFIG)
    if is_causal is False:
        raise ModelError("is_causal=False is not supported while a model is attached: its attention is causal")
    if dropout:
        raise ModelError("attention dropout is not applied while a model is attached; call model.eval()")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    rotary = seam.rotary_output(query, position_ids)
    output = seam.attend(module, query, key, value, attention_mask, scaling, rotary)
    seam.layer_done(module)
    return output, None


def find_rope(model: nn.Module) -> Rope:
    """The rotary embedding of a model that is not attached."""
    return Rope(find_decoder(model).rotary_emb)  # type: ignore[arg-type]


def layer_index(module: nn.Module) -> int:
    """The index of the decoder layer that an attention module belongs to."""
    index: int = module.layer_idx  # type: ignore[assignment]
    return index


def find_decoder(model: nn.Module) -> nn.Module:
    """The module that owns `rotary_emb` and `layers`."""
    for module in model.modules():
        if hasattr(module, "rotary_emb") and hasattr(module, "layers"):
            return module
    raise ModelError(f"{type(model).__name__} has no rotary embedding shared by its layers; it cannot be attached")
