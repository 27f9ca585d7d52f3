"""How a snapshot is cut into parts, which are files of their own.

    first     what precedes the codes: the sinks of the windows in full precision, and the key codec's state
    block j   the codes of tokens [j * size, (j + 1) * size) after the sinks, keys and values of all layers
    last      the window after the sinks, and the codes after the last whole block

A prefix that ends where a block ends is `first` and the blocks up to there: nothing of it is in full precision but the
sinks, as after `CompressedCache.crop`. This module does not know about files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from kvcli.cache.snapshot import POSITIONS, VALID, Snapshot, SnapshotCounts
from kvcli.errors import CacheError, ContextError

Tensors = dict[str, Tensor]

BLOCK_TOKENS = 256
"""Tokens of a block, by default."""


def whole_groups(counts: SnapshotCounts, tokens: int) -> int:
    """The next number of tokens that is made of whole groups of keys and of values."""
    group = math.lcm(counts.key_group, counts.value_group)
    return -(-tokens // group) * group


def num_blocks(counts: SnapshotCounts, size: int) -> int:
    """Whole blocks of `size` tokens of codes, keys and values, of the only row."""
    return counts.attended[0] // size


def usable_length(counts: SnapshotCounts, size: int, common: int) -> int:
    """How much of one stored sequence is of use to another that has the first `common` tokens in common with it.

    All of these tokens, if no code has to be cut off for that; else whole blocks of codes, at least one.

    Args:
        counts: of the stored sequence.
        size: of its blocks, in tokens.
        common: tokens.

    Returns:
        A number of tokens up to `common` to which the stored sequence can be cut, or 0.
    """
    coded, after_sinks = max(*counts.coded_keys, *counts.coded_values), max(0, common - counts.sinks)
    blocks = min(after_sinks // size, num_blocks(counts, size))
    length = common if after_sinks >= coded else counts.sinks + blocks * size if blocks else 0
    try:
        counts.without(counts.lengths[0] - length)
    except CacheError:  # the codec's state was computed from later tokens, too
        return 0
    return length


def check_storable(snapshot: Snapshot) -> None:
    """Raises ContextError unless a snapshot is of one sequence without padding, at positions 0, 1, 2 and so on."""
    if (rows := len(snapshot.counts.lengths)) != 1:
        raise ContextError(f"a context is one sequence; this cache holds {rows}")
    positions = snapshot.tensors[POSITIONS][0]
    expected = torch.arange(len(positions), device=positions.device)
    if not bool(snapshot.tensors[VALID].all()) or not bool((positions == expected).all()):
        raise ContextError("a context has no padding, and its positions are 0, 1, 2 and so on")


def split(snapshot: Snapshot, size: int) -> tuple[Tensors, list[Tensors], Tensors]:
    """Cuts a snapshot of one sequence into `first`, blocks of `size` tokens and `last`; views."""
    counts = snapshot.counts
    first: Tensors = {}
    blocks: list[Tensors] = [{} for _ in range(num_blocks(counts, size))]
    last: Tensors = {}
    for name, x in snapshot.tensors.items():
        if name in counts.tokens_per_entry:
            entries = size // counts.tokens_per_entry[name]
            for j, block in enumerate(blocks):
                block[name] = x[:, :, j * entries : (j + 1) * entries]
            last[name] = x[:, :, len(blocks) * entries :]
        elif counts.used(name) is not None:
            first[name], last[name] = x[:, :, : counts.sinks], x[:, :, counts.sinks :]
        elif name not in (VALID, POSITIONS):
            first[name] = x
    return first, blocks, last


def join(counts: SnapshotCounts, parts: Sequence[Tensors]) -> Snapshot:
    """The snapshot of parts in order: all that `split` gave, or without `last` as many blocks as are wanted.

    Args:
        counts: of the result.
        parts: likewise named and shaped as those of `split`.

    Raises:
        ContextError: parts that do not belong together.
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
        raise ContextError(f"its files do not belong together ({' '.join(str(error).split())})") from error
    length, device = counts.lengths[0], next(iter(tensors.values())).device
    tensors[VALID] = torch.ones(1, length, dtype=torch.bool, device=device)
    tensors[POSITIONS] = torch.arange(length, dtype=torch.int32, device=device).unsqueeze(0)
    return Snapshot(counts, tensors)
