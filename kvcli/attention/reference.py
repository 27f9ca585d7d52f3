"""Attention over window and codes in float32, for any codec: what the kernels are tested against.

Attention over a set of keys is kept as (out, lse), its output and the log-sum-exp of its scores, so that sets can be
attended to one after another and merged exactly.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from kvcli.cache.window import WindowTokens
from kvcli.methods.base import LayerCodec
from kvcli.methods.encoded import EncodedTokens, PartialAttention
from kvcli.rope import Rotation

_BLOCK_TOKENS = 4096
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
    key, value = key.float().transpose(-1, -2), value.float()
    outs, lses = [], []
    for start in range(0, query_len, block):
        # the query heads of a kv head are rows of one product: neither keys nor values are repeated
        rows = query[:, :, start : start + block].float().unflatten(1, (kv_heads, -1))
        scores = (rows.flatten(2, 3) @ key).unflatten(2, rows.shape[2:4]) * scaling
        if visible is not None:
            shown = visible if visible.shape[1] == 1 else visible[:, start : start + block]
            scores = scores.masked_fill(~shown[:, None, None], float("-inf"))
        lse = scores.logsumexp(-1)
        weights = torch.exp(scores - torch.where(lse.isneginf(), 0.0, lse).unsqueeze(-1))
        outs.append((weights.flatten(2, 3) @ value).unflatten(2, rows.shape[2:4]).flatten(1, 2))
        lses.append(lse.flatten(1, 2))
    if len(outs) == 1:
        return outs[0], lses[0]
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def merge_state(first: PartialAttention, second: PartialAttention) -> PartialAttention:
    """Attention over the union of two disjoint sets of keys."""
    lse = torch.logaddexp(first[1], second[1])
    safe = torch.where(lse.isneginf(), 0.0, lse)
    shares = [torch.exp(part - safe).unsqueeze(-1) for _, part in (first, second)]
    return torch.addcmul(first[0] * shares[0], second[0], shares[1]), lse


def rotate_and_append(
    rotation: Rotation, query: Tensor, key: Tensor, value: Tensor, key_out: Tensor, value_out: Tensor
) -> Tensor:
    """Rotates new queries and keys, and writes keys and values to their slots.

    Args:
        rotation: RoPE of the new tokens.
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
    """Inverse RoPE of keys.

    Args:
        rotation: RoPE of the tokens, float32.
        x: [batch, num_kv_heads, time, head_dim], rotated.

    Returns:
        float32, shaped like x.
    """
    return rotation.unapply(x.float())


def attend_window(
    query: Tensor,
    key: WindowTokens,
    value: WindowTokens,
    visible: Tensor | None,
    scaling: float,
    codes: PartialAttention | None,
) -> Tensor:
    """Attention over window tokens, merged with that over the codes.

    Args:
        query: rotated, [batch, num_heads, query_len, head_dim].
        key: rotated.
        value: as many tokens.
        visible: None, or boolean [batch, 1 or query_len, kv_len].
        scaling: factor of the scores.
        codes: (out, lse) over the codes, if there are any.

    Returns:
        [batch, query_len, num_heads, head_dim] in the query's dtype; 0 where a query sees nothing.
    """
    window = partial_attention(query, key.joined(), value.joined(), visible, scaling)
    out = window[0] if codes is None else merge_state(window, codes)[0]
    return out.to(query.dtype).transpose(1, 2).contiguous()


def attend_codes(codec: LayerCodec, query: Tensor, encoded: EncodedTokens, scaling: float) -> PartialAttention:
    """Decodes the tokens block by block, rotates the keys where the codec works before RoPE, and attends.

    Args:
        codec: the layer's codecs.
        query: rotated, [batch, num_heads, query_len, head_dim].
        encoded: at least one token.
        scaling: factor of the scores.

    Returns:
        (out, lse), float32 [batch, num_heads, query_len, head_dim] and [batch, num_heads, query_len].
    """
    blocks = codec.blocks(encoded.length, _BLOCK_TOKENS)
    return reduce(merge_state, (_attend_block(codec, query, encoded, scaling, *block) for block in blocks))


def _attend_block(
    codec: LayerCodec, query: Tensor, encoded: EncodedTokens, scaling: float, start: int, stop: int
) -> PartialAttention:
    """Attention over the decoded tokens [start, stop)."""
    rotation = None if encoded.rotations is None else encoded.rotations.tokens(start, stop)
    key = codec.decode_keys(encoded.key_codes.slice(start, stop), encoded.key_state, rotation, torch.float32)
    value = codec.value.decode(encoded.value_codes.slice(start, stop), None)
    visible = encoded.visible(start, stop)
    return partial_attention(query, key, value, None if visible is None else visible[:, None], scaling)
