"""Partial attention in float32, for any codec: the ground truth that faster forms are tested against.

Attention over a set of keys is kept as (out, lse), its output and the log-sum-exp of its scores, so that sets can be
attended to one after another and merged exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.attention.exact import ExactTokens
from kvcli.methods.base import LayerCodec
from kvcli.methods.encoded import EncodedTokens, PartialAttention
from kvcli.rope import Rotation

_TOKEN_BLOCK = 4096
_SCORE_ELEMENTS = 2**26


def partial_attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scaling: float
) -> PartialAttention:
    """softmax(q k^T * scaling) v with its log-sum-exp.

    Args:
        query: [batch, num_heads, query_len, head_dim].
        key: [batch, num_kv_heads, kv_len, head_dim], rotated like the query.
        value: like key.
        visible: None, or boolean [batch, 1 or query_len, kv_len].
        scaling: factor of the scores.

    Returns:
        out: float32 [batch, num_heads, query_len, head_dim]; 0 where a query sees no key.
        lse: float32 [batch, num_heads, query_len]; -inf there.
    """
    batch, num_heads, query_len, _ = query.shape
    kv_heads = key.shape[1]
    block = max(1, _SCORE_ELEMENTS // max(1, batch * num_heads * key.shape[2]))
    key, value = key.float().unsqueeze(2), value.float().unsqueeze(2)
    outs, lses = [], []
    for start in range(0, query_len, block):
        rows = query[:, :, start : start + block].float().unflatten(1, (kv_heads, -1))
        scores = rows @ key.transpose(-1, -2) * scaling
        if visible is not None:
            shown = visible if visible.shape[1] == 1 else visible[:, start : start + block]
            scores = scores.masked_fill(~shown[:, None, None], float("-inf"))
        lse = scores.logsumexp(-1)
        weights = torch.exp(scores - torch.where(lse.isneginf(), 0.0, lse).unsqueeze(-1))
        outs.append((weights @ value).flatten(1, 2))
        lses.append(lse.flatten(1, 2))
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def merge_state(first: PartialAttention, second: PartialAttention) -> PartialAttention:
    """Attention over the union of two disjoint sets of keys."""
    lse = torch.logaddexp(first[1], second[1])
    safe = torch.where(lse.isneginf(), 0.0, lse)
    shares = [torch.exp(part - safe).unsqueeze(-1) for _, part in (first, second)]
    return torch.addcmul(first[0] * shares[0], second[0], shares[1]), lse


def take_in(
    rotation: Rotation, query: Tensor, key: Tensor, value: Tensor, key_out: Tensor, value_out: Tensor
) -> Tensor:
    """Rotates new queries and keys, and puts keys and values where they are kept.

    Args:
        rotation: of the new tokens.
        query: [batch, num_heads, query_len, head_dim].
        key: [batch, num_kv_heads, query_len, head_dim].
        value: like key.
        key_out: like key, written.
        value_out: like key, written.

    Returns:
        The rotated queries, in their dtype.
    """
    key_out.copy_(rotation.apply(key))
    value_out.copy_(value)
    return rotation.apply(query).to(query.dtype)


def unrotate(rotation: Rotation, x: Tensor) -> Tensor:
    """Takes the rotation off keys.

    Args:
        rotation: of the tokens, float32.
        x: [batch, num_kv_heads, time, head_dim], rotated.

    Returns:
        float32, shaped like x.
    """
    return rotation.unapply(x.float())


def attend_exact(
    query: Tensor,
    key: ExactTokens,
    value: ExactTokens,
    visible: Tensor | None,
    scaling: float,
    encoded: PartialAttention | None,
) -> Tensor:
    """Attention over exact tokens, joined with that over the encoded ones.

    Args:
        query: rotated, [batch, num_heads, query_len, head_dim].
        key: rotated.
        value: as many tokens.
        visible: None, or boolean [batch, 1 or query_len, kv_len].
        scaling: factor of the scores.
        encoded: (out, lse) over the encoded part.

    Returns:
        [batch, query_len, num_heads, head_dim] in the query's dtype; 0 where a query sees nothing.
    """
    found = partial_attention(query, key.joined(), value.joined(), visible, scaling)
    out = found[0] if encoded is None else merge_state(found, encoded)[0]
    return out.to(query.dtype).transpose(1, 2).contiguous()


def reference_attend(codec: LayerCodec, query: Tensor, part: EncodedTokens, scaling: float) -> PartialAttention:
    """Decodes the tokens block by block, rotates the keys where the codec works before RoPE, and attends.

    Args:
        codec: the layer's codecs.
        query: rotated, [batch, num_heads, query_len, head_dim].
        part: the encoded tokens.
        scaling: factor of the scores.
    """
    total: PartialAttention | None = None
    for start, stop in codec.blocks(part.length, _TOKEN_BLOCK):
        key = codec.key.decode(part.key_codes.slice(start, stop), part.key_state)
        if part.rotations is not None:
            key = part.rotations.tokens(start, stop).apply(key)
        value = codec.value.decode(part.value_codes.slice(start, stop), None)
        visible = part.visible(start, stop)
        block = partial_attention(query, key, value, None if visible is None else visible[:, None], scaling)
        total = block if total is None else merge_state(total, block)
    assert total is not None
    return total
