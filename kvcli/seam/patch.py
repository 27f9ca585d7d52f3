"""Where kvcli meets transformers: pre-RoPE queries and keys, and an attention function of our own.

The model's rotary module is wrapped to keep the rotation and hand out the identity, so that q and k stay pre-RoPE on
their way to the cache and to the attention function, which rotates them itself. No modelling code is copied, and
nothing is patched before `Seam.open`. This module does not know what the attention function does.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kvcli.errors import ModelError
from kvcli.rope import Rope, Rotation
from kvcli.seam.identity import identity_factors

_ATTENTION_NAME = "kvcli"
_ATTRIBUTE = "kvcli_seam"


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


class _PreRopeRotary(nn.Module):
    """Replaces the model's rotary module: keeps (cos, sin) of this forward pass, returns (1, 0)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.output: RotaryOutput | None = None

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.inner(x, position_ids=position_ids)
        self.output = RotaryOutput(position_ids, Rotation.from_model(cos, sin))
        return identity_factors(cos)


class Seam:
    """The patch on one model; `open` applies it, `close` restores the model exactly.

    Args:
        model: a causal language model of transformers whose attention goes through `AttentionInterface`.
        attend: called in place of the model's attention, in every layer.

    Attributes:
        is_open: whether the model is patched.
    """

    def __init__(self, model: nn.Module, attend: AttendFunction) -> None:
        self.model: Any = model
        self.attend = attend
        self._decoder = _find_decoder(model)
        self._rotary: _PreRopeRotary | None = None
        self.is_open = False
        self._implementation: str | None = None

    @property
    def rope(self) -> Rope:
        """The model's own rotary embedding."""
        rotary = self._decoder.rotary_emb
        return Rope(rotary.inner if isinstance(rotary, _PreRopeRotary) else rotary)  # type: ignore[arg-type]

    def open(self) -> None:
        """Patches the model.

        Raises:
            ModelError: the model is patched already.
        """
        if isinstance(self._decoder.rotary_emb, _PreRopeRotary):
            raise ModelError("the model is attached already; detach the first session before attaching another")
        AttentionInterface.register(_ATTENTION_NAME, _attention)
        AttentionMaskInterface.register(_ATTENTION_NAME, sdpa_mask)
        self._implementation = self.model.config._attn_implementation
        self._rotary = _PreRopeRotary(self._decoder.rotary_emb)  # type: ignore[arg-type]
        self._decoder.rotary_emb = self._rotary
        for layer in self._decoder.layers:  # type: ignore[union-attr]
            setattr(layer.self_attn, _ATTRIBUTE, self)
        self.model.set_attn_implementation(_ATTENTION_NAME)
        self.is_open = True

    def close(self) -> None:
        """Restores the model; closing twice is harmless."""
        if self._rotary is None:
            return
        self._decoder.rotary_emb = self._rotary.inner
        for layer in self._decoder.layers:  # type: ignore[union-attr]
            delattr(layer.self_attn, _ATTRIBUTE)
        self.model.set_attn_implementation(self._implementation)
        self._rotary, self.is_open = None, False

    def rotary_output(self) -> RotaryOutput:
        """Positions and RoPE of the forward pass that is running.

        Raises:
            ModelError: no forward pass is running.
        """
        if self._rotary is None or self._rotary.output is None:
            raise ModelError("the attention was called outside a forward pass of the model")
        return self._rotary.output

    def __enter__(self) -> Seam:
        self.open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Registered with transformers; finds the seam of the module's model."""
    seam: Seam = getattr(module, _ATTRIBUTE)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return seam.attend(module, query, key, value, attention_mask, scaling, seam.rotary_output()), None


def find_rope(model: nn.Module) -> Rope:
    """The rotary embedding of a model that is not attached."""
    return Rope(_find_decoder(model).rotary_emb)  # type: ignore[arg-type]


def layer_index(module: nn.Module) -> int:
    """The index of the decoder layer that an attention module belongs to."""
    index: int = module.layer_idx  # type: ignore[assignment]
    return index


def _find_decoder(model: nn.Module) -> nn.Module:
    """The module that owns `rotary_emb` and `layers`."""
    for module in model.modules():
        if hasattr(module, "rotary_emb") and hasattr(module, "layers"):
            return module
    raise ModelError(f"{type(model).__name__} has no rotary embedding shared by its layers; it cannot be attached")
