"""Contexts of documents side by side in one cache, and reading again what most depends on those before it.

A document that was read alone does not know the others. The tokens whose keys or values would differ most are read
again with all documents before them in sight (CacheBlend, arXiv 2405.16444), and their codes replaced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kvcli.cache.blocks import is_plain
from kvcli.cache.compressed import CompressedCache
from kvcli.cache.context import Context
from kvcli.cache.counts import Encoding
from kvcli.cache.identity import CacheIdentity
from kvcli.cache.joined import joined, obstacle
from kvcli.cache.ranges import Note, Ranges
from kvcli.cache.record import start_of
from kvcli.cache.snapshot import Snapshot
from kvcli.errors import CacheError, UsageError, error_text
from kvcli.methods.base import Codes
from kvcli.methods.layer_codec import LayerCodec
from kvcli.methods.method import Method
from kvcli.progress import Progress, no_progress
from kvcli.rope import NoRope, Rotation, unrotate
from kvcli.seam.decoder import backbone
from kvcli.seam.layer import AttendFunction, AttentionCall
from kvcli.seam.patch import Seam
from kvcli.seam.sdpa import plain_attention, sdpa

CHOSEN_BY_LAYER = 1
"""The layer of full attention whose keys and values say which tokens depend most on other documents."""


RUN = 8
"""Tokens that are read again together: those next to each other see each other in full precision."""


class Session(Protocol):
    """What is used of `kvcli.attention.session.Session`."""

    model: Any
    seam: Seam
    method: Method
    codecs: list[LayerCodec]

    def check_context(self, context: Context, expected: CacheIdentity | None = None) -> int: ...
    def identity(self) -> CacheIdentity: ...
    def load_cache(self, source: Context) -> CompressedCache: ...
    def new_cache(self) -> CompressedCache: ...
    def flush(self, cache: CompressedCache) -> None: ...


class Composed(NamedTuple):
    """Documents side by side.

    Attributes:
        cache: holds `input_ids`, int64 [1, time].
        reread: how many of these were read again.
    """

    cache: CompressedCache
    input_ids: Tensor
    reread: int


@torch.no_grad()
def compose(
    session: Session,
    contexts: Sequence[Context],
    repair: float,
    starts: Sequence[int] | None = None,
    chunk: int | None = None,
    progress: Progress = no_progress,
) -> Composed:
    """As `Session.compose`."""
    if len(contexts) != 1:
        check_composable(session)
    starts = [start_of(context.notes) for context in contexts] if starts is None else [*starts]
    if not contexts or len(starts) != len(contexts) or not 0 <= repair <= 1:
        raise UsageError(f"compose takes contexts, starts of all, and a share from 0 to 1, not {repair}")
    parts: list[Tensor] = []
    for context, start in zip(contexts, starts, strict=True):
        ids, length = context.input_ids, context.snapshot.counts.lengths[0]
        if ids is None or len(ids) > 1 or ids.shape[1] > length:
            raise UsageError(f"{context.name} is no single text without padding whose token ids are known")
        if not 0 <= start < length:
            raise UsageError(f"{context.name} has {length} tokens, and its document begins at {start}")
        parts.append(ids[:, start if parts else 0 :])
    ids = torch.cat(parts, dim=1).to(session.model.device)
    if len(contexts) == 1:
        return Composed(session.load_cache(contexts[0]), ids, 0)
    cache, first = session.new_cache(), contexts[0].snapshot.counts.lengths[0]
    try:
        identity = session.identity()
        snapshots = [_flushed(session, context, identity) for context in contexts]
        together = joined(snapshots, starts, session.codecs, session.seam.rope)
    except (KeyError, RuntimeError, ValueError) as error:  # tensors that no session has made
        raise CacheError(f"the contexts contradict themselves: {error_text(error)}") from error
    del snapshots
    cache.restore(together, release=True)
    count = round(repair * (ids.shape[1] - first))
    if count:
        again = most_changed(deviations(session, cache, ids)[first:], count) + first
        reread(session, cache, ids, again, chunk, progress)
        count = len(again)
    return Composed(cache, ids, count)


def _flushed(session: Session, context: Context, identity: CacheIdentity) -> Snapshot:
    """All tokens of a context after the sinks as codes, on the model's device; UsageError: positions that leave out."""
    session.check_context(context, identity)
    snapshot, counts = context.snapshot, context.snapshot.counts
    if not is_plain(snapshot):
        raise UsageError(f"{context.name} is of documents side by side already, or begins elsewhere")
    if counts.window[0] > counts.sinks:
        cache = session.load_cache(context)
        session.flush(cache)
        return cache.snapshot(None)
    return Snapshot(counts, {name: x.to(session.model.device) for name, x in snapshot.tensors.items()})


