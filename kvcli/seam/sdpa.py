"""Full-precision attention by PyTorch's SDPA."""

from __future__ import annotations

from torch import Tensor, nn


def sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
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
