"""Attention of one layer over its compressed cache: append, attend, flush."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvcli.attention.reference import merge, partial_attention
from kvcli.cache.compressed import CompressedLayer
from kvcli.cache.timeline import Step
from kvcli.methods.base import EncodedPart, PartialAttend
from kvcli.rope import Rotation
from kvcli.seam import exact_attention

Rotations = Callable[[int, int], Rotation]
"""Rotation of tokens [start, stop) of every row of the batch, in float32."""


def attend_layer(
    layer: CompressedLayer,
    query: Tensor,
    step: Step,
    mask: Tensor | None,
    rotation: Rotation,
    rotations: Rotations,
    form: PartialAttend,
    scaling: float,
) -> Tensor:
    """Takes in the layer's pending keys and values and attends to everything the layer holds.

    A first prompt is attended to exactly, whatever is encoded of it afterwards. Later tokens see the codes of older
    tokens and, exactly, the sinks, the residual window and each other.

    Args:
        layer: holds the pending pre-RoPE keys and values.
        query: pre-RoPE, [batch, num_heads, query_len, head_dim].
        step: the new tokens.
        mask: the mask transformers made, checked already.
        rotation: rotation of the new slots, in the model's dtype.
        rotations: rotation of tokens held.
        form: attention over the encoded part.
        scaling: factor of the scores.

    Returns:
        [batch, query_len, num_heads, head_dim] in the query's dtype; 0 for padding.
    """
    pending_key, pending_value = layer.take_pending()
    query, new_key = rotation.apply(query), rotation.apply(pending_key)
    keys, values = layer.streams
    keys.append(new_key, step)
    values.append(pending_value, step)
    if step.fresh:
        output = exact_attention(query, new_key, pending_value, mask, scaling)
    else:
        output = _attend_held(layer, query, step, rotations, form, scaling)
    if step.real is not None:
        output = output.masked_fill(~step.real[:, :, None, None], 0)
    keys.flush(lambda x, rows, start: _to_codec_space(layer, x, rows, start, rotations))
    values.flush(lambda x, rows, start: x)
    return output


def _attend_held(
    layer: CompressedLayer, query: Tensor, step: Step, rotations: Rotations, form: PartialAttend, scaling: float
) -> Tensor:
    """Merges the attention over the exact tokens with that over the codes."""
    keys, values = layer.streams
    assert keys.exact is not None
    assert values.exact is not None
    length = max(keys.exact_lengths)
    out, lse = partial_attention(
        query, keys.exact[:, :, :length], values.exact[:, :, :length], _visible_exact(layer, step), scaling
    )
    if any(keys.encoded):
        out, lse = merge((out, lse), form(layer.codec, query, _encoded_part(layer, rotations), scaling))
    return out.to(query.dtype).transpose(1, 2).contiguous()


def _visible_exact(layer: CompressedLayer, step: Step) -> Tensor | None:
    """Which exact tokens each query sees, [batch, query_len, exact tokens]; None when all see all."""
    stream = layer.keys_stream
    if step.index.shape[1] == 1 and step.real is None and len(set(stream.exact_lengths)) == 1:
        return None
    device = step.index.device
    place = torch.arange(max(stream.exact_lengths), device=device)
    encoded = torch.tensor(stream.encoded, device=device).unsqueeze(1)
    token = torch.where(place < stream.sink_length, place, place + encoded)
    lengths = torch.tensor(stream.exact_lengths, device=device).unsqueeze(1)
    token = token.masked_fill(place >= lengths, torch.iinfo(torch.int64).max)
    return token.unsqueeze(1) <= step.index.unsqueeze(-1)


def _encoded_part(layer: CompressedLayer, rotations: Rotations) -> EncodedPart:
    keys, values = layer.streams
    assert keys.buffer.codes is not None
    assert values.buffer.codes is not None
    length = max(keys.encoded)
    visible = None
    if len(set(keys.encoded)) > 1:
        device = next(iter(keys.buffer.codes.tensors().values())).device
        visible = torch.arange(length, device=device) < torch.tensor(keys.encoded, device=device).unsqueeze(1)
    pre_rope = layer.codec.key.space == "pre_rope"
    return EncodedPart(
        keys.buffer.codes.slice(0, length),
        values.buffer.codes.slice(0, length),
        rotations(keys.sink_length, keys.sink_length + length) if pre_rope else None,
        visible,
    )


def _to_codec_space(layer: CompressedLayer, x: Tensor, rows: list[int], start: int, rotations: Rotations) -> Tensor:
    """Takes the rotation off keys [rows, heads, count, head_dim] whose codec works before RoPE."""
    if layer.codec.key.space == "post_rope":
        return x
    rotation = rotations(start, start + x.shape[2])
    return Rotation(rotation.cos[rows], rotation.sin[rows]).unapply(x.float())
