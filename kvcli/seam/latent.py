"""Latent attention (MLA; DeepSeek-V2, arXiv 2405.04434): a token's keys and values of all heads come from one latent.

A model caches the latent c [rank], and a key r that all heads share and RoPE rotates. Head h has keys (r, K_h c) and
values V_h c, so that with q = (q_r, q_n)

    q . (r, K_h c) = (q_r, K_h^T q_n) . (r, c)        sum_t p_t V_h c_t = V_h sum_t p_t c_t

and attention is that of one kv head, whose keys are r and c and whose values are c: r is cached as a key, c as a value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def has_latents(module: nn.Module) -> bool:
    """Whether an attention module caches latents, and makes keys and values of them (transformers 5.18 and later)."""
    return all(hasattr(module, name) for name in ("expand_kv", "kv_b_proj", "qk_rope_head_dim"))


def cache_latents(module: nn.Module) -> None:
    """Makes an attention module hand what its cache returned, or new latents, to the attention function."""
    module.expand_kv = _hand_on  # type: ignore[assignment]


def expand_again(module: nn.Module) -> None:
    """The inverse of `cache_latents`."""
    del module.expand_kv


def _hand_on(latent: Any, key: Any) -> tuple[Any, Any]:
    return (key, latent) if isinstance(latent, Tensor) else (latent, key)


def expanded(module: nn.Module, key: Tensor, latent: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of all heads.

    Args:
        key: [batch, 1, time, rotary_dim].
        latent: [batch, 1, time, rank].

    Returns:
        Keys [batch, num_heads, time, rotary_dim + d], which begin with `key`, and values [batch, num_heads, time, e].
    """
    keys, values = type(module).expand_kv(module, latent, key)  # type: ignore[attr-defined]
    rest, first = keys.split((keys.shape[-1] - key.shape[-1], key.shape[-1]), dim=-1)
    return torch.cat((first, rest), dim=-1), values


def absorbed(module: nn.Module, query: Tensor, rotary_dim: int, rank: int) -> Tensor:
    """Queries of keys and latents, [batch, num_heads, time, rotary_dim + rank].

    `query` is [batch, num_heads, time, rotary_dim + d], its first channels those of the shared key.
    """
    rotated, rest = query.split((rotary_dim, query.shape[-1] - rotary_dim), dim=-1)
    keys, _ = _projections(module, query, rank, rest.shape[-1])
    return torch.cat((rotated, torch.einsum("bhtd,hdr->bhtr", rest, keys)), dim=-1)


def projected(module: nn.Module, output: Tensor, width: int) -> Tensor:
    """Outputs of heads [batch, time, num_heads, e] from sums of latents [batch, time, num_heads, rank].

    `width` is d, the channels of a key that are not shared.
    """
    _, values = _projections(module, output.transpose(1, 2), output.shape[-1], width)
    return torch.einsum("bthr,her->bthe", output, values)


def _projections(module: nn.Module, like: Tensor, rank: int, width: int) -> tuple[Tensor, Tensor]:
    """K [num_heads, d, rank] and V [num_heads, e, rank] for queries or outputs `like` [batch, num_heads, ...]."""
    up: Any = module.kv_b_proj
    plain = type(up) is nn.Linear  # neither quantized nor with an adapter
    weight = up.weight if plain else up(torch.eye(rank, dtype=like.dtype, device=like.device)).T
    of_heads = weight.to(like.dtype).unflatten(0, (like.shape[1], -1))
    return of_heads[:, :width], of_heads[:, width:]
