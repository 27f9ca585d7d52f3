"""How a snapshot is cut into parts, which become blocks.

    first     what precedes the codes: the sinks of the windows in full precision, and the key codec's state
    coded j   the codes of tokens [j * size, (j + 1) * size) after the sinks, keys and values of all layers
    last      the window after the sinks, and the codes after the last of those

A prefix that ends where a part of codes ends is `first` and these parts up to there: nothing of it is in full precision
but the sinks, as after `CompressedCache.crop`. A snapshot of several rows, or with padding, is one part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from kvcli.cache.blocks import Tensors
from kvcli.cache.snapshot import POSITIONS, VALID, Snapshot, SnapshotCounts
from kvcli.errors import CacheError

BLOCK_TOKENS = 256
"""Tokens of a part of codes, by default."""


def is_plain(snapshot: Snapshot) -> bool:
    """Whether a snapshot is of one sequence without padding, at positions 0, 1, 2 and so on."""
    positions, valid = snapshot.tensors[POSITIONS], snapshot.tensors[VALID]
    in_order = torch.arange(positions.shape[-1], device=positions.device)
    return len(snapshot.counts.lengths) == 1 and bool(valid.all()) and bool((positions == in_order).all())


def whole_groups(counts: SnapshotCounts, tokens: int) -> int:
    """The next number of tokens that is made of whole groups of keys and of values."""
    group = math.lcm(counts.key_group, counts.value_group)
    return -(-tokens // group) * group


def num_coded(counts: SnapshotCounts, size: int) -> int:
    """Parts of `size` tokens of codes, keys and values, of the only row."""
    return counts.attended[0] // size


def tail_start(counts: SnapshotCounts) -> int:
    """The length from which on the only row can be cut to every length, because no code has to be cut off."""
    coded = max(*counts.coded_keys, *counts.coded_values)
    return counts.sinks + coded if coded else 0


def usable_length(counts: SnapshotCounts, size: int, common: int) -> int:
    """How much of one stored sequence is of use to another that has the first `common` tokens in common with it.

    All of these tokens, if no code has to be cut off for that; else whole parts of codes, at least one.

    Args:
        counts: of the stored sequence.
        size: of its parts, in tokens.
        common: tokens.

    Returns:
        A number of tokens up to `common` to which the stored sequence can be cut, or 0.
    """
    parts = min(max(0, common - counts.sinks) // size, num_coded(counts, size))
    length = common if common >= tail_start(counts) else counts.sinks + parts * size if parts else 0
    try:
        counts.without(counts.lengths[0] - length)
    except CacheError:  # the codec's state was computed from later tokens, too
        return 0
    return length


def split(snapshot: Snapshot, size: int) -> tuple[Tensors, list[Tensors], Tensors]:
    """Cuts a plain snapshot into `first`, parts of `size` tokens of codes and `last`; views."""
    counts = snapshot.counts
    first: Tensors = {}
    coded: list[Tensors] = [{} for _ in range(num_coded(counts, size))]
    last: Tensors = {}
    for name, x in snapshot.tensors.items():
        if name in counts.tokens_per_entry:
            entries = size // counts.tokens_per_entry[name]
            for j, part in enumerate(coded):
                part[name] = x[:, :, j * entries : (j + 1) * entries]
            last[name] = x[:, :, len(coded) * entries :]
        elif counts.used(name) is not None:
            first[name], last[name] = x[:, :, : counts.sinks], x[:, :, counts.sinks :]
        elif name not in (VALID, POSITIONS):
            first[name] = x
    return first, coded, last


def join(counts: SnapshotCounts, parts: Sequence[Tensors]) -> Snapshot:
    """The snapshot of parts in order: all that `split` gave, or without `last` as many as are wanted.

    Args:
        counts: of the result.
        parts: likewise named and shaped as those of `split`.

    Raises:
        CacheError: parts that do not belong together.
    """
    pieces: dict[str, list[Tensor]] = {}
    for name, x in chain.from_iterable(part.items() for part in parts):
        pieces.setdefault(name, []).append(x)
    try:
        # a tensor that is not cut by time is in `first` alone
        tensors = {
            name: x[0].clone() if counts.used(name) is None else torch.cat(x, dim=2) for name, x in pieces.items()
        }
    except (RuntimeError, IndexError) as error:
        raise CacheError(f"its blocks do not belong together ({' '.join(str(error).split())})") from error
    length, device = counts.lengths[0], next(iter(tensors.values())).device
    tensors[VALID] = torch.ones(1, length, dtype=torch.bool, device=device)
    tensors[POSITIONS] = torch.arange(length, dtype=torch.int32, device=device).unsqueeze(0)
    return Snapshot(counts, tensors)
