"""Attention of one layer over its compressed cache: append, attend, flush."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kvcli.attention.backend import AttentionBackend
from kvcli.attention.reference import merge_state
from kvcli.cache.forward import CodeRun, Forward
from kvcli.cache.layer import LayerStore, NewTokens
from kvcli.cache.ranges import Note
from kvcli.kernels.streams import beside
from kvcli.methods.base import without_autocast
from kvcli.methods.layer_codec import EncodedTokens
from kvcli.seam.layer import AttentionCall
from kvcli.seam.sdpa import sdpa

_MIN_SIDE_STREAM_TOKENS = 512
"""Prompt length from which keys and values are encoded on two CUDA streams."""


def attend_layer(call: AttentionCall, backend: AttentionBackend) -> Tensor:
    """Appends the new keys and values, which are `call.key`, and attends to everything the layer holds.

    The first forward pass attends to its uncompressed keys and values; they are encoded afterwards. Later tokens see
    the codes of older tokens and, in full precision, the sinks, the residual window and each other.

    Returns:
        [batch, query_len, num_heads, value_dim] in the query's dtype; 0 at padding.
    """
    new: NewTokens = call.key
    query, mask = call.query, call.mask
    codec, passes = new.layer.codec, new.layer.passes
    forward = passes.forward(call.rotary, query, mask)
    rotation = forward.rotation if codec.rotated else forward.no_rotation
    if new.layer.store is None:
        new.layer.store = LayerStore(codec, new.key, new.value, forward.counts.layout)
    store = new.layer.store
    store.reserve(forward)
    # append
    rotated = backend.rotate_and_append(rotation, query, new.key, new.value, store.keys, store.values, forward.window)
    if store.state is not None and not forward.counts.all_coded:
        with without_autocast(query):
            if codec.sequence_offset:
                observed = new.key
            elif codec.offset is None:
                observed = forward.window.read_new(store.keys, query.shape[2])
            else:
                observed = rotation.apply(new.key - codec.offset)
            queries = query if codec.key.query_space == "pre_rope" else rotated
            store.observe(queries[..., : new.key.shape[3]], observed, forward)  # of latents, those of the shared key
    # attend
    if forward.counts.is_first and call.layer.is_plain:
        key, value = (forward.window.read_new(x, query.shape[2]) for x in (store.keys, store.values))
        new_mask = None if mask is None else mask[..., -query.shape[2] :]  # earlier slots are padding
        output = sdpa(rotated, *call.layer.expanded(key, value), new_mask, call.scaling)
    else:
        if call.layer.latent:
            rotated = call.layer.absorbed(rotated, store.keys, store.values)
        output = _attend_window_and_codes(store, rotated, forward, backend, call)
        if call.layer.latent:
            output = call.layer.projected(output, query, store.keys)
    if forward.real is not None:
        output = output.masked_fill(~forward.real[:, :, None, None], 0)
    # flush
    if forward.counts.flushes:
        with without_autocast(query):
            flush_layer(store, forward, backend, passes.layer, query.shape[2])
    passes.layer_done()
    return output


def _attend_window_and_codes(
    store: LayerStore, query: Tensor, forward: Forward, backend: AttentionBackend, call: AttentionCall
) -> Tensor:
    """Merges attention over the window with that over the codes of whole groups, keys and values both encoded.

    Many new tokens attend to each other apart from the older tokens of the window, which all of them see.
    """
    count, window, scaling = query.shape[2], forward.window, call.scaling
    codes, few = None, backend.decode_threshold < count < backend.prefill_threshold and call.sinks is None
    runs: Sequence[CodeRun] = ()
    if forward.counts.max_codes:
        runs = forward.code_runs(store.codec) if store.codec.needs_rotations else forward.code_run
    for run in runs:
        encoded = EncodedTokens(
            key_codes=store.key_codes.codes.slice(run.start, run.stop),
            key_state=store.state,
            value_codes=store.value_codes.codes.slice(run.start, run.stop),
            rotations=run.rotations,
            lengths=run.lengths,
        )
        if few and len(runs) == 1 and backend.dequantize_all is not None:
            decoded = backend.dequantize_all(store.codec, query, encoded)
            if decoded is not None:
                return backend.attend_window(query, store.keys, store.values, window, scaling, None, decoded=decoded)
        attend = backend.attend_codes if count <= backend.decode_threshold else backend.attend_dequantized
        part = attend(store.codec, query, encoded, scaling)
        codes = part if codes is None else merge_state(codes, part)
    if call.sinks is not None:  # keys of these logits, whose values are 0
        lse = call.sinks.float().view(1, -1, 1).expand(query.shape[:3]).clone(memory_format=torch.contiguous_format)
        sinks = torch.zeros(*query.shape[:3], store.values.shape[3], device=query.device), lse
        codes = sinks if codes is None else merge_state(codes, sinks)
    if count >= backend.prefill_threshold and backend.attend_prefill is not None and isinstance(window.index, int):
        key, value = (window.read_new(x, count) for x in (store.keys, store.values))
        codes = backend.attend_prefill(query, key, value, scaling, codes)
        window = replace(window, length=window.length - count, index=window.index - 1)
    return backend.attend_window(query, store.keys, store.values, window, scaling, codes)


def flush_layer(
    store: LayerStore, forward: Forward, backend: AttentionBackend, layer_idx: int, new_tokens: int
) -> None:
    """Encodes what a pass of so many new tokens does; values of long prompts on a CUDA stream of their own."""
    what, codec, device = f"layer {layer_idx}", store.codec, store.keys.device
    note_keys = Note(forward.ranges, f"{what}: keys", codec.key)
    note_values = Note(forward.ranges, f"{what}: values", codec.value)
    side = None if new_tokens < _MIN_SIDE_STREAM_TOKENS else device
    with beside(side, partial(store.encode_values, forward, note_values)):
        store.encode_keys(forward, backend.unrotate, note_keys)
    store.shrink(forward)
