"""Attention of one layer over its compressed cache: append, attend, flush."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kvcli.attention.backend import AttentionBackend
from kvcli.attention.side_stream import side_stream
from kvcli.cache.compressed import NewTokens
from kvcli.cache.counts import FlushPlan
from kvcli.cache.forward import Forward
from kvcli.cache.store import LayerStore
from kvcli.cache.window import WindowTokens
from kvcli.methods.encoded import EncodedTokens
from kvcli.methods.layer_codec import LayerCodec
from kvcli.seam.patch import RotaryOutput
from kvcli.seam.sdpa import sdpa

_MIN_SIDE_STREAM_TOKENS = 512
"""Prompt length from which keys and values are encoded on two CUDA streams."""


def attend_layer(
    new: NewTokens, query: Tensor, mask: Tensor | None, rotary: RotaryOutput, backend: AttentionBackend, scaling: float
) -> Tensor:
    """Appends the new keys and values and attends to everything the layer holds.

    The first forward pass attends to its uncompressed keys and values; they are encoded afterwards. Later tokens see
    the codes of older tokens and, in full precision, the sinks, the residual window and each other.

    Args:
        new: pre-RoPE keys and values, and the cache's layer.
        query: pre-RoPE, [batch, num_heads, query_len, head_dim].
        mask: None, or boolean [batch or 1, 1, query_len, slots], made by transformers.
        rotary: positions and RoPE of the new tokens.
        backend: how attention is computed.
        scaling: factor of the scores.

    Returns:
        [batch, query_len, num_heads, head_dim] in the query's dtype; 0 at padding.
    """
    codec, forward = new.layer.codec, new.layer.sequences.forward(rotary, query, mask)
    keys, values = new.layer.stores or new.layer.make_stores(new, forward)
    keys.reserve(forward.keys)
    values.reserve(forward.values)
    # append
    if forward.ragged:
        key, value = new.key.new_empty(new.key.shape), new.value.new_empty(new.value.shape)
    else:
        key, value = keys.next_slots(forward.keys, query.shape[2]), values.next_slots(forward.values, query.shape[2])
    rotated = backend.rotate_and_append(forward.rotation, query, new.key, new.value, key, value)
    if forward.ragged:
        keys.append(key, forward.keys, forward)
        values.append(value, forward.values, forward)
    if keys.state is not None:
        with _without_autocast(query):
            observed = key if codec.offset is None else forward.rotation.apply(new.key - codec.offset)
            keys.observe(query if codec.key.query_space == "pre_rope" else rotated, observed, forward.keys, forward)
    # attend
    if forward.is_first:
        new_mask = None if mask is None else mask[..., -query.shape[2] :]  # earlier slots are padding
        output = sdpa(rotated, key, value, new_mask, scaling)
    else:
        output = _attend_window_and_codes(codec, keys, values, (rotated, key, value), forward, backend, scaling)
    if forward.real is not None:
        output = output.masked_fill(~forward.real[:, :, None, None], 0)
    # flush
    if forward.flushes:
        with _without_autocast(query):
            _flush(codec, keys, values, forward, backend, query)
    forward.sequences.layer_done()
    return output


def _attend_window_and_codes(
    codec: LayerCodec,
    keys: LayerStore,
    values: LayerStore,
    new: tuple[Tensor, Tensor, Tensor],
    forward: Forward,
    backend: AttentionBackend,
    scaling: float,
) -> Tensor:
    """Merges attention over the window with that over the codes.

    The codes are those of whole groups whose keys and values are both encoded. Other encoded tokens (KIVI encodes keys
    and values at different times) are decoded and join the window. `new` are query, key and value of the new tokens,
    rotated; many of them attend to each other apart from the older tokens of the window, which all of them see.
    """
    query, new_key, new_value = new
    attend_new = backend.attend_new if query.shape[2] > backend.max_queries and forward.new_tokens_last else None
    key, value = keys.window_tokens(forward.keys), values.window_tokens(forward.values)
    if forward.keys.coded != forward.attended_codes:
        key = _with_decoded(codec, keys, key, forward.keys, forward)
    if forward.values.coded != forward.attended_codes:
        value = _with_decoded(codec, values, value, forward.values, forward)
    # before attend_codes: no other kernel may come between it and attend_window, which ends its PDL chain
    visible = forward.visible_window if attend_new is None else None
    codes = None
    if forward.max_codes:
        encoded = EncodedTokens(
            key_codes=keys.codes.codes.slice(0, forward.max_codes),
            key_state=keys.state,
            value_codes=values.codes.codes.slice(0, forward.max_codes),
            rotations=forward.code_rotations if codec.needs_rotations else None,
            lengths=forward.code_lengths,
        )
        attend = backend.attend_codes if query.shape[2] <= backend.max_queries else backend.attend_decoded
        codes = attend(codec, query, encoded, scaling)
    if attend_new is not None:
        codes = attend_new(query, new_key, new_value, scaling, codes)
        key, value = (replace(window, length=window.length - query.shape[2]) for window in (key, value))
    return backend.attend_window(query, key, value, visible, scaling, codes)


def _with_decoded(
    codec: LayerCodec, store: LayerStore, window: WindowTokens, plan: FlushPlan, forward: Forward
) -> WindowTokens:
    """A window with the encoded tokens of each row that are not attended to as codes."""
    start = min(forward.attended_codes)
    decoded = _decode(codec, store, start, max(plan.coded), forward)
    if forward.uniform:
        return replace(window, length=window.length + decoded.shape[2], decoded=decoded)
    first, joined, rows = store.sink_length, window.joined(), []
    for row, (codes, coded, length) in enumerate(zip(forward.attended_codes, plan.coded, plan.window, strict=True)):
        between = decoded[row, :, codes - start : coded - start]
        rows.append(torch.cat((joined[row, :, :first], between, joined[row, :, first:length]), dim=1))
    longest = max(row.shape[1] for row in rows)
    return WindowTokens.of(torch.stack([nn.functional.pad(row, (0, 0, 0, longest - row.shape[1])) for row in rows]))


def _decode(codec: LayerCodec, store: LayerStore, start: int, stop: int, forward: Forward) -> Tensor:
    """Encoded tokens [start, stop) of every row, keys rotated: [batch, heads, stop - start, head_dim]."""
    codes, dtype = store.codes.codes.slice(start, stop), store.window.dtype
    if store.codec is codec.value:
        return codec.value.decode_to(codes, None, dtype)
    rotation = forward.decoded_rotation if codec.needs_rotations else None
    return codec.decode_keys(codes, store.state, rotation, dtype)


def _flush(
    codec: LayerCodec, keys: LayerStore, values: LayerStore, forward: Forward, backend: AttentionBackend, query: Tensor
) -> None:
    """Encodes what the schedules flush, keys and values of long prompts on two streams."""
    layer = f"layer {forward.sequences.layer}"
    note_keys = forward.ranges.of(f"{layer}: keys", codec.key)
    note_values = forward.ranges.of(f"{layer}: values", codec.value)
    with side_stream(query.device, enabled=query.shape[2] >= _MIN_SIDE_STREAM_TOKENS) as side:
        with side:
            values.encode(forward.values, note=note_values)
        if codec.needs_rotations:
            rotations = forward.flush_rotations
            keys.encode(
                forward.keys, lambda i, x: codec.encoder_input(x, rotations[i], backend.unrotate), note=note_keys
            )
        else:
            keys.encode(forward.keys, note=note_keys)
    keys.evict(forward.keys)
    values.evict(forward.values)


def _without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Disables autocast, so that codes and subspaces do not depend on it."""
    device_type = x.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()
