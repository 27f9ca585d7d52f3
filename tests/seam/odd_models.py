"""Small changes of Llama's attention, such as a model that nobody has seen yet may have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from factories import make_model
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, eager_attention_forward


class Odd(nn.Module):
    """Llama's attention in steps that a test can change; it takes over the projections of a layer."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, getattr(attention, name))
        self.config, self.layer_idx, self.head_dim = attention.config, attention.layer_idx, attention.head_dim
        self.scaling, self.is_causal = attention.scaling, True
        self.num_key_value_groups = attention.num_key_value_groups

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(  # type: ignore[return-value]
            projection(x).view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return apply_rotary_pos_emb(query, key, cos, sin)

    def values(self, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return value

    def cached(self, key: Any, value: Any) -> tuple[Any, Any]:
        return key, value

    def attend(self, query: Tensor, key: Any, value: Any, mask: Tensor | None, **options: Any) -> Tensor:
        function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        return function(self, query, key, value, mask, scaling=self.scaling, **options)[0]

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        query, key, value = self.project(hidden_states)
        query, key = self.rotate(query, key, *position_embeddings)
        value = self.values(value, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        key, value = self.cached(key, value)
        output = self.attend(query, key, value, attention_mask, **options)
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1)), None


class Plain(Odd):
    """As Llama."""


class ScaledQueries(Odd):
    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super().project(x)
        return query * 1.7, key, value


class ScalingPerHead(Odd):
    def attend(self, query: Tensor, key: Any, value: Any, mask: Tensor | None, **options: Any) -> Tensor:
        self.scaling = torch.tensor([0.1, 0.2, 0.3, 0.4]).view(1, 4, 1, 1)
        return super().attend(query, key, value, mask, **options)


class GrowingScale(Odd):
    def attend(self, query: Tensor, key: Any, value: Any, mask: Tensor | None, **options: Any) -> Tensor:
        self.scaling = 0.1 * (1 + int(options["position_ids"].max()))
        return super().attend(query, key, value, mask, **options)


class SharedKeys(Odd):
    """Every layer but the first one attends to the keys and values of the first."""

    kept: Any = None

    def forward(self, hidden_states: Tensor, position_embeddings: Any = None, **options: Any) -> Any:
        if not self.layer_idx:
            return super().forward(hidden_states, position_embeddings, **options)
        query, key, _ = self.project(hidden_states)
        query = self.rotate(query, key, *position_embeddings)[0]
        mask = options.pop("attention_mask", None)
        options.pop("past_key_values", None)
        output = self.attend(query, *SharedKeys.kept, mask, **options)
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1)), None

    def cached(self, key: Any, value: Any) -> tuple[Any, Any]:
        SharedKeys.kept = key, value
        return key, value


class LastTokens(Odd):
    """Keeps only the last keys that the cache returns."""

    def cached(self, key: Any, value: Any) -> tuple[Any, Any]:
        return key[:, :, -8:], value[:, :, -8:]

    def attend(self, query: Tensor, key: Any, value: Any, mask: Tensor | None, **options: Any) -> Tensor:
        visible = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
        return super().attend(query, key, value, visible[None, None], **options)


class LongWindow(Odd):
    """A window that the module puts into the mask, longer than what a probe sees; layers may differ."""

    layers = (0, 1, 2)

    def attend(self, query: Tensor, key: Any, value: Any, mask: Tensor | None, **options: Any) -> Tensor:
        if self.layer_idx in self.layers:
            positions = options["position_ids"]
            slots = torch.arange(int(positions.max()) + 1)
            distance = positions.unsqueeze(-1) - slots
            mask = ((distance >= 0) & (distance < 20)).unsqueeze(1)
        return super().attend(query, key, value, mask, **options)


class LongWindowInOneLayer(LongWindow):
    layers = (1,)


class LearnedPrefix(Odd):
    """Puts a learned key and value before those of the first pass."""

    def forward(self, hidden_states: Tensor, position_embeddings: Any = None, **options: Any) -> Any:
        query, key, value = self.project(hidden_states)
        query, key = self.rotate(query, key, *position_embeddings)
        cache = options.get("past_key_values")
        past = 0 if cache is None else cache.get_seq_length(self.layer_idx)
        if not past:
            key, value = (torch.cat((torch.ones_like(x[:, :, :1]), x), dim=2) for x in (key, value))
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        last = torch.arange(query.shape[2]).unsqueeze(-1) + max(past, 1)
        output = self.attend(query, key, value, (torch.arange(int(last.max()) + 1) <= last)[None, None])
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1)), None


class KeysChangedAfterCache(Odd):
    def cached(self, key: Any, value: Any) -> tuple[Any, Any]:
        return key * 1.5, value


class ValuesChangedAfterCache(Odd):
    def cached(self, key: Any, value: Any) -> tuple[Any, Any]:
        return key, value * 1.5


class AttendsTwice(Odd):
    def attend(self, query: Tensor, key: Any, value: Any, mask: Tensor | None, **options: Any) -> Tensor:
        first = super().attend(query, key, value, mask, **options)
        return first - 0.3 * super().attend(2 * query, key, value, mask, **options)


class UnknownTensor(Odd):
    def attend(self, query: Tensor, key: Any, value: Any, mask: Tensor | None, **options: Any) -> Tensor:
        return super().attend(query, key, value, mask, position_bias=torch.ones(1, 4, 1, 1), **options)


class UnknownNumber(Odd):
    def attend(self, query: Tensor, key: Any, value: Any, mask: Tensor | None, **options: Any) -> Tensor:
        return super().attend(query, key, value, mask, local_window=4096, **options)


class Alibi(Odd):
    def attend(self, query: Tensor, key: Any, value: Any, mask: Tensor | None, **options: Any) -> Tensor:
        positions = options["position_ids"]
        distance = positions.unsqueeze(-1) - torch.arange(int(positions.max()) + 1)
        slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625]).view(1, 4, 1, 1)
        bias = (-slopes * distance.unsqueeze(1)).masked_fill(distance.unsqueeze(1) < 0, float("-inf"))
        return super().attend(query, key, value, bias, **options)


class NotCausal(Odd):
    def attend(self, query: Tensor, key: Any, value: Any, mask: Tensor | None, **options: Any) -> Tensor:
        return super().attend(query, key, value, None, is_causal=False, **options)


class GatedOutput(Odd):
    """Multiplies what attention gives by what queries say, which leaves attention as it is."""

    def attend(self, query: Tensor, key: Any, value: Any, mask: Tensor | None, **options: Any) -> Tensor:
        output = super().attend(query, key, value, mask, **options)
        return output * torch.sigmoid(query.sum(-1).transpose(1, 2).unsqueeze(-1))


class ValuesFromKeys(Odd):
    def values(self, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.raw

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        self.raw = key * 0.5
        return super().rotate(query, key, cos, sin)


class SmoothedKeys(Odd):
    """Every key takes a part of the key before it in the same pass."""

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        query, key = super().rotate(query, key, cos, sin)
        return query, key + 0.3 * nn.functional.pad(key, (0, 0, 1, 0))[:, :, :-1]


def with_attention(kind: type[Odd]) -> Callable[[], Any]:
    def build() -> Any:
        model = make_model("llama")
        for layer in model.model.layers:
            layer.self_attn = kind(layer.self_attn)
        return model

    return build
