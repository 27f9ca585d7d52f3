"""Small changes of Llama's attention and positions, such as a model that nobody has seen yet may have."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from factories import make_model
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, eager_attention_forward

from kvcli.seam.versions import CACHE_ARGUMENT

Steps = dict[str, Callable[..., Any]]


class Odd(nn.Module):
    """Llama's attention in steps, of which some are given; it takes over the projections of a layer."""

    def __init__(self, attention: Any, steps: Steps) -> None:
        super().__init__()
        taken = ("q_proj", "k_proj", "v_proj", "o_proj", "config", "layer_idx", "head_dim", "scaling")
        for name in (*taken, "num_key_value_groups", "is_causal"):
            setattr(self, name, getattr(attention, name))
        for name, step in steps.items():
            setattr(self, name, partial(step, self))

    def project(self, x: Tensor) -> Any:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        return tuple(f(x).view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2) for f in projections)

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return apply_rotary_pos_emb(query, key, cos, sin)

    def values(self, value: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return value

    def cached(self, key: Any, value: Any) -> Any:
        return key, value

    def attend(self, query: Tensor, key: Any, value: Any, mask: Tensor | None, **options: Any) -> Any:
        function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        return function(self, query, key, value, mask, scaling=self.scaling, **options)[0]

    def out(self, x: Tensor) -> Any:
        return self.o_proj(x.flatten(2)), None

    def forward(self, hidden_states: Tensor, position_embeddings: Any, **options: Any) -> Any:
        mask, cache = options.pop("attention_mask", None), options.pop(CACHE_ARGUMENT, None)
        query, key, value = self.project(hidden_states)
        query, key = self.rotate(query, key, *position_embeddings)
        value = self.values(value, *position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        key, value = self.cached(key, value)
        return self.out(self.attend(query, key, value, mask, **options))


def scaled(tensors: Any, factor: Any) -> Any:
    """Tensors, of which the first is scaled."""
    return tensors[0] * factor, *tensors[1:]


def of_heads(*numbers: float) -> Tensor:
    return torch.tensor(numbers).view(1, -1, 1, 1)


def distances(positions: Tensor) -> Tensor:
    return positions.unsqueeze(-1) - torch.arange(int(positions.max()) + 1)


def growing_scale(odd: Odd, *tensors: Any, **options: Any) -> Any:
    odd.scaling = 0.1 * (1 + int(options["position_ids"].max()))
    return Odd.attend(odd, *tensors, **options)


def scaling_per_head(odd: Odd, *tensors: Any, **options: Any) -> Any:
    odd.scaling = of_heads(0.1, 0.2, 0.3, 0.4)
    return Odd.attend(odd, *tensors, **options)


first_layers: list[Any] = []
"""Keys and values of the first layer, for the others."""


def keep_keys(odd: Odd, key: Any, value: Any) -> Any:
    first_layers[:] = key, value
    return key, value


def share_keys(odd: Odd, hidden_states: Tensor, position_embeddings: Any, **options: Any) -> Any:
    if not odd.layer_idx:
        return Odd.forward(odd, hidden_states, position_embeddings, **options)
    query, key, _ = odd.project(hidden_states)
    query, _ = odd.rotate(query, key, *position_embeddings)
    options.pop(CACHE_ARGUMENT, None)
    return odd.out(odd.attend(query, *first_layers, options.pop("attention_mask", None), **options))


def attend_last_tokens(odd: Odd, query: Tensor, key: Any, value: Any, mask: Tensor | None, **options: Any) -> Any:
    visible = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
    return Odd.attend(odd, query, key, value, visible[None, None], **options)


def long_window(odd: Odd, *tensors: Any, layers: tuple[int, ...], **options: Any) -> Any:
    """A window that the module puts into the mask, longer than what a probe sees."""
    *tensors, mask = tensors
    if odd.layer_idx in layers:
        distance = distances(options["position_ids"])
        mask = ((distance >= 0) & (distance < 20)).unsqueeze(1)
    return Odd.attend(odd, *tensors, mask, **options)


def learned_prefix(odd: Odd, hidden_states: Tensor, position_embeddings: Any, **options: Any) -> Any:
    """Puts a learned key and value before those of the first pass."""
    query, key, value = odd.project(hidden_states)
    query, key = odd.rotate(query, key, *position_embeddings)
    cache = options.get(CACHE_ARGUMENT)
    past = 0 if cache is None else cache.get_seq_length(odd.layer_idx)
    if not past:
        key, value = (torch.cat((torch.ones_like(x[:, :, :1]), x), dim=2) for x in (key, value))
    if cache is not None:
        key, value = cache.update(key, value, odd.layer_idx)
    last = torch.arange(query.shape[2]).unsqueeze(-1) + max(past, 1)
    return odd.out(odd.attend(query, key, value, (torch.arange(int(last.max()) + 1) <= last)[None, None]))


def attend_twice(odd: Odd, query: Tensor, *others: Any, **options: Any) -> Any:
    return Odd.attend(odd, query, *others, **options) - 0.3 * Odd.attend(odd, 2 * query, *others, **options)


def alibi(odd: Odd, query: Tensor, key: Any, value: Any, mask: Tensor | None, **options: Any) -> Any:
    distance = distances(options["position_ids"]).unsqueeze(1)
    bias = (-of_heads(0.5, 0.25, 0.125, 0.0625) * distance).masked_fill(distance < 0, float("-inf"))
    return Odd.attend(odd, query, key, value, bias, **options)


def gate_output(odd: Odd, query: Tensor, *others: Any, **options: Any) -> Any:
    """Multiplies what attention gives by what queries say, which leaves attention as it is."""
    return Odd.attend(odd, query, *others, **options) * query.sum(-1).transpose(1, 2).unsqueeze(-1).sigmoid()


def keep_raw_keys(odd: Odd, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
    odd.raw = key * 0.5
    return Odd.rotate(odd, query, key, cos, sin)


def norm_after_rope(odd: Odd, *tensors: Tensor) -> Any:
    weights = torch.rand(2, odd.head_dim, generator=torch.Generator().manual_seed(0)) + 0.5
    return [
        nn.functional.rms_norm(x, (odd.head_dim,), w) for x, w in zip(Odd.rotate(odd, *tensors), weights, strict=True)
    ]


def rotate_one_head(odd: Odd, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
    queries, keys = Odd.rotate(odd, query, key, cos, sin)
    return torch.cat((queries[:, :2], query[:, 2:]), 1), torch.cat((keys[:, :1], key[:, 1:]), 1)


def other_base_in_one_layer(odd: Odd, hidden_states: Tensor, position_embeddings: Any, **options: Any) -> Any:
    if odd.layer_idx == 1:
        frequencies = 50.0 ** -(torch.arange(0, odd.head_dim, 2) / odd.head_dim)
        angles = options["position_ids"].unsqueeze(-1) * frequencies.repeat(2)
        position_embeddings = angles.cos(), angles.sin()
    return Odd.forward(odd, hidden_states, position_embeddings, **options)


RIGHT: dict[str, Steps] = {
    "as Llama": {},
    "scaled queries": {"project": lambda odd, x: scaled(Odd.project(odd, x), 1.7)},
    "scaled after rope": {"rotate": lambda odd, *x: scaled(Odd.rotate(odd, *x), 1.7)},
    "temperature of heads": {"rotate": lambda odd, *x: scaled(Odd.rotate(odd, *x), of_heads(0.5, 1.0, 1.5, 2.0))},
    "gated output": {"attend": gate_output},
    "values from keys": {"rotate": keep_raw_keys, "values": lambda odd, value, cos, sin: odd.raw},
    "rotated values": {"values": lambda odd, value, cos, sin: apply_rotary_pos_emb(value, value, cos, sin)[0]},
    "norm after rope": {"rotate": norm_after_rope},
    "rope on odd layers": {"rotate": lambda odd, *x: Odd.rotate(odd, *x) if odd.layer_idx % 2 else x[:2]},
    "rotated backwards": {"rotate": lambda odd, query, key, cos, sin: Odd.rotate(odd, query, key, cos, -sin)},
    "only keys rotated": {"rotate": lambda odd, query, *others: (query, Odd.rotate(odd, query, *others)[1])},
    "one rotated head": {"rotate": rotate_one_head},
    "other base in one layer": {"forward": other_base_in_one_layer},
}
REFUSED: dict[str, tuple[str, Steps]] = {
    "scaling per head": ("layers.0.self_attn scales its scores by a tensor", {"attend": scaling_per_head}),
    "growing scale": ("layers.0.self_attn scales its scores by other factors", {"attend": growing_scale}),
    "shared keys": ("attends to what another one caches", {"forward": share_keys, "cached": keep_keys}),
    "last tokens": (
        "layers.0.self_attn",
        {"cached": lambda odd, key, value: (key[:, :, -8:], value[:, :, -8:]), "attend": attend_last_tokens},
    ),
    "long window": ("mask", {"attend": partial(long_window, layers=(0, 1, 2))}),
    "long window in one layer": ("layer 1: the attention mask", {"attend": partial(long_window, layers=(1,))}),
    "learned prefix": ("layers.0.self_attn: it caches 9 keys for 8 tokens", {"forward": learned_prefix}),
    "keys changed after cache": ("layers.0.self_attn", {"cached": lambda odd, key, value: (key * 1.5, value)}),
    "values changed after cache": ("layers.0.self_attn", {"cached": lambda odd, key, value: (key, value * 1.5)}),
    "attends twice": ("layers.0.self_attn attends 2 times", {"attend": attend_twice}),
    "unknown tensor": (
        "layers.0.self_attn passes 'position_bias'",
        {
            "attend": lambda odd, *x, **options: Odd.attend(
                odd, *x, position_bias=of_heads(1.0, 1.0, 1.0, 1.0), **options
            )
        },
    ),
    "unknown number": (
        "layers.0.self_attn passes 'local_window'",
        {"attend": lambda odd, *x, **options: Odd.attend(odd, *x, local_window=4096, **options)},
    ),
    "alibi": ("layers.0.self_attn adds a bias", {"attend": alibi}),
    "not causal": (
        "layers.0.self_attn is not causal",
        {"attend": lambda odd, *x, **options: Odd.attend(odd, *x[:3], None, is_causal=False, **options)},
    ),
}
"""Odd attentions, with what is said of them."""


class Rotary(nn.Module):
    """A rotary module with other positions."""

    def __init__(self, inner: Any, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.change = inner, change

    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        return self.inner(x, self.change(position_ids))


POSITIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "shifted": lambda x: x + 5,
    "switched late": lambda x: torch.where(x < 20, x, x * 3),
    "dependent on length": lambda x: x * (1.0 if x.max() < 16 else 0.5),
}


def with_attention(steps: Steps) -> Any:
    model = make_model("llama")
    for layer in model.model.layers:
        layer.self_attn = Odd(layer.self_attn, steps)
    return model


def with_positions(name: str) -> Any:
    model = make_model("llama")
    model.model.rotary_emb = Rotary(model.model.rotary_emb, POSITIONS[name])
    return model
