"""Full-precision attention over plain tensors that are rotated already: ours, and that of the model's own code."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Causal attention by PyTorch's SDPA.

    Args:
        query: [batch, num_heads, query_len, head_dim].
        key, value: [batch, num_kv_heads, kv_len, head_dim].
        mask: None, or boolean [batch, 1, query_len, kv_len], True where a query sees a key.

    Returns:
        [batch, query_len, num_heads, head_dim]; a query that sees no key gets 0.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and mask is not None:
        # with a mask, grouped-query SDPA falls back to the math kernel: repeating the heads is faster
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        groups = 1
    is_causal = mask is None and query.shape[2] > 1
    output = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scaling, is_causal=is_causal, enable_gqa=groups > 1
    )
    return output.transpose(1, 2).contiguous()


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """As `sdpa`, for scores that are capped or compete with logits of sinks, in float32.

    Args:
        query: [batch, num_heads, query_len, head_dim].
        key: [batch, num_kv_heads, kv_len, head_dim]; the queries are the last of its tokens.
        value: [batch, num_kv_heads, kv_len, value_dim].
        soft_cap: scores s become cap * tanh(s / cap).
        sinks: [num_heads], logits that take their share of every softmax and add nothing.

    Returns:
        [batch, query_len, num_heads, value_dim] in the query's dtype.
    """
    rows = query.float().unflatten(1, (key.shape[1], -1))
    scores = torch.einsum("bhgqd,bhkd->bhgqk", rows, key.float()) * scaling
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    visible = causal_mask(query.shape[2], key.shape[2], query.device) if mask is None else mask.unsqueeze(1)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        logits = sinks.float().view(1, key.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, logits), dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[2]].nan_to_num()
    output = torch.einsum("bhgqk,bhkd->bhgqd", weights, value.float()).flatten(1, 2)
    return output.to(query.dtype).transpose(1, 2).contiguous()


def causal_mask(query_len: int, kv_len: int, device: torch.device) -> Tensor:
    """Boolean [query_len, kv_len]: the last tokens see what is before them and themselves."""
    return torch.ones(query_len, kv_len, dtype=torch.bool, device=device).tril(kv_len - query_len)


def own_attention(
    module: nn.Module,
    implementation: str | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    **kwargs: Any,
) -> Any:
    """The function that an attention module would call without kvcli: SDPA, or its file's `eager_attention_forward`.

    Args:
        module: the attention module.
        implementation: the name that the model was loaded with; FlashAttention and the like are computed by SDPA.
        query: rotated, shaped like `key`, `value` and `mask` as for `sdpa`.
        kwargs: what the module passed besides.
    """
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    # SDPA knows neither of these two, and models that need them have no other function than their own
    special = kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None
    if eager is None or not (implementation == "eager" or special):
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **kwargs)
    if mask is None:
        mask = causal_mask(query.shape[2], key.shape[2], query.device)[None, None]
    added = torch.zeros(mask.shape, dtype=query.dtype, device=query.device)
    return eager(module, query, key, value, added.masked_fill(~mask, torch.finfo(query.dtype).min), **kwargs)
