"""Taking a snapshot of a cache's sequences and stores, and filling empty ones from it: where tensors lie in a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from kvcli.cache.counts import row_values
from kvcli.cache.layer import HEADROOM, CodeBuffer, LayerStore
from kvcli.cache.record import CODES, POSITIONS, VALID, WINDOWS, Counts, SnapshotCounts
from kvcli.cache.sequences import Sequences
from kvcli.cache.snapshot import Snapshot
from kvcli.cache.window import WindowLayout, ordinary_tensors, read_slots, write_slots
from kvcli.errors import CacheError
from kvcli.methods.layer_codec import LayerCodec


@torch.no_grad()
@ordinary_tensors
def take(sequences: Sequences, stores: Sequence[LayerStore], device: torch.device | str | None) -> Snapshot:
    """Copies the content of a cache, of one token or more, to a device; None: what lies in order is not copied."""
    ours = sequences.counts
    counts = SnapshotCounts(
        lengths=ours.lengths,
        coded_keys=ours.keys.coded,
        coded_values=ours.values.coded,
        observed=tuple(sequences.observed),
        sinks=ours.sink_length,
        ring=ours.layout.ring,
        key_group=ours.keys.tokens_per_group,
        value_group=ours.values.tokens_per_group,
        tokens_per_entry={
            f"layers.{i}.{kind}.{field}": tokens
            for i, store in enumerate(stores)
            for kind in CODES
            for field, tokens in getattr(store, kind).tokens_per_entry.items()
        },
    )
    tensors: dict[str, Tensor] = {}
    for i, store in enumerate(stores):
        records = zip((*CODES, "state"), (store.key_codes.codes, store.value_codes.codes, store.state), strict=True)
        parts = {f"{kind}.{field}": x for kind, fields in records if fields for field, x in fields.tensors().items()}
        slots = store.layout.slots(
            store.layout.window_tokens(row_values(counts.attended, store.keys.device), max(counts.window))
        )
        for name, x in (parts | {kind: read_slots(getattr(store, kind), slots) for kind in WINDOWS}).items():
            used = counts.used(full_name := f"layers.{i}.{name}")
            tensors[full_name] = _copied(x if used is None else x[:, :, : max(used)], used, device)
    tensors[VALID] = _copied(sequences.valid, None, device)
    lengths = row_values(counts.lengths, sequences.positions.device)
    positions = sequences.positions[:, : max(counts.lengths)]
    real = torch.arange(positions.shape[1], device=lengths.device) < lengths.unsqueeze(1)
    tensors[POSITIONS] = _copied(positions * real, None, device)
    return Snapshot(counts, tensors)


@torch.no_grad()
@ordinary_tensors
def put(
    snapshot: Snapshot, sequences: Sequences, codecs: Sequence[LayerCodec], device: torch.device, release: bool = False
) -> list[LayerStore]:
    """Fills empty sequences, and stores that are made here, one per layer.

    The snapshot's tensors are checked, and copied to the device one by one; with `release`, it loses each then.

    Raises:
        CacheError: a snapshot that these codecs cannot have made.
    """
    stored, counts = snapshot.counts, sequences.counts
    tensors = snapshot.tensors if release else dict(snapshot.tensors)
    valid, positions = tensors.pop(VALID, None), tensors.pop(POSITIONS, None)
    if valid is None or valid.dtype != torch.bool or valid.ndim != 2 or valid.sum(1).tolist() != [*stored.lengths]:
        raise CacheError("the snapshot's padding marks do not agree with its numbers of tokens")
    shape = (len(stored.lengths), max(stored.lengths))
    if positions is None or positions.dtype != torch.int32 or positions.shape != shape:
        raise CacheError("the snapshot's positions do not agree with its numbers of tokens")
    if stored.sinks != counts.sink_length:
        raise CacheError(f"the snapshot was made with sink_length {stored.sinks}, this cache has {counts.sink_length}")
    ours = counts.keys.tokens_per_group, counts.values.tokens_per_group
    if (theirs := (stored.key_group, stored.value_group)) != ours:
        raise CacheError(
            f"the snapshot's keys and values were encoded in groups of {theirs}, this cache's are in {ours}"
        )
    # windows lie as they did, unless they were larger than a cache would keep
    needed = WindowLayout(stored.sinks, max(counts.layout.ring, max(stored.window) - stored.sinks))
    layout = WindowLayout(stored.sinks, max(stored.ring, needed.ring))
    layout = needed if layout.capacity > 2 * needed.capacity else layout
    slots = layout.slots(layout.window_tokens(row_values(stored.attended, device), max(stored.window)))
    stores = [
        _filled_store(partial(_pop, tensors, f"layers.{i}."), codec, stored, layout, slots)
        for i, codec in enumerate(codecs)
    ]
    if tensors:
        raise CacheError(f"the snapshot has a tensor {min(tensors)}, which this model and method have no place for")
    counts.state, counts.layout = (stored.lengths, stored.coded_keys, stored.coded_values, stored.attended), layout
    sequences.observed = [*stored.observed]
    sequences.valid, sequences.positions = valid.to(device, copy=True), positions.to(device, copy=True)
    sequences.note_gaps()
    return stores


def _copied(x: Tensor, used: Counts | None, device: torch.device | str | None) -> Tensor:
    """A contiguous copy, 0 where rows do not use it; without a device the tensor, where its only row uses all."""
    if device is None and len(x) == 1:
        return x
    copied = torch.empty(x.shape, dtype=x.dtype, device=device)
    copied.copy_(x)
    for row, count in enumerate(used or ()):
        copied[row, :, count:].zero_()
    return copied


def _filled_store(
    pop: Callable[[str, tuple[int, ...], torch.dtype | None], Tensor],
    codec: LayerCodec,
    counts: SnapshotCounts,
    layout: WindowLayout,
    slots: Tensor,
) -> LayerStore:
    """A layer's store with the content of a snapshot; nothing of its size is allocated before it is checked.

    `pop` is `_pop` of the layer's tensors; slots [batch, longest window] are those of the windows' tokens in order, on
    the model's device. CacheError: the codec cannot have made the content.
    """
    heads, batch, dtype = codec.key.spec.num_kv_heads, len(counts.lengths), None
    windows, empty = {}, {}
    for name, part in zip(WINDOWS, (codec.key, codec.value), strict=True):
        windows[name] = pop(name, (batch, heads, max(counts.window), part.spec.head_dim), dtype)
        dtype = windows[name].dtype
        empty[name] = torch.empty(batch, heads, 0, part.spec.head_dim, dtype=dtype, device=slots.device)
    store = LayerStore(codec, empty[WINDOWS[0]], empty[WINDOWS[1]], layout)
    for name, x in windows.items():
        write_slots(getattr(store, name), slots, x.to(slots.device))
    for kind, coded in zip(CODES, (max(counts.coded_keys), max(counts.coded_values)), strict=True):
        buffer: CodeBuffer = getattr(store, kind)
        stored = {}
        for field, x in buffer.codes.tensors().items():
            entries = -(-coded // buffer.tokens_per_entry[field])
            stored[field] = pop(f"{kind}.{field}", (*x.shape[:2], entries, *x.shape[3:]), x.dtype)
        if coded:
            buffer.reserve(coded + HEADROOM)
        for field, x in stored.items():
            getattr(buffer.codes, field)[:, :, : x.shape[2]].copy_(x)
    if store.state is not None:
        for field, x in store.state.tensors().items():
            x.copy_(pop(f"state.{field}", tuple(x.shape), x.dtype))
    return store


def _pop(
    tensors: dict[str, Tensor], prefix: str, name: str, shape: tuple[int, ...], dtype: torch.dtype | None
) -> Tensor:
    """Takes a tensor out, of any floating-point dtype if that is None; CacheError if there is no such tensor."""
    x = tensors.pop(prefix + name, None)
    if dtype is None:
        dtype = x.dtype if x is not None and x.is_floating_point() else torch.float32
    if x is None or x.shape != shape or x.dtype != dtype:
        problem = "is missing" if x is None else f"is {x.dtype} {list(x.shape)}"
        raise CacheError(f"the snapshot's tensor {prefix}{name} {problem}; it must be {dtype} {list(shape)}")
    return x
