"""A model's own attention functions, called with the masks of ours."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvcli.seam.sdpa import causal_mask


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
        query: rotated, [batch, num_heads, query_len, head_dim].
        key: rotated, [batch, num_kv_heads, kv_len, head_dim].
        value: like key.
        mask: None, or boolean [batch or 1, 1, query_len, kv_len].
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
