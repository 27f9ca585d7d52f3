"""Taking a snapshot of a cache's sequences and stores, and filling empty ones from it.

This module knows where tensors lie in a cache; `snapshot` knows what a snapshot holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from kvcli.cache.counts import Counts, TokenCounts, row_values
from kvcli.cache.layer import HEADROOM, CodeBuffer, LayerStore
from kvcli.cache.sequences import Sequences
from kvcli.cache.snapshot import CODES, POSITIONS, VALID, WINDOWS, Snapshot, SnapshotCounts
from kvcli.cache.window import WindowLayout, ordinary_tensors, read_slots, write_slots
from kvcli.errors import CacheError
from kvcli.methods.layer_codec import LayerCodec


@torch.no_grad()
@ordinary_tensors
def take(sequences: Sequences, stores: Sequence[LayerStore], device: torch.device | str) -> Snapshot:
    """Copies the content of a cache.

    Args:
        sequences: of the cache.
        stores: of its layers.
        device: of the copies.

    Raises:
        CacheError: the cache is empty, or a pass over it broke off or is under way.
    """
    counts = _counts_of(sequences, stores)
    tensors = {}
    for i, store in enumerate(stores):
        for name, x in _parts(store, counts):
            full_name = f"layers.{i}.{name}"
            tensors[full_name] = _copied(x, counts.used(full_name), device)
    tensors[VALID] = _copied(sequences.valid, None, device)
    lengths = row_values(counts.lengths, sequences.positions.device)
    positions = sequences.positions[:, : max(counts.lengths)]
    real = torch.arange(positions.shape[1], device=lengths.device) < lengths.unsqueeze(1)
    tensors[POSITIONS] = _copied(positions * real, None, device)
    return Snapshot(counts, tensors)


@torch.no_grad()
@ordinary_tensors
def put(
    snapshot: Snapshot, sequences: Sequences, codecs: Sequence[LayerCodec], device: torch.device
) -> list[LayerStore]:
    """Fills empty sequences, and stores that are made here.

    Args:
        snapshot: what `take` gave; its tensors are checked, and copied one by one.
        sequences: of an empty cache.
        codecs: of its layers.
        device: of the model.

    Returns:
        One store per layer.

    Raises:
        CacheError: a snapshot that these codecs cannot have made.
    """
    _check_shared(snapshot)
    held, counts = snapshot.counts, sequences.counts
    layout = _layout(held, counts)
    slots = layout.slots(layout.held(row_values(held.attended, device), max(held.window)))
    tensors = {name: x for name, x in snapshot.tensors.items() if name not in (VALID, POSITIONS)}
    stores = [
        _filled_store(partial(_pop, tensors, f"layers.{i}."), codec, held, layout, slots)
        for i, codec in enumerate(codecs)
    ]
    if tensors:
        raise CacheError(f"the snapshot has a tensor {min(tensors)}, which this model and method have no place for")
    counts.state = held.lengths, held.coded_keys, held.coded_values, held.attended
    counts.layout = layout
    sequences.observed = [*held.observed]
    shared = (snapshot.tensors[name].to(device, copy=True) for name in (VALID, POSITIONS))
    sequences.valid, sequences.positions = shared
    return stores


def _counts_of(sequences: Sequences, stores: Sequence[LayerStore]) -> SnapshotCounts:
    counts = sequences.counts
    return SnapshotCounts(
        lengths=counts.lengths,
        coded_keys=counts.keys.coded,
        coded_values=counts.values.coded,
        observed=tuple(sequences.observed),
        sinks=counts.sink_length,
        ring=counts.layout.ring,
        key_group=counts.keys.tokens_per_group,
        value_group=counts.values.tokens_per_group,
        tokens_per_entry={
            f"layers.{i}.{kind}.{field}": tokens
            for i, store in enumerate(stores)
            for kind in CODES
            for field, tokens in getattr(store, kind).tokens_per_entry.items()
        },
    )


def _parts(store: LayerStore, counts: SnapshotCounts) -> Iterator[tuple[str, Tensor]]:
    """Names and views or copies of what a store holds, each as long as the longest row's."""
    for kind in CODES:
        buffer: CodeBuffer = getattr(store, kind)
        coded = max(counts.coded_keys if kind == CODES[0] else counts.coded_values)
        for field, x in buffer.codes.tensors().items():
            yield f"{kind}.{field}", x[:, :, : -(-coded // buffer.tokens_per_entry[field])]
    held = store.layout.held(row_values(counts.attended, store.keys.device), max(counts.window))
    for kind in WINDOWS:
        yield kind, read_slots(getattr(store, kind), store.layout.slots(held))
    if store.state is not None:
        for field, x in store.state.tensors().items():
            yield f"state.{field}", x


def _copied(x: Tensor, used: Counts | None, device: torch.device | str) -> Tensor:
    """A contiguous copy; 0 where rows do not use it."""
    made = torch.empty(x.shape, dtype=x.dtype, device=device)
    made.copy_(x)
    for row, count in enumerate(used or ()):
        if count < x.shape[2]:
            made[row, :, count:].zero_()
    return made


def _layout(counts: SnapshotCounts, ours: TokenCounts) -> WindowLayout:
    """The layout of the windows, as it was where it is not larger than a cache would keep.

    Raises:
        CacheError: sinks or groups of other sizes.
    """
    if counts.sinks != ours.sink_length:
        raise CacheError(f"the snapshot was made with sink_length {counts.sinks}, this cache has {ours.sink_length}")
    theirs = (counts.key_group, counts.value_group)
    if theirs != (mine := (ours.keys.tokens_per_group, ours.values.tokens_per_group)):
        raise CacheError(
            f"the snapshot's keys and values were encoded in groups of {theirs}, this cache's are in {mine}"
        )
    tokens = max(window - counts.sinks for window in counts.window)
    needed = WindowLayout(counts.sinks, max(ours.layout.ring, tokens))
    stored = WindowLayout(counts.sinks, max(counts.ring, needed.ring))
    return needed if stored.capacity > 2 * needed.capacity else stored


def _filled_store(
    pop: Callable[[str, tuple[int, ...], torch.dtype | None], Tensor],
    codec: LayerCodec,
    counts: SnapshotCounts,
    layout: WindowLayout,
    slots: Tensor,
) -> LayerStore:
    """A layer's store with the content of a snapshot; nothing of its size is allocated before it is checked.

    Args:
        pop: `_pop` of the layer's tensors.
        codec: of the layer.
        counts: of the snapshot.
        layout: of the windows.
        slots: of the windows' tokens in order, [batch, longest window], on the model's device.

    Raises:
        CacheError: the codec cannot have made the content.
    """
    spec, batch = codec.key.spec, len(counts.lengths)
    widths, dtype = (spec.head_dim, codec.value.spec.head_dim), None
    tokens = {}
    for name, width in zip(WINDOWS, widths, strict=True):
        tokens[name] = pop(name, (batch, spec.num_kv_heads, max(counts.window), width), dtype)
        dtype = tokens[name].dtype
    key, value = (torch.empty(batch, spec.num_kv_heads, 0, width, dtype=dtype, device=slots.device) for width in widths)
    store = LayerStore(codec, key, value, layout)
    for name, x in tokens.items():
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
    """Takes a tensor out, of any floating-point dtype if that is None.

    Raises:
        CacheError: it is missing, or of another shape or dtype.
    """
    x = tensors.pop(prefix + name, None)
    if dtype is None:
        dtype = x.dtype if x is not None and x.is_floating_point() else torch.float32
    if x is None or x.shape != shape or x.dtype != dtype:
        found = "is missing" if x is None else f"is {x.dtype} {list(x.shape)}"
        raise CacheError(f"the snapshot's tensor {prefix}{name} {found}; it must be {dtype} {list(shape)}")
    return x


def _check_shared(snapshot: Snapshot) -> None:
    """Raises CacheError where padding marks or positions do not agree with the counts."""
    counts, valid, positions = snapshot.counts, snapshot.tensors.get(VALID), snapshot.tensors.get(POSITIONS)
    if valid is None or valid.dtype != torch.bool or valid.ndim != 2 or valid.sum(1).tolist() != [*counts.lengths]:
        raise CacheError("the snapshot's padding marks do not agree with its numbers of tokens")
    shape = (len(counts.lengths), max(counts.lengths))
    if positions is None or positions.dtype != torch.int32 or positions.shape != shape:
        raise CacheError("the snapshot's positions do not agree with its numbers of tokens")
