"""Small changes of Llama's rotary position encoding, such as a model that nobody has seen yet may have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from factories import make_model
from odd_models import Odd
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb


class ScaledAfterRope(Odd):
    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        query, key = super().rotate(query, key, cos, sin)
        return query * 1.7, key


class TemperatureOfHeads(Odd):
    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        query, key = super().rotate(query, key, cos, sin)
        return query * torch.tensor([0.5, 1.0, 1.5, 2.0]).view(1, 4, 1, 1), key


class RotatedValues(Odd):
    def values(self, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return apply_rotary_pos_emb(value, value, cos, sin)[0]


class NormAfterRope(Odd):
    def __init__(self, attention: Any) -> None:
        super().__init__(attention)
        self.q_norm, self.k_norm = (nn.RMSNorm(self.head_dim) for _ in range(2))
        for norm in (self.q_norm, self.k_norm):
            norm.weight.data = torch.rand(self.head_dim) + 0.5

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        query, key = super().rotate(query, key, cos, sin)
        return self.q_norm(query), self.k_norm(key)


class RopeOnOddLayers(Odd):
    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return super().rotate(query, key, cos, sin) if self.layer_idx % 2 else (query, key)


class RotatedBackwards(Odd):
    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return super().rotate(query, key, cos, -sin)


class OnlyKeysRotated(Odd):
    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return query, super().rotate(query, key, cos, sin)[1]


class OneRotatedHead(Odd):
    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        rotated = super().rotate(query, key, cos, sin)
        return torch.cat((rotated[0][:, :2], query[:, 2:]), 1), torch.cat((rotated[1][:, :1], key[:, 1:]), 1)


class OtherBaseInOneLayer(Odd):
    def __init__(self, attention: Any) -> None:
        super().__init__(attention)
        frequencies = 50.0 ** -(torch.arange(0, self.head_dim, 2) / self.head_dim)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, hidden_states: Tensor, position_embeddings: Any = None, **options: Any) -> Any:
        if self.layer_idx == 1:
            angles = options["position_ids"].unsqueeze(-1) * torch.cat((self.frequencies, self.frequencies))
            position_embeddings = angles.cos(), angles.sin()
        return super().forward(hidden_states, position_embeddings, **options)


class ShiftedPositions(nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        return self.inner(x, position_ids + 5)


class LengthDependent(ShiftedPositions):
    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        return self.inner(x, position_ids * (1.0 if position_ids.max() < 16 else 0.5))


class LateSwitch(ShiftedPositions):
    """Other angles for positions from 20 on."""

    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        return self.inner(x, torch.where(position_ids < 20, position_ids, position_ids * 3))


def with_rotary(kind: type[ShiftedPositions]) -> Callable[[], Any]:
    def build() -> Any:
        model = make_model("llama")
        model.model.rotary_emb = kind(model.model.rotary_emb)
        return model

    return build
