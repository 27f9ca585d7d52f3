"""Attention over window and codes in float32 and in PyTorch, for any codec: what the kernels are tested against.

Attention over a set of keys is kept as (out, lse), its output and the log-sum-exp of its scores, so that sets can be
attended to one after another and merged exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kvcli.cache.window import WindowTokens
from kvcli.methods.layer_codec import EncodedTokens, LayerCodec, PartialAttention
from kvcli.rope import Rotation

_BLOCK_TOKENS = 4096
_SCORE_ELEMENTS = 2**26
PREFILL_THRESHOLD = 64
"""From this query length on, attention takes longer than the memory traffic around it."""

_FEW_ROWS = 32
"""Queries of a kv head up to which codes are multiplied as they are stored; more share the work of decoding them."""


def partial_attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scaling: float, soft_cap: float | None = None
) -> PartialAttention:
    """softmax(q k^T * scaling) v with its log-sum-exp.

    Args:
        query: [batch, num_heads, query_len, head_dim].
        key, value: [batch, num_kv_heads, kv_len, head_dim], rotated like the query; keys that are narrower end with the
            values (`kvcli.seam.latent`).
        visible: None, or boolean [batch or 1, 1 or query_len, kv_len].
        soft_cap: scores s become soft_cap * tanh(s / soft_cap).
    """
    batch, num_heads, query_len, _ = query.shape
    kv_heads = key.shape[1]
    block = max(1, _SCORE_ELEMENTS // max(1, batch * num_heads * key.shape[2]))
    if key.shape[-1] < query.shape[-1]:
        key = torch.cat((key, value), dim=-1)
    key, value = key.float().transpose(-1, -2), value.float()
    parts = []
    for start in range(0, query_len, block):
        # query heads of a kv head are rows of one product: neither keys nor values are repeated
        rows = query[:, :, start : start + block].float().unflatten(1, (kv_heads, -1))
        scores = (rows.flatten(2, 3) @ key).unflatten(2, rows.shape[2:4]) * scaling
        shown = visible if visible is None or visible.shape[1] == 1 else visible[:, start : start + block]
        parts.append(_softmax_sum(scores, shown, soft_cap, partial(torch.matmul, other=value)))
    if len(parts) == 1:
        return parts[0]
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def _softmax_sum(
    scores: Tensor, visible: Tensor | None, soft_cap: float | None, weighted_sum: Callable[[Tensor], Tensor]
) -> PartialAttention:
    """As `partial_attention`, from scaled scores [batch, num_kv_heads, group, query_len, kv_len].

    `weighted_sum` takes weights [batch, num_kv_heads, rows, kv_len] to sums [batch, num_kv_heads, rows, head_dim].
    """
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    if visible is not None:
        scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    scores = scores.float()  # under autocast they are not
    highest = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.sum(-1, keepdim=True)
    highest = highest.clamp_min(torch.finfo(torch.float32).min)  # of -inf, where nothing is visible
    weights = (scores - highest).exp_()
    total = weights.sum(-1, keepdim=True)  # 1 or more, but 0 where nothing is visible
    out = weighted_sum(weights.flatten(2, 3)).unflatten(2, scores.shape[2:4]) / total.clamp_min(1.0)
    lse = (total.log_() + highest).squeeze(-1)
    return out.flatten(1, 2), lse.flatten(1, 2)


def merge_state(first: PartialAttention, second: PartialAttention) -> PartialAttention:
    """Attention over the union of two disjoint sets of keys."""
    return _merged(first, second), torch.logaddexp(first[1], second[1])


def _merged(first: PartialAttention, second: PartialAttention) -> Tensor:
    """The output of `merge_state`; the share of the first is NaN, and made 0, where neither has a visible key."""
    share = torch.sigmoid(first[1] - second[1]).nan_to_num_(0.0)
    return torch.lerp(second[0], first[0], share.unsqueeze(-1))


def rotate_and_append(
    rotation: Rotation,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_window: Tensor,
    value_window: Tensor,
    window: WindowTokens,
) -> Tensor:
    """Rotates new queries and keys, and writes keys and values to their slots of the window; padding is left out.

    Args:
        query: [batch, num_heads, query_len, head_dim].
        key, value: [batch, num_kv_heads, query_len, head_dim].
        key_window, value_window: [batch, num_kv_heads, capacity, head_dim], written.

    Returns:
        The rotated queries, in their dtype.
    """
    rotated = rotation.apply(query).to(query.dtype)
    window.write_new(key_window, rotation.apply(key))
    window.write_new(value_window, value)
    return rotated


def attend_window(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: WindowTokens,
    scaling: float,
    codes: PartialAttention | None,
    soft_cap: float | None = None,
) -> Tensor:
    """Attention of the new tokens over the window up to themselves, merged with that over the codes.

    Args:
        query: rotated, [batch, num_heads, query_len, head_dim].
        key, value: window buffers, [batch, num_kv_heads, capacity, head_dim], keys rotated.
        window: which tokens they hold, and which the queries are.
        scaling, soft_cap: as for `partial_attention`.

    Returns:
        [batch, query_len, num_heads, head_dim] in the query's dtype; 0 where a query sees nothing.
    """
    visible = window.visible(query.shape[2], query.device)
    part = partial_attention(query, window.read(key), window.read(value), visible, scaling, soft_cap)
    out = part[0] if codes is None else _merged(part, codes)
    return out.to(query.dtype).transpose(1, 2).contiguous()


def attend_codes(
    codec: LayerCodec, query: Tensor, encoded: EncodedTokens, scaling: float, soft_cap: float | None = None
) -> PartialAttention:
    """`partial_attention` over at least one token, block by block: few queries to codes as they are stored, more to
    decoded tokens.
    """
    length, state = encoded.length, None
    rows = query.float().unflatten(1, (codec.key.spec.num_kv_heads, -1))
    small = length <= _BLOCK_TOKENS
    for start, stop in [(0, length)] if small else codec.blocks(length, _BLOCK_TOKENS, encoded.page_size):
        rotation = None if encoded.rotations is None else encoded.rotations.tokens(start, stop)
        key_codes, value_codes = encoded.key_codes, encoded.value_codes
        if stop - start < length or encoded.pages is not None:
            key_codes, value_codes = encoded.codes(start, stop, masked=True)
        visible = encoded.visible(start, stop)
        visible = None if visible is None else visible[:, None]
        if rows.shape[2] * rows.shape[3] > _FEW_ROWS or codec.key.spec.latent:
            key = codec.decode_keys(key_codes, encoded.key_state, rotation, torch.float32)
            value = codec.value.decode(value_codes, None)
            part = partial_attention(query, key, value, visible, scaling, soft_cap)
        else:
            scores = codec.scores(rows.flatten(2, 3) * scaling, key_codes, encoded.key_state, rotation)
            scores, weighted_sum = scores.unflatten(2, rows.shape[2:4]), codec.value.weighted_sum
            part = _softmax_sum(scores, visible, soft_cap, partial(weighted_sum, codes=value_codes))
        state = part if state is None else merge_state(state, part)
    assert state is not None
    return state
