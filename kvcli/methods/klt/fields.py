"""How many bits each band of a head's channels gets, and where they lie in the bytes of a token.

A head has 8 bands of head_dim / 8 channels. A field is the codes of a band, `bits` wide; fields share bytes, but none
crosses the border of one, so that a single mask takes the codes of a band out of as many bytes as it has channels.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from functools import cache
from itertools import combinations_with_replacement

import torch
from torch import Tensor

BANDS = 8
MOST_BYTES = 4
"""Bytes per channel of a band, at most: 4 bits per value."""

DISTORTION = (1.0, 0.3634, 0.1188, 0.03744, 0.01154, 0.00349, 0.00104, 0.000304, 0.0000873)
"""Squared error of a normal variable of variance 1, coded with 0 to 8 bits by the best uniform quantizer (J. Max,
"Quantizing for minimum distortion", 1960, table II)."""

STEPS = (0.0, 1.5956, 0.9957, 0.5860, 0.3352, 0.1881, 0.1041, 0.0569, 0.0308)
"""Its step."""

GAINS_PER_OCTAVE = 16
UNIT_GAIN = 128
"""How a gain of 1 is stored; 0 is a gain of 0."""

Fields = tuple[int, ...]
"""Bits of each band, most first; bands beyond have no code."""


@cache
def all_fields(num_bytes: int) -> tuple[Fields, ...]:
    """Every way to fill `num_bytes` bytes with at most BANDS fields of 1 to 8 bits."""
    bytes_ = [*_partitions(8, 8)]
    joined = (sum(parts, ()) for parts in combinations_with_replacement(bytes_, num_bytes))
    return tuple(sorted({tuple(sorted(fields, reverse=True)) for fields in joined if len(fields) <= BANDS}))


def _partitions(total: int, largest: int) -> list[Fields]:
    """The ways to write `total` as a sum of numbers up to `largest`, in descending order."""
    if not total:
        return [()]
    return [(n, *rest) for n in range(min(total, largest), 0, -1) for rest in _partitions(total - n, n)]


@cache
def places(fields: Fields) -> tuple[tuple[int, int], ...]:
    """Byte and first bit of each field, such that none crosses a byte.

    Raises:
        ValueError: fields that do not fill whole bytes.
    """

    def fill(left: tuple[int, ...], spaces: tuple[int, ...]) -> tuple[tuple[int, int], ...] | None:
        if not left:
            return ()
        for byte, space in enumerate(spaces):
            if space >= left[0] and space not in spaces[:byte]:
                rest = fill(left[1:], (*spaces[:byte], space - left[0], *spaces[byte + 1 :]))
                if rest is not None:
                    return ((byte, 8 - space), *rest)
        return None

    descending = all(a >= b >= 1 for a, b in zip(fields, [*fields, 1][1:], strict=True))
    found = fill(fields, (8,) * (sum(fields) // 8)) if fields and descending and sum(fields) % 8 == 0 else None
    if found is None or not 0 < len(fields) <= BANDS:
        raise ValueError(f"fields of {fields} bits do not fill whole bytes, at most {BANDS} of them, most bits first")
    return found


def best_fields(costs: Tensor, num_bytes: int) -> tuple[float, Fields]:
    """The fields of so many bytes with the least error, and that error.

    Args:
        costs: float64 [BANDS], what each band's error costs if it is not coded, largest first.
    """
    errors = _distortions(num_bytes) @ costs
    best = int(errors.argmin())
    return float(errors[best]), all_fields(num_bytes)[best]


@cache
def _distortions(num_bytes: int) -> Tensor:
    """DISTORTION of each band with each of `all_fields`, float64 [ways, BANDS]."""
    rows = [[DISTORTION[n] for n in (*fields, *[0] * (BANDS - len(fields)))] for fields in all_fields(num_bytes)]
    with torch.inference_mode(False):
        return torch.tensor(rows, dtype=torch.float64, device="cpu")


def share(costs: Sequence[Tensor], bits: float, heads: int = 1, groups: int = 1) -> list[Fields]:
    """The fields of each head, of `bits` per value on average, with the least sum of all errors.

    Bytes go one by one to the head whose error falls most by the next one; with several groups in a layer, of `heads`
    consecutive heads each, to such a head of each of them at once, so that they have equally many. What is left then,
    less than a byte per group, is not used. `costs` are as in `best_fields`.
    """
    tables = [[best_fields(x, n) for n in range(1, MOST_BYTES + 1)] for x in costs]
    counts = [1] * len(tables)

    def gain(head: int) -> float:
        if counts[head] == MOST_BYTES:
            return -math.inf
        return tables[head][counts[head] - 1][0] - tables[head][counts[head]][0]

    def step(layer: int) -> tuple[float, int, list[int]]:
        """What the next bytes of a layer cost, and whose they are."""
        starts = range(layer * groups * heads, (layer + 1) * groups * heads, heads)
        best = [max(range(start, start + heads), key=gain) for start in starts]
        return -sum(map(gain, best)), layer, best

    heap = [step(layer) for layer in range(len(tables) // (groups * heads))]
    heapq.heapify(heap)
    for _ in range((round(bits * len(tables)) - len(tables)) // groups):
        _, layer, best = heap[0]
        for head in best:
            counts[head] += 1
        heapq.heapreplace(heap, step(layer))
    return [table[count - 1][1] for table, count in zip(tables, counts, strict=True)]
