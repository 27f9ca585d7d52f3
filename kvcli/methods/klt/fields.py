"""How many bits each band of a head's channels gets, and where they lie in the bytes of a token.

A head has 8 bands of head_dim / 8 channels; a channel has as many bytes as its head has bits per value. A field is the
codes of a band, `bits` wide; fields share bytes, but none crosses the border of one, so that a single mask takes the
codes of a band out of as many bytes as it has channels. With a trellis, a bit of each band is not in its field: these
are the first bits of the first byte.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

BANDS = 8
MOST_BYTES = 4
"""Bytes per channel of a band, at most: 4 bits per value."""

GAINS_PER_OCTAVE = 16
UNIT_GAIN = 128
"""How a gain of 1 is stored; 0 is a gain of 0."""
MAX_SHIFT = 8
"""How far a stored gain may be from that of the root mean square, in sixteenths of an octave."""
TRIED_GAINS = range(-MAX_SHIFT, 5, 2)
"""Which gains of keys are tried, as they are stored, less that of the root mean square."""

Fields = tuple[int, ...]
"""Bits of each band, most first; bands beyond have no code."""


@dataclass(frozen=True)
class Code:
    """How channels are coded, and what that costs.

    Attributes:
        trellis: whether a bit of each channel is that of a trellis, else each channel is coded alone.
        distortion: squared error of normal variables of variance 1, coded with 0 to 8 bits.
        steps: the steps between levels that have it.
    """

    trellis: bool
    distortion: tuple[float, ...]
    steps: tuple[float, ...]

    @cache  # noqa: B019
    def all_fields(self, num_bytes: int) -> tuple[Fields, ...]:
        """Every way to fill `num_bytes` bytes with at most BANDS bands of 1 to 8 bits."""
        return tuple(sorted(x for x in _partitions(8 * num_bytes, 8, BANDS) if self._fill(x) is not None))

    @cache  # noqa: B019
    def places(self, fields: Fields) -> tuple[tuple[int, int], ...]:
        """Byte and first bit of each band's field, such that none crosses a byte; (0, 0) for one of no bits.

        ValueError: bits that do not fill whole bytes.
        """
        descending = all(a >= b >= 1 for a, b in zip(fields, [*fields, 1][1:], strict=True))
        whole = 0 < len(fields) <= BANDS and descending and fields[0] <= 8 and sum(fields) % 8 == 0
        found = self._fill(fields) if whole else None
        if found is None:
            how = f"at most {BANDS} of them, most bits first" + ", in a trellis two or more" * self.trellis
            raise ValueError(f"fields of {fields} bits do not fill whole bytes, {how}")
        return found

    def _fill(self, fields: Fields) -> tuple[tuple[int, int], ...] | None:
        """`places`, or None if there are none."""

        def fill(left: tuple[int, ...], spaces: tuple[int, ...]) -> tuple[tuple[int, int], ...] | None:
            if not left:
                return ()
            bits = left[0] - self.trellis
            if not bits:
                return ((0, 0),) * len(left)
            for byte, space in enumerate(spaces):
                if space >= bits and space not in spaces[:byte]:
                    rest = fill(left[1:], (*spaces[:byte], space - bits, *spaces[byte + 1 :]))
                    if rest is not None:
                        return ((byte, 8 - space), *rest)
            return None

        spaces = (8 - len(fields) * self.trellis, *[8] * (sum(fields) // 8 - 1))
        return fill(fields, spaces) if len(fields) > self.trellis else None  # a band alone is too short for a trellis

    def best_fields(self, costs: Tensor, num_bytes: int) -> tuple[float, Fields]:
        """The fields of so many bytes with the least error, and that error.

        Args:
            costs: float64 [BANDS], what each band's error costs if it is not coded, largest first.
        """
        errors = self._distortions(num_bytes) @ costs
        best = int(errors.argmin())
        return float(errors[best]), self.all_fields(num_bytes)[best]

    @cache  # noqa: B019
    def _distortions(self, num_bytes: int) -> Tensor:
        """Distortion of each band with each of `all_fields`, float64 [ways, BANDS]."""
        ways = [(*fields, *[0] * (BANDS - len(fields))) for fields in self.all_fields(num_bytes)]
        with torch.inference_mode(False):
            table = [[self.distortion[n] for n in way] for way in ways]
            return torch.tensor(table, dtype=torch.float64, device="cpu")


SCALAR = Code(
    trellis=False,
    distortion=(1.0, 0.3634, 0.1188, 0.03744, 0.01154, 0.00349, 0.00104, 0.000304, 0.0000873),
    steps=(0.0, 1.5956, 0.9957, 0.5860, 0.3352, 0.1881, 0.1041, 0.0569, 0.0308),
)
"""The best uniform quantizers (J. Max, "Quantizing for minimum distortion", 1960, table II)."""

TRELLIS = Code(
    trellis=True,
    distortion=(1.0, 0.2988, 0.09187, 0.02904, 0.00912, 0.002796, 0.000836, 0.000252, 0.000075),
    steps=(0.0, 0.790, 0.498, 0.2972, 0.1713, 0.0969, 0.0538, 0.0299, 0.0164),
)
"""`trellis.search` of 128 channels; tests/methods/test_klt_fields.py measures it."""


def _partitions(total: int, largest: int, parts: int) -> list[Fields]:
    """The ways to write `total` as a sum of at most so many numbers up to `largest`, in descending order."""
    if not total:
        return [()]
    first = range(min(total, largest), 0, -1) if parts else ()
    return [(n, *rest) for n in first for rest in _partitions(total - n, n, parts - 1)]


def share(code: Code, costs: Sequence[Tensor], bits: float, heads: int = 1, groups: int = 1) -> list[Fields]:
    """The fields of each head, of `bits` per value on average, with the least sum of all errors.

    Bytes go one by one to the head whose error falls most by the next one; with several groups in a layer, of `heads`
    consecutive heads each, to such a head of each of them at once, so that they have equally many. What is left then,
    less than a byte per group, is not used. `costs` are as in `Code.best_fields`.
    """
    tables = [[code.best_fields(x, n) for n in range(1, MOST_BYTES + 1)] for x in costs]
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
