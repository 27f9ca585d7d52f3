"""Attention of one layer over its compressed cache: append, attend, flush."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcli.attention.forward import ForwardPass
from kvcli.cache.compressed import CompressedLayer
from kvcli.cache.stream import Stream
from kvcli.methods.base import EncodedPart, PartialAttend, PartialAttention
from kvcli.rope import Rotation
from kvcli.seam import exact_attention

AttendExact = Callable[[Tensor, Tensor, Tensor, Tensor | None, float, PartialAttention | None], Tensor]
"""Attention over exact tokens joined with that over codes, as `kvcli.attention.reference.attend_exact`."""


@dataclass(frozen=True)
class Forms:
    """How a session computes: attention over the codes, attention over the exact tokens, and rotation."""

    codes: PartialAttend
    exact: AttendExact
    rotate: Callable[[Rotation, Tensor], Tensor] = Rotation.apply


def attend_layer(layer: CompressedLayer, query: Tensor, now: ForwardPass, forms: Forms, scaling: float) -> Tensor:
    """Takes in the layer's pending keys and values and attends to everything the layer holds.

    A first prompt is attended to exactly, whatever is encoded of it afterwards. Later tokens see the codes of older
    tokens and, exactly, the sinks, the residual window and each other.

    Args:
        layer: holds the pending pre-RoPE keys and values.
        query: pre-RoPE, [batch, num_heads, query_len, head_dim].
        now: the forward pass.
        forms: how attention is computed.
        scaling: factor of the scores.

    Returns:
        [batch, query_len, num_heads, head_dim] in the query's dtype; 0 for padding.
    """
    step = now.step
    pending_key, pending_value = layer.take_pending()
    pre_rope_query = query
    query, new_key = forms.rotate(now.rotation, query), forms.rotate(now.rotation, pending_key)
    keys, values = layer.streams
    keys.append(new_key, step)
    values.append(pending_value, step)
    with torch.autocast(query.device.type, enabled=False):  # subspaces are found in float64
        keys.observe(pre_rope_query if layer.codec.key.query_space == "pre_rope" else query, new_key, step)
    if step.fresh:
        output = exact_attention(query, new_key, pending_value, now.mask, scaling)
    else:
        output = _attend_held(layer, query, now, forms, scaling)
    if step.real is not None:
        output = output.masked_fill(~step.real[:, :, None, None], 0)
    with torch.autocast(query.device.type, enabled=False):
        keys.flush(lambda x, rows, start: _to_codec_space(layer, x, rows, start, now))
        values.flush(lambda x, rows, start: x)
    return output


def _attend_held(layer: CompressedLayer, query: Tensor, now: ForwardPass, forms: Forms, scaling: float) -> Tensor:
    """Joins the attention over the exact tokens with that over the codes.

    The codes are those of whole groups whose keys and values are both encoded. Other encoded tokens (KIVI lets keys and
    values go at different times) are decoded and join the exact ones.
    """
    keys, values = layer.streams
    group = keys.codec.tokens_per_group
    coded = tuple(min(pair) // group * group for pair in zip(keys.encoded, values.encoded, strict=True))
    key, value = _exact_from(layer, keys, coded, now), _exact_from(layer, values, coded, now)
    visible = now.visible_exact(keys.sink_length, coded, key.shape[2])
    encoded = forms.codes(layer.codec, query, _encoded_part(layer, coded, now), scaling) if any(coded) else None
    return forms.exact(query, key, value, visible, scaling, encoded)


def _exact_from(layer: CompressedLayer, stream: Stream, coded: tuple[int, ...], now: ForwardPass) -> Tensor:
    """A row's sinks and all its tokens beyond the first `coded` after them, [batch, heads, longest, head_dim]."""
    assert stream.exact is not None
    exact = stream.exact[:, :, : max(stream.exact_lengths)]
    if tuple(stream.encoded) == coded:
        return exact
    first = stream.sink_length
    extra = [encoded - skipped for encoded, skipped in zip(stream.encoded, coded, strict=True)]
    start, stop = min(coded), max(stream.encoded)
    start -= start % stream.codec.tokens_per_group
    decoded = _decode(layer, stream, start, stop, exact.dtype, now)
    if len(set(zip(stream.encoded, coded, strict=True))) == 1:
        return torch.cat((exact[:, :, :first], decoded[:, :, coded[0] - start :], exact[:, :, first:]), dim=2)
    rows = []
    for row, length in enumerate(stream.exact_lengths):
        between = decoded[row, :, coded[row] - start : coded[row] - start + extra[row]]
        rows.append(torch.cat((exact[row, :, :first], between, exact[row, :, first:length]), dim=1))
    longest = max(row.shape[1] for row in rows)
    return torch.stack([torch.nn.functional.pad(row, (0, 0, 0, longest - row.shape[1])) for row in rows])


def _decode(
    layer: CompressedLayer, stream: Stream, start: int, stop: int, dtype: torch.dtype, now: ForwardPass
) -> Tensor:
    """Encoded tokens [start, stop) of every row, keys rotated: [batch, heads, stop - start, head_dim]."""
    assert stream.buffer.codes is not None
    codes = stream.buffer.codes.slice(start, stop)
    if stream is layer.values_stream or layer.codec.key.space == "post_rope":
        return stream.codec.decode_to(codes, stream.state, dtype)
    decoded = stream.codec.decode_to(codes, stream.state, torch.float32)
    return now.rotations(stream.sink_length + start, stream.sink_length + stop).apply(decoded).to(dtype)


def _encoded_part(layer: CompressedLayer, coded: tuple[int, ...], now: ForwardPass) -> EncodedPart:
    """The first `coded` tokens of each row after its sinks."""
    keys, values = layer.streams
    assert keys.buffer.codes is not None
    assert values.buffer.codes is not None
    length = max(coded)
    pre_rope = layer.codec.key.space == "pre_rope"
    return EncodedPart(
        key_codes=keys.buffer.codes.slice(0, length),
        key_state=keys.state,
        value_codes=values.buffer.codes.slice(0, length),
        rotations=now.encoded_rotations(keys.sink_length, coded) if pre_rope else None,
        lengths=now.lengths(coded),
    )


def _to_codec_space(layer: CompressedLayer, x: Tensor, rows: list[int], start: int, now: ForwardPass) -> Tensor:
    """Takes the rotation off keys [rows, heads, count, head_dim] whose codec works before RoPE."""
    if layer.codec.key.space == "post_rope":
        return x
    rotation = now.rotations(start, start + x.shape[2])
    return Rotation(rotation.cos[rows], rotation.sin[rows]).unapply(x.float())