def check_composable(session: Session) -> None:
    """Raises UsageError where a document's keys and values are of its place in one text."""
    attention, spec = session.seam.attention, session.seam.attention.spec
    reason = next(filter(None, map(obstacle, session.codecs)), None)
    if reason is not None:
        reason = f"method '{session.method.name}' does not let them: {reason}"
    elif spec.other_layers:
        reason = "the model has layers that keep a state of the whole text, or its last tokens"
    elif isinstance(attention.rope, NoRope) or any(layer.own_rotation for layer in attention.layers):
        reason = "the model's positions are not understood as RoPE"
    elif attention.rope.switch is not None:
        reason = "the model rotates long texts differently"
    if reason is not None:
        raise UsageError(f"documents cannot stand side by side: {reason}")


class _Enough(Exception):
    """The layers that are needed were passed."""


@torch.no_grad()
def deviations(session: Session, cache: CompressedCache, ids: Tensor, layer_idx: int = CHOSEN_BY_LAYER) -> Tensor:
    """By how much the codes of each token would differ if all were read anew, float32 [time]; 0 of sinks.

    The squared error of what a layer's keys and values decode to, relative to its mean square, after a pass of the
    layers before it over all tokens `ids` int64 [1, time]. Errors of the codes themselves are in both.
    """
    layer_idx = min(layer_idx, len(session.codecs) - 1)
    codec, every, sinks = session.codecs[layer_idx], _code_rotation(cache), cache.sequences.counts.sink_length
    stored, errors = _decoded(cache, layer_idx, every, torch.float32), list[Tensor]()

    def attend(call: AttentionCall) -> Tensor:
        if call.layer.layer_idx < layer_idx:
            return replace(call, mask=None).exact()
        keys = call.rotation.apply(call.key).to(call.key.dtype)[:, :, sinks:]
        codes = _encoded(codec, keys, call.value[:, :, sinks:], every)
        decoded = _decode(codec, *codes, every, torch.float32)
        for new, old in zip(decoded, stored, strict=True):
            error = (new - old[:, :, sinks:]).square().sum((1, 3))
            errors.append(error / new.square().sum((1, 3)).mean())
        raise _Enough

    with _attending(session, attend), suppress(_Enough):
        _pass(session, cache, ids, torch.arange(ids.shape[1], device=ids.device))
    return torch.nn.functional.pad(torch.cat(errors).sum(0), (sinks, 0))


