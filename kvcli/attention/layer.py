"""Attention of one layer over its compressed cache: append, attend, flush."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvcli.attention.reference import merge, partial_attention
from kvcli.cache.compressed import CompressedLayer
from kvcli.cache.stream import Stream
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
    pre_rope_query = query
    query, new_key = rotation.apply(query), rotation.apply(pending_key)
    keys, values = layer.streams
    keys.append(new_key, step)
    values.append(pending_value, step)
    with torch.autocast(query.device.type, enabled=False):  # subspaces are found in float64
        keys.observe(pre_rope_query if layer.codec.key.query_space == "pre_rope" else query, new_key, step)
    if step.fresh:
        output = exact_attention(query, new_key, pending_value, mask, scaling)
    else:
        output = _attend_held(layer, query, step, rotations, form, scaling)
    if step.real is not None:
        output = output.masked_fill(~step.real[:, :, None, None], 0)
    with torch.autocast(query.device.type, enabled=False):
        keys.flush(lambda x, rows, start: _to_codec_space(layer, x, rows, start, rotations))
        values.flush(lambda x, rows, start: x)
    return output


def _attend_held(
    layer: CompressedLayer, query: Tensor, step: Step, rotations: Rotations, form: PartialAttend, scaling: float
) -> Tensor:
    """Merges the attention over the exact tokens with that over the codes.

    The codes are those of whole groups whose keys and values are both encoded. Other encoded tokens (KIVI lets keys and
    values go at different times) are decoded and join the exact ones.
    """
    keys, values = layer.streams
    group = keys.codec.tokens_per_group
    coded = [min(pair) // group * group for pair in zip(keys.encoded, values.encoded, strict=True)]
    key, value = _exact_from(layer, keys, coded, rotations), _exact_from(layer, values, coded, rotations)
    visible = _visible_exact(keys.sink_length, coded, layer.timeline.lengths, step, key.shape[2])
    out, lse = partial_attention(query, key, value, visible, scaling)
    if any(coded):
        out, lse = merge((out, lse), form(layer.codec, query, _encoded_part(layer, coded, rotations), scaling))
    return out.to(query.dtype).transpose(1, 2).contiguous()


def _exact_from(layer: CompressedLayer, stream: Stream, coded: list[int], rotations: Rotations) -> Tensor:
    """A row's sinks and all its tokens beyond the first `coded` after them, [batch, heads, longest, head_dim]."""
    assert stream.exact is not None
    exact = stream.exact[:, :, : max(stream.exact_lengths)]
    if stream.encoded == coded:
        return exact
    first = stream.sink_length
    extra = [encoded - skipped for encoded, skipped in zip(stream.encoded, coded, strict=True)]
    start, stop = min(coded), max(stream.encoded)
    start -= start % stream.codec.tokens_per_group
    decoded = _decode(layer, stream, start, stop, rotations).to(exact.dtype)
    if len(set(zip(stream.encoded, coded, strict=True))) == 1:
        return torch.cat((exact[:, :, :first], decoded[:, :, coded[0] - start :], exact[:, :, first:]), dim=2)
    rows = []
    for row, length in enumerate(stream.exact_lengths):
        between = decoded[row, :, coded[row] - start : coded[row] - start + extra[row]]
        rows.append(torch.cat((exact[row, :, :first], between, exact[row, :, first:length]), dim=1))
    longest = max(row.shape[1] for row in rows)
    return torch.stack([torch.nn.functional.pad(row, (0, 0, 0, longest - row.shape[1])) for row in rows])


def _decode(layer: CompressedLayer, stream: Stream, start: int, stop: int, rotations: Rotations) -> Tensor:
    """Encoded tokens [start, stop) of every row, keys rotated: float32 [batch, heads, stop - start, head_dim]."""
    assert stream.buffer.codes is not None
    decoded: Tensor = stream.codec.decode(stream.buffer.codes.slice(start, stop), stream.state)
    if stream is layer.keys_stream and layer.codec.key.space == "pre_rope":
        decoded = rotations(stream.sink_length + start, stream.sink_length + stop).apply(decoded)
    return decoded


def _visible_exact(sink_length: int, coded: list[int], lengths: list[int], step: Step, width: int) -> Tensor | None:
    """Which exact tokens each query sees, [batch, query_len, width]; None when all see all."""
    if step.index.shape[1] == 1 and step.real is None and len(set(zip(coded, lengths, strict=True))) == 1:
        return None
    device = step.index.device
    place = torch.arange(width, device=device)
    skipped = torch.tensor(coded, device=device).unsqueeze(1)
    token = torch.where(place < sink_length, place, place + skipped)
    token = token.masked_fill(token >= torch.tensor(lengths, device=device).unsqueeze(1), torch.iinfo(torch.int64).max)
    return token.unsqueeze(1) <= step.index.unsqueeze(-1)


def _encoded_part(layer: CompressedLayer, coded: list[int], rotations: Rotations) -> EncodedPart:
    """The first `coded` tokens of each row after its sinks."""
    keys, values = layer.streams
    assert keys.buffer.codes is not None
    assert values.buffer.codes is not None
    length = max(coded)
    visible = None
    if min(coded) < length:
        device = keys.buffer.device
        visible = torch.arange(length, device=device) < torch.tensor(coded, device=device).unsqueeze(1)
    pre_rope = layer.codec.key.space == "pre_rope"
    return EncodedPart(
        key_codes=keys.buffer.codes.slice(0, length),
        key_state=keys.state,
        value_codes=values.buffer.codes.slice(0, length),
        rotation=rotations(keys.sink_length, keys.sink_length + length) if pre_rope else None,
        visible=visible,
    )


def _to_codec_space(layer: CompressedLayer, x: Tensor, rows: list[int], start: int, rotations: Rotations) -> Tensor:
    """Takes the rotation off keys [rows, heads, count, head_dim] whose codec works before RoPE."""
    if layer.codec.key.space == "post_rope":
        return x
    rotation = rotations(start, start + x.shape[2])
    return Rotation(rotation.cos[rows], rotation.sin[rows]).unapply(x.float())
