"""What KLT computes once from bases and fields: where each channel's field is, and what transforms queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kvcli.kernels.launch import TINY
from kvcli.methods.klt.fields import BANDS, Code, Fields


@dataclass(frozen=True)
class Tables:
    """What follows from the fields of all heads.

    Attributes:
        byte: int64 [num_kv_heads, head_dim], byte of a token where each channel's field lies.
        lane: int64 of that shape, byte 0 of the channel.
        bit: int32 of that shape, where the field begins in its byte.
        field: int32 of that shape, 2^n - 1 for a field of n bits.
        levels: float32 of that shape, the last level, 2^b - 1 for b bits, with a trellis 2^(b+1) - 1; 0 without a code.
        steps: float32 of that shape, step of levels in standard deviations; 1 without a code.
        weights: float32 of that shape, of the squares of which a token's squared gain is the sum.
        last: int64 [4], of which of a band's channels the four before the first one of a band are.
        turns: int32 [num_kv_heads, 4], by how many bands they are of another band.
        fields: int32 [num_kv_heads, BANDS + 1, 6]: of each band byte, bit and mask of its field, and what `_field`
            adds; then where the head's bytes begin, how many a channel of each band has, and how many bands are coded.
    """

    byte: Tensor
    lane: Tensor
    bit: Tensor
    field: Tensor
    levels: Tensor
    steps: Tensor
    weights: Tensor
    last: Tensor
    turns: Tensor
    fields: Tensor

    @classmethod
    def of(cls, code: Code, fields: Sequence[Fields], width: int, widening: float, device: torch.device) -> Tables:
        """Tables for bands of `width` channels, and steps that are wider than those of normal variables."""
        rows, steps, turns, first = [], [], [], 0
        for of_head in fields:
            count, bits = sum(of_head) // 8, [*of_head, *[0] * (BANDS - len(of_head))]
            at = [*code.places(of_head), *[(0, 0)] * (BANDS - len(of_head))]
            rows.append([_field(*x, max(0, n - code.trellis)) for x, n in zip(at, bits, strict=True)])
            rows[-1].append((first, count, len(of_head), 0, 0, 0))
            first += count * width
            steps.append([code.steps[n] or 1.0 for n in bits])
            turns.append([-(lane // width) % len(of_head) for lane in range(-4, 0)])
        with torch.inference_mode(False):
            table = torch.tensor(rows, dtype=torch.int32, device=device)
            byte, bit, field = (x.repeat_interleave(width, 1) for x in table[:, :BANDS, :3].unbind(-1))
            coded = torch.arange(BANDS, device=device) < table[:, BANDS, 2:3]
            last_level = 4 * table[:, :BANDS, 2] + 3 if code.trellis else table[:, :BANDS, 2]
            levels = (last_level * coded).repeat_interleave(width, 1).float()
            step = torch.tensor(steps, device=device).repeat_interleave(width, 1)
            weights = (widening * step * levels.sign()).square() / levels.sign().sum(-1, keepdim=True)
            lane = table[:, BANDS, :1].long() + torch.arange(width, device=device).repeat(BANDS)
            last = torch.arange(-4, 0, device=device) % width
            turn = torch.tensor(turns, dtype=torch.int32, device=device)
            return cls(byte * width + lane, lane, bit, field, levels, step, weights, last, turn, table)


@dataclass(frozen=True)
class QueryTables:
    """What transforms the query of a score.

    Attributes:
        basis: B, shaped as the codec's; for float16 queries float16, each column over a power of two.
        factors: float32 [num_kv_heads, 2 * head_dim + 1], by which products with the columns are multiplied, 0 without
            codes; then, by which the result is, for the product with the levels' middle; then the unit of offsets.
        offsets: [num_kv_heads, head_dim, blocks], the offset at each block of a tile; for float16 queries in the unit,
            rounded to float16, and as many columns of what is left of it.
    """

    basis: Tensor
    factors: Tensor
    offsets: Tensor

    @classmethod
    def of(
        cls, basis: Tensor, tables: Tables, offsets: Tensor, dtype: torch.dtype, subsets: bool = False
    ) -> QueryTables:
        """Tables for queries of a dtype, float32 or float16; `offsets` float32 are empty if there is no offset.

        The queries are for products with fields or, if `subsets`, with subsets of levels, those of bands 2 i and
        2 i + 1 in bits 2 i and 2 i + 1.
        """
        levels = tables.levels
        factor, middle, unit = levels.sign(), levels / 2, levels.new_ones(len(levels), 1)
        if dtype == torch.float16:
            columns = _power_of_two(basis.abs().amax(1))
            basis, columns = (basis / columns.unsqueeze(1)).half(), columns.view_as(levels)
            bands = torch.arange(BANDS, device=levels.device).repeat_interleave(levels.shape[1] // BANDS)
            shift = torch.exp2((bands // 2 * 2 if subsets else tables.bit).float())
            factor, middle = factor * columns / shift, middle * shift
            if offsets.numel():
                unit = _power_of_two(offsets.abs().amax((1, 2))).unsqueeze(1)
                offsets = offsets / unit.unsqueeze(1)
                offsets = torch.cat((offsets.half(), (offsets - offsets.half().float()).half()), -1)
        return cls(basis.contiguous(), torch.cat((factor, middle, unit), 1), offsets.contiguous())

    @property
    def num_offsets(self) -> int:
        """Numbers per query and tile that are products with offsets."""
        return self.offsets.shape[-1] // (2 if self.offsets.dtype == torch.float16 else 1)


@cache
def _field(byte: int, bit: int, bits: int) -> tuple[int, ...]:
    """Byte, bit and mask of a band's field, and for kernels that have its byte in one of four registers, 0 to 3:
    selectors of `prmt` for one register of each half, then for bytes 0 and 2 of one of the two; and the mask of two of
    its fields.
    """
    mask = 2**bits - 1
    return byte, bit, mask, 0x3210 + byte % 2 * 0x4444, 0x2200 + byte // 2 * 0x4444, (mask << bit) * 0x10001


def _power_of_two(x: Tensor) -> Tensor:
    """A power of two that is at least x, so that x over it is at most 1."""
    return torch.exp2(x.clamp_min(TINY).log2().ceil())