def most_changed(changed: Tensor, count: int) -> Tensor:
    """Indices, ascending, of runs of tokens that have changed most, of float32 [time]: `count` or a few more."""
    runs = torch.nn.functional.pad(changed, (0, -len(changed) % RUN)).view(-1, RUN).sum(1)
    first = runs.topk(-(-count // RUN)).indices.sort().values * RUN
    found = (first.unsqueeze(1) + torch.arange(RUN, device=changed.device)).flatten()
    return found[found < len(changed)]


@torch.no_grad()
def reread(
    session: Session,
    cache: CompressedCache,
    ids: Tensor,
    tokens: Tensor,
    chunk: int | None = None,
    progress: Progress = no_progress,
) -> None:
    """Reads some tokens of a cache again, which see all before them, and replaces their codes.

    Args:
        ids: of all tokens, int64 [1, time].
        tokens: indices of codes, int64 [count], ascending.
        chunk: tokens per pass; None: all.
    """
    ranges, every = Ranges(), _code_rotation(cache)
    with progress("read again", len(tokens), "tokens") as advance, cache.passes.complete_or_refused():
        for part in tokens.split(chunk or len(tokens)):
            attend = partial(_attend_again, cache, session.codecs, part, every, ranges)
            with _attending(session, attend):
                _pass(session, cache, ids[:, part], part)
            advance(len(part))
        ranges.check()


def _attend_again(
    cache: CompressedCache,
    codecs: Sequence[LayerCodec],
    tokens: Tensor,
    every: Rotation,
    ranges: Ranges,
    call: AttentionCall,
) -> Tensor:
    """Attention of tokens, whose codes are replaced, over all up to each: [1, count, num_heads, value_dim]."""
    layer_idx = call.layer.layer_idx
    store, codec = cache.compressed[layer_idx].store, codecs[layer_idx]
    query, keys = call.query, call.key
    if call.layer.rotated:
        query, keys = (call.rotation.apply(x).to(x.dtype) for x in (query, keys))
    exact, at = (keys, call.value), tokens - cache.sequences.counts.sink_length
    codes = _encoded(codec, keys, call.value, every.at(at))
    parts = ("keys", codec.key, store.key_codes), ("values", codec.value, store.value_codes)
    for (what, part, buffer), x, new in zip(parts, exact, codes, strict=True):
        Note(ranges, f"layer {layer_idx}: {what}", part)(Encoding([0], True, 0, len(at), 0), x, new)
        for name, y in new.tensors().items():
            by_bytes = torch.uint8 if y.itemsize == 1 else y.dtype  # indexing knows no 8-bit floats
            getattr(buffer.codes, name).view(by_bytes).index_copy_(2, at, y.view(by_bytes))
    stored = _decoded(cache, layer_idx, every, query.dtype)
    for x, new in zip(stored, exact, strict=True):  # as in any pass, new tokens see each other in full precision
        x.index_copy_(2, tokens, new.to(x.dtype))
    key, value = call.layer.expanded(*stored)
    visible = (torch.arange(key.shape[2], device=tokens.device) <= tokens.unsqueeze(1))[None, None]
    if call.layer.is_plain:
        return sdpa(query, key, value, visible, call.scaling)
    return plain_attention(query, key, value, visible, call.scaling, call.layer.soft_cap, call.sinks)


def _encoded(codec: LayerCodec, keys: Tensor, values: Tensor, rotation: Rotation) -> tuple[Codes, Codes]:
    """Codes of keys, after RoPE, and values; `rotation` is RoPE of their positions, float32."""
    rotation = rotation if codec.rotated else Rotation.none(rotation)
    keys = codec.encoder_input(keys, rotation, unrotate) if codec.needs_rotations else keys
    return codec.key.encode(keys, None), codec.value.encode(values, None)


def _decode(
    codec: LayerCodec, key_codes: Codes, value_codes: Codes, rotation: Rotation, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The inverse of `_encoded`."""
    rotation = rotation if codec.rotated else Rotation.none(rotation)
    return codec.decode_keys(key_codes, None, rotation, dtype), codec.value.decode_to(value_codes, None, dtype)


def _decoded(cache: CompressedCache, layer_idx: int, every: Rotation, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """All keys, after RoPE, and values of a layer, [1, num_kv_heads, time, width]; `every` is RoPE of its codes."""
    layer, counts = cache.compressed[layer_idx], cache.sequences.counts
    store, (count,) = layer.store, counts.attended
    key_codes, value_codes = (x.codes.slice(0, count) for x in (store.key_codes, store.value_codes))
    key, value = _decode(layer.codec, key_codes, value_codes, every, dtype)
    key_sinks, value_sinks = (x[:, :, : counts.sink_length].to(dtype) for x in (store.keys, store.values))
    return torch.cat((key_sinks, key), 2), torch.cat((value_sinks, value), 2)


def _code_rotation(cache: CompressedCache) -> Rotation:
    """RoPE of all tokens that are codes, float32."""
    sequences, (count,) = cache.sequences, cache.sequences.counts.attended
    first = sequences.counts.sink_length
    return sequences.rope.rotation(sequences.positions[:, first : first + count].long(), torch.float32)


@contextmanager
def _attending(session: Session, attend: AttendFunction) -> Iterator[None]:
    """Passes of this thread inside the block attend by another function; none of them has a cache."""
    session.seam.current.attend = attend
    try:
        yield
    finally:
        session.seam.current.attend = None


def _pass(session: Session, cache: CompressedCache, ids: Tensor, tokens: Tensor) -> Any:
    """A pass over tokens of a cache, which are at the positions it knows, without a cache of its own."""
    positions = cache.sequences.positions[:, tokens].long()
    # transformers takes a mask of four axes as it is; without one, it takes gaps between positions for other texts
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device)
    return backbone(session.model)(ids, position_ids=positions, attention_mask=mask, use_cache=False)
