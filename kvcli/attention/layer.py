"""Attention of one layer over its compressed cache: append, attend, flush."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from kvcli.attention.exact import ExactTokens
from kvcli.attention.forward import ForwardPass
from kvcli.attention.side_stream import forked
from kvcli.cache.compressed import CompressedLayer
from kvcli.cache.ledger import Turn
from kvcli.cache.stream import Stream
from kvcli.methods.encoded import AttendCodes, EncodedTokens, PartialAttention
from kvcli.rope import Rotation
from kvcli.seam import exact_attention

_LONG = 512
"""New tokens from which keys and values are encoded side by side."""

AttendExact = Callable[[Tensor, ExactTokens, ExactTokens, Tensor | None, float, PartialAttention | None], Tensor]
"""Attention over exact tokens joined with that over codes, as `kvcli.attention.reference.attend_exact`."""

TakeIn = Callable[[Rotation, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Rotates queries, and keys into their place, beside the values, as `kvcli.attention.reference.take_in`."""

Unrotate = Callable[[Rotation, Tensor], Tensor]
"""As `kvcli.attention.reference.unrotate`."""


@dataclass(frozen=True)
class Forms:
    """How a session computes.

    Attributes:
        codes: attention over the codes.
        exact: attention over the exact tokens.
        take_in: what is done to new tokens.
        unrotate: takes the rotation off old keys, for codecs that work before RoPE.
    """

    codes: AttendCodes
    exact: AttendExact
    take_in: TakeIn
    unrotate: Unrotate


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
    keys, values = layer.streams
    new_key, new_value = keys.room(pending_key, step, step.keys), values.room(pending_value, step, step.values)
    query = forms.take_in(now.rotation, query, pending_key, pending_value, new_key, new_value)
    keys.took(new_key, step, step.keys)
    values.took(new_value, step, step.values)
    with _full_precision(query.device.type):
        keys.observe(pre_rope_query if layer.codec.key.query_space == "pre_rope" else query, new_key, step, step.keys)
    if step.fresh:
        mask = None if now.mask is None else now.mask[..., -query.shape[2] :]  # slots before hold padding only
        output = exact_attention(query, new_key, new_value, mask, scaling)
    else:
        output = _attend_held(layer, query, now, forms, scaling)
    if step.real is not None:
        output = output.masked_fill(~step.real[:, :, None, None], 0)
    with _full_precision(query.device.type):
        _flush(layer, now, forms, beside=query.shape[2] >= _LONG)
    now.timeline.layer_done()
    return output


def _flush(layer: CompressedLayer, now: ForwardPass, forms: Forms, *, beside: bool) -> None:
    """Encodes what the schedules let go of, values beside keys where there are many."""
    keys, values = layer.streams
    assert keys.exact is not None

    def to_codec_space(x: Tensor, rows: list[int], start: int) -> Tensor:
        """Takes the rotation off keys [rows, heads, count, head_dim] whose codec works before RoPE."""
        if layer.codec.key.space == "post_rope":
            return x
        rotation = now.rotations(start, start + x.shape[2])
        if len(rows) < len(now.step.before):
            rotation = Rotation(rotation.cos[rows], rotation.sin[rows])
        return forms.unrotate(rotation, x)

    with forked(keys.exact.device, enough=beside) as second:
        with second:
            value_codes = values.encode(now.step.values, lambda x, rows, start: x)
        key_codes = keys.encode(now.step.keys, to_codec_space)
    keys.store(now.step.keys, key_codes)
    values.store(now.step.values, value_codes)


def _full_precision(device_type: str) -> AbstractContextManager[Any]:
    """Codes do not depend on autocast, and subspaces are found in float64."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def _attend_held(layer: CompressedLayer, query: Tensor, now: ForwardPass, forms: Forms, scaling: float) -> Tensor:
    """Joins the attention over the exact tokens with that over the codes.

    The codes are those of whole groups whose keys and values are both encoded. Other encoded tokens (KIVI lets keys and
    values go at different times) are decoded and join the exact ones.
    """
    keys, values = layer.streams
    key, value = _exact_tokens(layer, keys, now.step.keys, now), _exact_tokens(layer, values, now.step.values, now)
    visible = now.visible_exact  # made before the chain of kernels begins that the exact tokens end
    encoded = forms.codes(layer.codec, query, _encoded_part(layer, now), scaling) if now.most_coded else None
    return forms.exact(query, key, value, visible, scaling, encoded)


def _exact_tokens(layer: CompressedLayer, stream: Stream, turn: Turn, now: ForwardPass) -> ExactTokens:
    """A row's sinks and all its tokens beyond the first `coded` after them."""
    assert stream.exact is not None
    found = ExactTokens(stream.exact, max(turn.exact), stream.sink_length, stream.layout.gap)
    if turn.encoded == now.coded:
        return found
    start, stop = min(now.coded), max(turn.encoded)
    decoded = _decode(layer, stream, start, stop, stream.exact.dtype, now)
    if now.alike:
        return replace(found, length=found.length + stop - start, decoded=decoded)
    first, exact, rows = stream.sink_length, found.joined(), []
    for row, (coded, encoded, length) in enumerate(zip(now.coded, turn.encoded, turn.exact, strict=True)):
        between = decoded[row, :, coded - start : encoded - start]
        rows.append(torch.cat((exact[row, :, :first], between, exact[row, :, first:length]), dim=1))
    longest = max(row.shape[1] for row in rows)
    return ExactTokens.of(torch.stack([nn.functional.pad(row, (0, 0, 0, longest - row.shape[1])) for row in rows]))


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


def _encoded_part(layer: CompressedLayer, now: ForwardPass) -> EncodedTokens:
    """The first `coded` tokens of each row after its sinks."""
    keys, values = layer.streams
    assert keys.buffer.codes is not None
    assert values.buffer.codes is not None
    return EncodedTokens(
        key_codes=keys.buffer.codes.slice(0, now.most_coded),
        key_state=keys.state,
        value_codes=values.buffer.codes.slice(0, now.most_coded),
        rotations=now.coded_rotations if layer.codec.key.space == "pre_rope" else None,
        lengths=now.coded_lengths,
    )
