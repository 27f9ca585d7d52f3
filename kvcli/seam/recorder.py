"""Records a probed model: the calls of its attention function and rotary modules, and the cache that it fills."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import local
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from kvcli.errors import ModelError
from kvcli.seam.rotary import RotaryCall
from kvcli.seam.sdpa import own_attention

_KNOWN = ("scaling", "dropout", "is_causal", "position_ids", "softcap", "s_aux", "sliding_window", "logits_to_keep")
FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError, AssertionError)
"""What a model may raise where it does not expect our attention function or cache."""

running = local()
"""Its `recorder`, if not None, is that of the probe that runs in this thread."""


class NotUnderstood(Exception):
    """The attention of a layer is not what we would compute; the text says why."""


@dataclass
class RecordedCall:
    """One call of the attention function."""

    module: nn.Module
    query: Tensor
    key: Any
    value: Any
    mask: Tensor | None
    scaling: float
    options: dict[str, Any]
    output: Any = None


@dataclass(eq=False)
class ProbeTokens:
    """Returned by the probe's cache in place of the keys: keys and values of all tokens so far."""

    key: Tensor
    value: Tensor
    new_value: Tensor


class OwnLayer(CacheLayerMixin):
    """A layer of a cache of ours as transformers takes it: one of full attention, without a limit."""

    is_sliding = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.keys = self.values = torch.empty(0)  # a tensor, which models may ask for its size

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: what it needs is made by the first tokens."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the mask."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.17


class ProbeLayer(OwnLayer):
    """A cache layer that keeps keys and values and returns them as our cache does; latents as values."""

    def __init__(self) -> None:
        super().__init__()
        self.latent = False
        self.tokens: list[tuple[Tensor, Tensor]] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if self.latent:
            key_states, value_states = value_states, key_states
        self.tokens.append((key_states, value_states))
        key, value = (torch.cat(x, dim=2) for x in zip(*self.tokens, strict=True))
        return ProbeTokens(key, value, value_states), value_states

    def get_seq_length(self) -> int:
        return sum(key.shape[2] for key, _ in self.tokens)


class Recorder:
    """Records the calls of a model's attention function, named `implementation`, and of its rotary modules, in order.

    Where `again` is set, it attends in place of the model's own function, and nothing is recorded.
    """

    def __init__(self, model: nn.Module, implementation: str | None) -> None:
        self.model, self.implementation = model, implementation
        self.calls: list[RecordedCall] = []
        self.rotary_calls: list[RotaryCall] = []
        self.again: Callable[[RecordedCall], Tensor] | None = None
        config: Any = model.config
        self.is_of_text = config.get_text_config(decoder=True) is config  # else, images come with other positions

    def attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Any,
        value: Any,
        attention_mask: Any = None,
        *_: Any,
        **options: Any,
    ) -> tuple[Tensor, Any]:
        """The attention function: the model's own, after a check that its arguments are understood."""
        scaling = options.get("scaling")
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        call = RecordedCall(module, query, key, value, attention_mask, scaling, options)
        if self.again is not None:
            return self.again(call), None
        who = module_name(self.model, module)
        if attention_mask is not None and attention_mask.dtype != torch.bool:
            raise NotUnderstood(f"{who} adds a bias to its scores")
        for name, option in options.items():
            # flags, such as use_cache, are passed on from the model's arguments
            if name not in _KNOWN and isinstance(option, Tensor | int | float) and not isinstance(option, bool):
                raise NotUnderstood(f"{who} passes '{name}', which is not understood")
        if isinstance(scaling, Tensor):
            raise NotUnderstood(f"{who} scales its scores by a tensor")
        is_causal = options.get("is_causal")
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        # models that know only eager attention are always given a mask
        if attention_mask is None and self.implementation != "eager" and not is_causal:
            raise NotUnderstood(f"{who} is not causal")
        call.output = own_attention(module, self.implementation, query, key, value, attention_mask, **options)
        self.calls.append(call)
        output: tuple[Tensor, Any] = call.output
        return output

    def note_rotary(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """A forward hook; modules that are not rotary ones are passed over."""
        if (call := RotaryCall.of(module, args, kwargs, output)) is not None:
            self.rotary_calls.append(call.of_text() if self.is_of_text else call)


def record(module: nn.Module, *args: Any, **options: Any) -> tuple[Tensor, Any]:
    """The attention function that transformers calls while a model is probed."""
    recorder: Recorder | None = getattr(running, "recorder", None)
    if recorder is None:
        raise ModelError("the model is being probed in another thread; attach it before threads share it")
    return recorder.attention(module, *args, **options)


def module_name(model: nn.Module, module: nn.Module) -> str:
    """The name of a module in its model."""
    return next(name for name, x in model.named_modules() if x is module)


def one_line(error: BaseException) -> str:
    """Class and text of an error, at most 200 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
