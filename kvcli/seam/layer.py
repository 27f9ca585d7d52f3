"""The attention of a layer, and one call of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from kvcli.rope import Rotation
from kvcli.seam.latent import absorbed, expanded, projected
from kvcli.seam.sdpa import plain_attention, sdpa

Function = TypeVar("Function", bound=Callable[..., Any])
ChannelOrder = Literal["halves", "neighbours", "last halves", "last neighbours"]
"""Which channels of a head form a pair j: j and j + rotary_dim/2, or 2j and 2j + 1, of the first or last rotary_dim."""


def untraced(function: Function) -> Function:
    """Breaks the graph of a compiled model at a function with effects that a tracer would miss, put off or repeat."""
    disabled: Function = torch.compiler.disable(function)
    return disabled


@dataclass(frozen=True)
class LayerAttention:
    """The attention of one layer of full attention, as `kvcli.seam.probe` determined it.

    Attributes:
        layer_idx: counted among such layers.
        rotated: whether queries and keys reach us before RoPE; else they are attended to as they are.
        channels: order of the channels in the model.
        rotary_dim: channels that RoPE rotates.
        own_rotation: whether the model rotates by itself, in a way that is not understood.
        soft_cap: of the scores, if they are capped.
        has_sinks: whether logits of sinks take their share of every softmax.
        latent: whether values are latents, of which the rest of each head's keys and values is made (MLA).
    """

    layer_idx: int
    module: nn.Module
    rotated: bool = True
    channels: ChannelOrder = "halves"
    rotary_dim: int = 0
    own_rotation: bool = False
    soft_cap: float | None = None
    has_sinks: bool = False
    latent: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerAttention:
        """The record itself: its module belongs to the model, of which copies of a cache share everything."""
        return self

    @property
    def is_plain(self) -> bool:
        """Whether scores are products of queries and keys, and nothing else."""
        return self.soft_cap is None and not self.has_sinks

    def key_units(self, head_dim: int) -> Tensor | None:
        """Units of channels of keys, in which errors of all channels cost about as much: the roots of the size of keys
        over that of queries, by the weights of their norms.

        Returns:
            float32 [head_dim] on the CPU, 1 or more, the same in a RoPE pair, channels in the order of `kvcli.rope`;
            1 if the model is on `meta`; None where keys and queries are not normalized with weights.
        """
        sizes, pairs = [], self.rotary_dim // 2
        for norm in (getattr(self.module, name, None) for name in ("k_norm", "q_norm")):
            weight = getattr(norm, "weight", None)
            if norm is None or weight is None or weight.numel() % head_dim:
                return None
            signs = torch.ones_like(weight)
            signs[..., 1::2] = -1  # a vector of size 1 and mean 0, whatever the kind of norm
            size = self.in_order(norm(signs).detach().float().view(-1, head_dim)).square().mean(0)
            sizes.append(torch.cat((size[: 2 * pairs].view(2, pairs).mean(0).repeat(2), size[2 * pairs :])))
        if sizes[0].is_meta:
            return torch.ones(head_dim)
        ratio = (sizes[0].clamp_min(1e-12) / sizes[1].clamp_min(1e-12)).cpu() ** 0.25
        ratio = ratio.clamp_min(float(ratio.max()) / 256)  # smaller errors are none beside the rest
        return ratio / ratio.min()

    def query_dim(self, head_dim: int) -> int:
        """Channels of a query, where cached keys have `head_dim`."""
        return head_dim + self.latent * int(getattr(self.module, "qk_nope_head_dim", 0))

    def expanded(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all heads, from what is cached [batch, num_kv_heads, time, head_dim or value_dim]."""
        return expanded(self.module, key, value) if self.latent else (key, value)

    def absorbed(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Queries of keys that end with the values, which are latents."""
        return absorbed(self.module, query, key.shape[-1], value.shape[-1])

    def projected(self, output: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Outputs [batch, query_len, num_heads, value_dim] of the heads, from sums of latents."""
        return projected(self.module, output, query.shape[-1] - key.shape[-1])

    def in_order(self, x: Tensor) -> Tensor:
        """Queries or keys [..., head_dim] with their channels in the order of `kvcli.rope`."""
        if self.channels == "halves":
            return x
        rotated, rest = x[..., : self.rotary_dim], x[..., self.rotary_dim :]
        if self.channels.startswith("last"):
            rest, rotated = x.split((x.shape[-1] - self.rotary_dim, self.rotary_dim), dim=-1)
        pairs = (rotated[..., ::2], rotated[..., 1::2]) if self.channels.endswith("neighbours") else (rotated,)
        return torch.cat((*pairs, rest), dim=-1)


class RotaryOutput(NamedTuple):
    """RoPE positions [batch or 1, query_len] of a pass's new tokens, and their rotation in the model's dtype.

    Where nothing rotates, a model may not say which positions they are; not `known`, they count within the pass.
    """

    positions: Tensor
    rotation: Rotation
    known: bool = True


@dataclass(frozen=True)
class AttentionCall:
    """One call of a layer's attention.

    Attributes:
        query: before RoPE, in the order of `kvcli.rope`, [batch, num_heads, query_len, head_dim]; of latents with the
            channels of a head's own keys after them.
        key: what the cache's `update` returned; without a cache [batch, num_kv_heads, query_len, head_dim].
        value: the same with the width of values.
        mask: None, or boolean [batch or 1, 1, query_len, slots].
        sinks: their logits [num_heads], where the layer has them.
    """

    layer: LayerAttention
    query: Tensor
    key: Any
    value: Any
    mask: Tensor | None
    scaling: float
    rotary: RotaryOutput
    sinks: Tensor | None = None

    @property
    def rotation(self) -> Rotation:
        """RoPE of the new tokens, by 0 where the layer does not rotate."""
        rotation = self.rotary.rotation.to(self.query.device)
        return rotation if self.layer.rotated else Rotation.none(rotation)

    def exact(self) -> Tensor:
        """Full-precision attention without a cache, [batch, query_len, num_heads, value_dim]."""
        query, key = self.query, self.key
        if self.layer.rotated:
            query, key = (self.rotation.apply(x).to(x.dtype) for x in (query, key))
        key, value = self.layer.expanded(key, self.value)
        if self.layer.is_plain:
            return sdpa(query, key, value, self.mask, self.scaling)
        return plain_attention(query, key, value, self.mask, self.scaling, self.layer.soft_cap, self.sinks)


AttendFunction = Callable[[AttentionCall], Tensor]
"""Attention of one layer; returns [batch, query_len, num_heads, value_dim]."""
