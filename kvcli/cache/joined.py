"""Snapshots of documents side by side: keys that are coded before RoPE have the same codes at every position."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from kvcli.cache.record import CODES, POSITIONS, VALID, WINDOWS, SnapshotCounts
from kvcli.cache.snapshot import Snapshot
from kvcli.errors import UsageError
from kvcli.methods.layer_codec import LayerCodec
from kvcli.rope import ROPE_TILE, Rope, Rotation, unrotate


def obstacle(codec: LayerCodec) -> str | None:
    """Why the codes of a layer are of one text and its positions alone; None if a token has them anywhere."""
    key, value = codec.key, codec.value
    if max(key.tokens_per_group, value.tokens_per_group) > 1:
        return f"it encodes {codec.tokens_per_group} tokens together"
    if codec.new_state(1, torch.device("cpu")) is not None:
        return "it keeps a state of each text"
    if codec.rotated and key.space == "post_rope" and not key.exact:
        return "it encodes keys after RoPE, which are those of one position"
    return None


def shifts(lengths: Sequence[int], starts: Sequence[int], codecs: Sequence[LayerCodec]) -> list[int]:
    """By how many positions each document moves, of so many tokens, of which those from `start` on are used.

    They follow each other; a codec in the space `tile` takes whole tiles, so that some positions are left out.
    """
    unit = ROPE_TILE if any(codec.rotated and codec.key.space == "tile" for codec in codecs) else 1
    moved = [0]
    for (before, _), (_, start) in pairwise(zip(lengths, starts, strict=True)):
        moved.append(-(-(moved[-1] + before - start) // unit) * unit)
    return moved


def joined(snapshots: Sequence[Snapshot], starts: Sequence[int], codecs: Sequence[LayerCodec], rope: Rope) -> Snapshot:
    """One sequence of all tokens of the first snapshot, and of each other one from its start on.

    Each is of one row without padding, at positions 0, 1, 2 and so on, with all tokens after the sinks as codes. The
    first keeps its sinks in full precision; those of the others, where they are used, are encoded.

    Raises:
        UsageError: the first has fewer tokens than sinks.
    """
    counts = snapshots[0].counts
    lengths, sinks = [snapshot.counts.lengths[0] for snapshot in snapshots], counts.sinks
    if lengths[0] < sinks:
        raise UsageError(f"the first document has {lengths[0]} tokens, fewer than the {sinks} that stay exact")
    device, moved = snapshots[0].tensors[POSITIONS].device, shifts(lengths, starts, codecs)
    first = [sinks, *starts[1:]]  # of the first, the sinks stay as they are
    tensors: dict[str, Tensor] = {}
    for i, codec in enumerate(codecs):
        parts = [_codes(*x, i, codec, rope) for x in zip(snapshots, first, moved, strict=True)]
        for name, x in parts[0].items():
            by_bytes = torch.uint8 if x.itemsize == 1 else x.dtype  # also 8-bit floats
            tensors[name] = torch.cat([part[name].view(by_bytes) for part in parts], 2).view(x.dtype)
        for kind in WINDOWS:
            tensors[f"layers.{i}.{kind}"] = snapshots[0].tensors[f"layers.{i}.{kind}"][:, :, :sinks]
    ranges = zip([0, *starts[1:]], lengths, moved, strict=True)
    places = torch.cat([torch.arange(start, stop, device=device) + shift for start, stop, shift in ranges])
    tensors[POSITIONS] = places.int().unsqueeze(0)
    tensors[VALID] = torch.ones_like(tensors[POSITIONS], dtype=torch.bool)
    total = len(places)
    coded, entries = (total - sinks,), counts.tokens_per_entry
    return Snapshot(SnapshotCounts((total,), coded, coded, (0,), sinks, counts.ring, 1, 1, entries), tensors)


def _codes(
    snapshot: Snapshot, start: int, shift: int, layer_idx: int, codec: LayerCodec, rope: Rope
) -> dict[str, Tensor]:
    """Codes of a layer from token `start` on, by their names in a snapshot, for positions that are `shift` higher."""
    sinks, length = snapshot.counts.sinks, snapshot.counts.lengths[0]

    def rotation(positions: range) -> Rotation:
        places = torch.tensor([positions], device=snapshot.tensors[POSITIONS].device)
        made = rope.rotation(places, torch.float32)
        return made if codec.rotated else Rotation.none(made)

    codes: dict[str, Tensor] = {}
    for kind, window, part in zip(CODES, WINDOWS, (codec.key, codec.value), strict=True):
        prefix = f"layers.{layer_idx}.{kind}."
        fields = {name: x for name, x in snapshot.tensors.items() if name.startswith(prefix)}
        fields = {name: x[:, :, max(0, start - sinks) :] for name, x in fields.items()}
        if start < sinks:
            exact = snapshot.tensors[f"layers.{layer_idx}.{window}"][:, :, start:sinks]
            if kind == CODES[0] and codec.needs_rotations:
                exact = codec.encoder_input(exact, rotation(range(start, min(sinks, length))), unrotate)
            encoded = part.encode(exact, None).tensors()
            fields = {name: torch.cat((encoded[name.removeprefix(prefix)], x), 2) for name, x in fields.items()}
        if kind == CODES[0] and codec.rotated and codec.key.space == "post_rope" and shift:
            old, new = (rotation(range(start + by, length + by)) for by in (0, shift))
            fields = {name: new.apply(old.unapply(x.float())).to(x.dtype) for name, x in fields.items()}
        codes |= fields
    return codes
