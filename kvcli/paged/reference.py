"""Attention to the exact tokens of requests, and where these are kept, in PyTorch, for tests of `kvcli.paged.kernels`.

Sinks are [pages, sinks, 2, num_kv_heads, head_dim] and rings [rings, tokens, 2, num_kv_heads, head_dim], keys after
RoPE and values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.attention.reference import merge_state, partial_attention
from kvcli.methods.layer_codec import PartialAttention
from kvcli.paged.batch import Batch, UniformBatch
from kvcli.paged.pages import NewCodes


def attend(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, rings: Tensor, part: UniformBatch, recent: Tensor,
    state: PartialAttention, scaling: float, soft_cap: float | None, *, new: bool,
) -> None:  # fmt: skip
    """Writes attention of the new tokens of a part to its exact earlier tokens to `state`, then the new tokens to the
    rings.

    Args:
        query: of all new tokens, [tokens, num_heads, head_dim].
        key, value: the same of kv heads, in the dtype of the rings.
        recent: as of `Batch`.
        state: float32 [requests, num_heads, count, head_dim] and [requests, num_heads, count], written.
        soft_cap: as of `PagedAttention`.
        new: whether new tokens are attended to as well, each to those up to itself.
    """
    visible = part.visible(sinks.shape[1], rings.shape[1])
    full_precision = torch.cat((sinks[part.pages.table[:, 0].clamp_min(0)], rings[part.ring_slots]), 1)
    full_precision.masked_fill_(~visible[:, :, None, None, None], 0)  # what is not written yet may be NaN
    visible = visible.unsqueeze(1)
    if new:
        count = part.tokens.shape[1]
        both = torch.stack((part.of(key), part.of(value)), 2)
        full_precision = torch.cat((full_precision, both), 1)
        causal = torch.ones(count, count, dtype=torch.bool, device=query.device).tril()
        visible = torch.cat((visible.expand(-1, count, -1), causal.expand(len(visible), -1, -1)), 2)
    keys, values = full_precision.permute(2, 0, 3, 1, 4)
    found = partial_attention(part.of(query).transpose(1, 2), keys, values, visible, scaling, soft_cap)
    for x, y in zip(state, found, strict=True):
        x.copy_(y)
    tokens = part.tokens.flatten()
    _store(key[tokens], value[tokens], rings.flatten(0, 1), recent[:, tokens])


def merge(
    part: UniformBatch, exact: PartialAttention, others: PartialAttention | None, sink_logits: Tensor | None,
    output: Tensor,
) -> None:  # fmt: skip
    """Writes attention of the new tokens of a part, that to exact tokens merged with that to others.

    Args:
        exact: as `attend` wrote it; others: the same of other tokens.
        sink_logits: as of `PagedAttention`.
        output: [tokens, num_heads, head_dim], written.
    """
    out, lse = exact if others is None else merge_state(exact, others)
    if sink_logits is not None:
        out = out * torch.sigmoid(lse - sink_logits.float()[:, None]).unsqueeze(-1)
    output[part.tokens] = out.transpose(1, 2).to(output.dtype)


def prepare(key: Tensor, value: Tensor, sinks: Tensor, rings: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Copies rings, with tokens that follow, writes new sinks, and returns what is encoded, zeros for blank tokens.

    Args:
        key, value: of all new tokens, [tokens, num_kv_heads, head_dim].
        sinks, rings: of the layer, written.
        batch: says which ones.
    """
    source, copy, token, place = batch.ring_copies[:, batch.ring_copies[0] != batch.ring_copies[1]]
    if len(source):
        rings[copy] = rings[source]
        _store(key[token], value[token], rings.flatten(0, 1), place.where(token >= 0, -1).unsqueeze(0))
    _store(key, value, sinks, batch.sinks)
    if batch.stored is not None:
        key, value = key[batch.stored], value[batch.stored]
    if batch.is_blank is not None:
        key, value = (x.masked_fill(batch.is_blank[:, None, None], 0) for x in (key, value))
    return key, value


def put(pages: Tensor, *new: NewCodes) -> None:
    """Writes codes into pages uint8 [pages, bytes]."""
    for x in new:
        for field in x.layout.fields_of(x.codes, len(x.page)):
            heads, _, size = field.rows.shape
            stored = pages[:, field.start : field.start + heads * field.head_bytes].unflatten(1, (heads, -1, size))
            stored[x.page, :, x.place] = field.rows.transpose(0, 1)


def gather(key: Tensor, recent: Tensor, is_new: Tensor, token: Tensor) -> Tensor:
    """Keys of groups of tokens, [tokens, num_kv_heads, head_dim], those of the pass in the dtype of `recent`.

    Args:
        key: of all new tokens, [tokens, num_kv_heads, head_dim].
        recent: of all rings, [places, 2, num_kv_heads, head_dim].
        is_new, token: as of `Groups`.
    """
    old, new = (token.where(x, 0) for x in (~is_new, is_new))
    return key[new].to(recent.dtype).where(is_new[:, None, None], recent[old, 0])


def _store(key: Tensor, value: Tensor, stored: Tensor, places: Tensor) -> None:
    """Writes new tokens to their places.

    Args:
        key, value: [tokens, num_kv_heads, head_dim].
        stored: [..., 2, num_kv_heads, head_dim], written.
        places: int64 [axes, tokens], of each token that is stored; below 0 for others.
    """
    kept = (places[0] >= 0).nonzero().squeeze(1)
    stored[tuple(places[:, kept])] = torch.stack((key[kept], value[kept]), 1).to(stored.dtype)
