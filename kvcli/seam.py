"""Where kvcli meets transformers: pre-RoPE queries and keys, and an attention function of our own.

The model's rotary module is wrapped to keep the rotation and hand out the identity, so that q and k stay pre-RoPE on
their way to the cache and to the attention function, which rotates them itself. No modelling code is copied, and
nothing is patched before `Seam.open`. This module does not know what the attention function does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kvcli.errors import ModelError
from kvcli.identity import identity_rotation
from kvcli.rope import Rope, Rotation

_ATTENTION_NAME = "kvcli"
_ATTRIBUTE = "kvcli_seam"


@dataclass
class ForwardContext:
    """What one forward pass of the model shares between its layers.

    Attributes:
        positions: [batch or 1, query_len] RoPE positions of the new tokens.
        rotation: their rotation, in the model's dtype.
        shared: anything else that layers compute once a forward pass, by key.
    """

    positions: Tensor
    rotation: Rotation
    shared: dict[str, Any]


class AttendFunction(Protocol):
    """Attention of one layer, given pre-RoPE queries and whatever the cache's `update` returned as key and value."""

    def __call__(
        self,
        context: ForwardContext,
        module: nn.Module,
        query: Tensor,
        key: Any,
        value: Any,
        mask: Tensor | None,
        scaling: float,
    ) -> Tensor:
        """Returns the attention output, [batch, query_len, num_heads, head_dim]."""
        ...


class _PreRopeRotary(nn.Module):
    """Stands in for the model's rotary module: keeps (cos, sin) of this forward pass, returns (1, 0)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.context: ForwardContext | None = None

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.inner(x, position_ids=position_ids)
        half = cos.shape[-1] // 2
        rotation = Rotation(cos[..., :half].unsqueeze(1), sin[..., :half].unsqueeze(1))
        self.context = ForwardContext(position_ids, rotation, {})
        return identity_rotation(cos)


class Seam:
    """The patch on one model; `open` applies it, `close` restores the model exactly.

    Args:
        model: a causal language model of transformers whose attention goes through `AttentionInterface`.
        attend: called in place of the model's attention, in every layer.
    """

    def __init__(self, model: nn.Module, attend: AttendFunction) -> None:
        self.model: Any = model
        self.attend = attend
        self._decoder = _find_decoder(model)
        self._rotary: _PreRopeRotary | None = None
        self._implementation: str | None = None

    @property
    def rope(self) -> Rope:
        """The model's own rotary embedding."""
        rotary = self._decoder.rotary_emb
        return Rope(rotary.inner if isinstance(rotary, _PreRopeRotary) else rotary)  # type: ignore[arg-type]

    @property
    def is_open(self) -> bool:
        """Whether the model is patched."""
        return self._rotary is not None

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

    def close(self) -> None:
        """Restores the model; closing twice is harmless."""
        if self._rotary is None:
            return
        self._decoder.rotary_emb = self._rotary.inner
        for layer in self._decoder.layers:  # type: ignore[union-attr]
            delattr(layer.self_attn, _ATTRIBUTE)
        self.model.set_attn_implementation(self._implementation)
        self._rotary = None

    @property
    def context(self) -> ForwardContext:
        """The forward pass under way."""
        if self._rotary is None or self._rotary.context is None:
            raise ModelError("the attention was called outside a forward pass of the model")
        return self._rotary.context

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
    """The function registered with transformers; it finds the seam of the module's model."""
    seam: Seam = getattr(module, _ATTRIBUTE)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return seam.attend(seam.context, module, query, key, value, attention_mask, scaling), None


def exact_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Causal attention over plain tensors that are rotated already.

    Args:
        query: [batch, num_heads, query_len, head_dim].
        key: [batch, num_kv_heads, kv_len, head_dim].
        value: like key.
        mask: None, or boolean [batch, 1, query_len, kv_len], True where a query sees a key.
        scaling: factor of the scores.

    Returns:
        [batch, query_len, num_heads, head_dim]; a query that sees no key gets 0.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and mask is not None:
        # with a mask, grouped-query SDPA falls back to the math kernel: repeating the heads is faster
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        groups = 1
    output = nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        scale=scaling,
        is_causal=mask is None and query.shape[2] > 1,
        enable_gqa=groups > 1,
    )
    return output.transpose(1, 2).contiguous()


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
