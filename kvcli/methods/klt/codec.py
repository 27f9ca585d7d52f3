"""The codes of transform coding: a gain per token and head, and a uniform scalar code of each transformed channel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Self

import torch
from torch import Tensor, nn

from kvcli.errors import UsageError
from kvcli.kernels.launch import TINY
from kvcli.methods.base import CachedFromBuffers, Codec, Codes, KeyCodec, Space, ValueCodec
from kvcli.methods.klt.fields import BANDS, GAINS_PER_OCTAVE, STEPS, UNIT_GAIN, Fields, places
from kvcli.rope import OFFSET_BLOCK, ROPE_TILE, Rotation, TokenRotations
from kvcli.spec import ModelSpec

_LARGEST_GAIN = 2.0 ** ((255 - UNIT_GAIN) / GAINS_PER_OCTAVE)


@dataclass(frozen=True)
class KLTCodes(Codes):
    """Codes and gains of tokens.

    Attributes:
        packed: uint8 [batch, 1, time, bytes], of one head after the other: for each of its bytes, `head_dim / 8`
            channels; byte and bits of a band's codes are those of `fields.places`.
        gain: uint8 [batch, num_kv_heads, time, 1], 0 for a gain of 0, else 128 + 16 log2 of it, rounded.
    """

    packed: Tensor
    gain: Tensor


@dataclass(frozen=True)
class Tables:
    """What follows from the fields of all heads.

    Attributes:
        byte: int64 [num_kv_heads, head_dim], byte of a token where each channel's code lies.
        bit: int32 of that shape, where it begins in that byte.
        levels: int32 of that shape, 2^b - 1 for codes of b bits.
        steps: float32 of that shape, step of codes in standard deviations; 1 without a code.
        weights: float32 of that shape, of the squares of which a token's squared gain is the sum.
        fields: int32 [num_kv_heads, BANDS + 1, 6]: of each band byte, bit, levels and what `_field` adds; then where
            the head's bytes begin, and how many a channel of each band has.
    """

    byte: Tensor
    bit: Tensor
    levels: Tensor
    steps: Tensor
    weights: Tensor
    fields: Tensor

    @classmethod
    def of(cls, fields: Sequence[Fields], width: int, widening: float, device: torch.device) -> Tables:
        """Tables for bands of `width` channels, and steps that are wider than those of normal variables."""
        rows, first = [], 0
        for of_head in fields:
            count, bits = sum(of_head) // 8, [*of_head, *[0] * (BANDS - len(of_head))]
            at = [*places(of_head), *[(0, 0)] * (BANDS - len(of_head))]
            rows.append([_field(*x, n) for x, n in zip(at, bits, strict=True)])
            rows[-1].append((first, count, 0, 0, 0, 0))
            first += count * width
        with torch.inference_mode(False):
            table = torch.tensor(rows, dtype=torch.int32, device=device)
            byte, bit, levels = (x.repeat_interleave(width, 1) for x in table[:, :BANDS, :3].unbind(-1))
            steps = torch.tensor((1.0, *STEPS[1:]), device=device)[(levels + 1).float().log2().long()]
            weights = (widening * steps * (levels > 0)).square() / (levels > 0).sum(-1, keepdim=True)
            lane = torch.arange(width, device=device).repeat(BANDS)
            byte = table[:, BANDS, :1].long() + byte * width + lane
            return cls(byte, bit, levels, steps, weights, table)


class _KLT(Codec[KLTCodes, None]):
    """x_hat = mean + B (g (c - (2^b - 1) / 2)): codes c of b bits, gain g of the token, basis B of the head.

    y = B^-1 (x - mean) is in units of the steps of codes; g is the root mean square of what is coded of it, in units
    of its standard deviation in the calibration samples, times `widening`.

    Args:
        fields: of each kv head.

    Buffers:
        basis: float32 [num_kv_heads, head_dim, head_dim], B; columns of bands without code are there for its inverse.
        mean: float32 [num_kv_heads, head_dim].

    Raises:
        ValueError: a head_dim that is no multiple of 8, or fields that do not fill bytes.
    """

    widening = 1.0
    """By how much steps are wider than those of normal variables."""

    calibrated_range = True
    max_magnitude = 0.99 * _LARGEST_GAIN

    def __init__(self, spec: ModelSpec, fields: Sequence[Fields]) -> None:
        super().__init__()
        if spec.head_dim % BANDS:
            raise ValueError(f"head_dim {spec.head_dim} is no multiple of {BANDS}, the bands of channels")
        self.spec, self.fields, self.width = spec, tuple(fields), spec.head_dim // BANDS
        self.num_bytes = [sum(of_head) // 8 * self.width for of_head in self.fields if places(of_head)]
        self.basis: Tensor = nn.Buffer(torch.zeros(spec.num_kv_heads, spec.head_dim, spec.head_dim))
        self.mean: Tensor = nn.Buffer(torch.zeros(spec.num_kv_heads, spec.head_dim))
        self._inverse: CachedFromBuffers[Tensor] = CachedFromBuffers()
        self._tables: CachedFromBuffers[Tables] = CachedFromBuffers()

    def of_rank(self, rank: int, ranks: int) -> Self:
        if self.spec.num_kv_heads % ranks:
            super().of_rank(rank, ranks)
        count = self.spec.num_kv_heads // ranks
        sizes = {sum(self.num_bytes[first : first + count]) for first in range(0, ranks * count, count)}
        if len(sizes) > 1:
            each = ", ".join(map(str, sorted(sizes)))
            raise UsageError(f"codes of the heads of {ranks} ranks have different bytes ({each})")
        heads = slice(rank * count, (rank + 1) * count)
        spec = replace(self.spec, num_heads=self.spec.num_heads // ranks, num_kv_heads=count)
        part = type(self)(spec, self.fields[heads])
        part.basis, part.mean = self.basis[heads], self.mean[heads]
        return part

    def bits_per_token(self) -> float:
        return float(8 * (sum(self.num_bytes) + self.spec.num_kv_heads))

    def codebook_bytes(self) -> int:
        # the inverse and the tables count from the start, so that a cache takes what was planned for it
        derived = self.basis, *vars(self.tables).values()
        return sum(x.nbytes for x in (*self.buffers(), *derived))

    def randomize_(self, generator: torch.Generator) -> None:
        """Random bases that can be inverted: an orthogonal one for all heads, as in `turboquant.random_rotation`."""
        square = torch.randn(self.basis.shape[1:], generator=generator, device=self.basis.device)
        self.set_basis(torch.linalg.qr(square)[0].expand_as(self.basis))

    def set_basis(self, basis: Tensor) -> None:
        """Takes a basis [num_kv_heads, head_dim, head_dim] of components of unit variance."""
        self.basis.copy_(basis * self.tables.steps.unsqueeze(1))

    @property
    def tables(self) -> Tables:
        """What follows from the fields, on the device of the buffers."""
        return self._tables.get(
            lambda: Tables.of(self.fields, self.width, self.widening, self.basis.device), self.basis
        )

    def analyse(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Transformed channels in units of steps, and gains: float32 shaped like x and [batch, heads, time, 1]."""
        y = (x.float() - self.mean.unsqueeze(1)) @ self.inverse.mT
        return y, (y.square() * self.tables.weights.unsqueeze(1)).sum(-1, keepdim=True).sqrt()

    def peak(self, x: Tensor, codes: KLTCodes) -> Tensor:
        return self.analyse(x)[1].amax()

    @property
    def inverse(self) -> Tensor:
        """B^-1, float32 [num_kv_heads, head_dim, head_dim]."""
        return self._inverse.get(lambda: _inverted(self.basis), self.basis)

    def make_kernel_tables(self) -> None:
        _ = self.inverse, self.tables

    def encode_into(self, x: Tensor, state: None, codes: KLTCodes) -> None:
        if not self.fused:
            super().encode_into(x, state, codes)
            return
        from kvcli.methods.klt.kernels import encode_tokens

        tables = self.tables
        encode_tokens(x, self.inverse, self.mean, tables.weights, tables.fields, codes.packed, codes.gain)

    def decode_to(self, codes: KLTCodes, state: None, dtype: torch.dtype) -> Tensor:
        if not self.fused:
            return super().decode_to(codes, state, dtype)
        from kvcli.methods.klt.kernels import decode_tokens

        return decode_tokens(codes.packed, codes.gain, self.basis, self.mean, self.tables.fields, dtype)

    def encode(self, x: Tensor, state: None = None) -> KLTCodes:
        if self.fused:
            shapes = (x.shape[0], 1, x.shape[2], sum(self.num_bytes)), (*x.shape[:3], 1)
            written = KLTCodes(*(x.new_empty(shape, dtype=torch.uint8) for shape in shapes))
            self.encode_into(x, state, written)
            return written
        y, exact = self.analyse(x)
        stored = (UNIT_GAIN + GAINS_PER_OCTAVE * exact.log2()).round().nan_to_num(255.0).clamp(0, 255)
        gain = _decoded(stored)
        tables = self.tables
        levels = tables.levels.float().unsqueeze(1)
        codes = (y / gain.clamp_min(1e-30) + levels / 2).round().maximum(levels.new_zeros(())).minimum(levels)
        shifted = codes.int() << tables.bit.unsqueeze(1)
        # fields of a byte share no bit, so the sum joins them
        packed = shifted.new_zeros(x.shape[0], x.shape[2], sum(self.num_bytes))
        index = tables.byte.flatten().expand(*packed.shape[:2], -1)
        packed.scatter_add_(2, index, shifted.transpose(1, 2).flatten(2))
        return KLTCodes(packed.unsqueeze(1).to(torch.uint8), stored.to(torch.uint8))

    def decode(self, codes: KLTCodes, state: None = None) -> Tensor:
        return (self._coded(codes) * _decoded(codes.gain)) @ self.basis.mT + self.mean.unsqueeze(1)

    def _coded(self, codes: KLTCodes) -> Tensor:
        """c - (2^b - 1) / 2 of each channel: float32 [batch, num_kv_heads, time, head_dim]."""
        tables = self.tables
        byte, bit, levels = tables.byte, tables.bit.unsqueeze(1), tables.levels.unsqueeze(1)
        taken = codes.packed[:, 0].index_select(-1, byte.flatten()).unflatten(-1, byte.shape).transpose(1, 2).int()
        return ((taken >> bit) & levels) - levels / 2


@dataclass(frozen=True)
class QueryTables:
    """What transforms the query of a score.

    Attributes:
        basis: B, [num_kv_heads, head_dim, head_dim]; for float16 queries float16, each column over a power of two.
        factors: float32 [num_kv_heads, 2 * head_dim + 1], by which products with the columns are multiplied, 0 without
            codes; then, by which the result is, for the product with (2^b - 1) / 2; then the unit of offsets.
        offsets: [num_kv_heads, head_dim, blocks], the offset at each block of a tile; for float16 queries in the unit,
            rounded to float16, and as many columns of what is left of it.
    """

    basis: Tensor
    factors: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, basis: Tensor, tables: Tables, offsets: Tensor, dtype: torch.dtype) -> QueryTables:
        """Tables for queries of a dtype, float32 or float16; `offsets` float32 are empty if there is no offset."""
        levels = tables.levels.float()
        factor, middle, unit = levels.sign(), levels / 2, levels.new_ones(len(levels), 1)
        if dtype == torch.float16:
            columns = _power_of_two(basis.abs().amax(1))
            basis = (basis / columns.unsqueeze(1)).half()
            shift = torch.exp2(tables.bit.float())
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


class KLTKey(_KLT, KeyCodec[KLTCodes, None]):
    """Keys, rotated by their position within a tile: the transform of a score's query is that of the tile's start."""

    space: Space = "tile"

    def __init__(self, spec: ModelSpec, fields: Sequence[Fields]) -> None:
        super().__init__(spec, fields)
        self._query_tables: dict[torch.dtype, CachedFromBuffers[QueryTables]] = {}

    def codebook_bytes(self) -> int:
        heads, head_dim, _ = self.basis.shape  # what 16-bit queries are multiplied with, offsets included
        blocks = ROPE_TILE // OFFSET_BLOCK
        return super().codebook_bytes() + heads * (2 * head_dim * (head_dim + 2 * blocks) + 4 * (2 * head_dim + 1))

    def query_tables(self, offset: Tensor | None, rotations: TokenRotations, dtype: torch.dtype) -> QueryTables:
        """Tables of an offset [1, num_kv_heads, 1, head_dim] and of queries of a dtype."""

        def make() -> QueryTables:
            offsets = self.basis.new_empty(*self.basis.shape[:2], 0)
            if offset is not None:
                turns = rotations.offsets(ROPE_TILE)
                blocks = Rotation(turns.cos[:, :, ::OFFSET_BLOCK], turns.sin[:, :, ::OFFSET_BLOCK])
                offsets = blocks.at_each_position(offset)[0].mT.float()
            return QueryTables.of(self.basis, self.tables, offsets, dtype)

        cached = self._query_tables.setdefault(dtype, CachedFromBuffers())
        return cached.get(make, self.basis, *([] if offset is None else [offset]))


class KLTValue(_KLT, ValueCodec[KLTCodes]):
    """Values."""

    widening = 1.15  # chosen by KL divergence: SmolLM2-135M, notes/quality_log.md

    def weighted_sum(self, weights: Tensor, codes: KLTCodes) -> Tensor:
        # the basis is applied to sums of codes
        sums = (weights * _decoded(codes.gain).transpose(-1, -2)) @ self._coded(codes)
        return sums @ self.basis.mT + weights.sum(-1, keepdim=True) * self.mean.unsqueeze(1)


@cache
def _field(byte: int, bit: int, bits: int) -> tuple[int, ...]:
    """Byte, bit and levels of a band, and for kernels that have its byte in one of four registers, 0 to 3: selectors of
    `prmt` for one register of each half, then for bytes 0 and 2 of one of the two; and the mask of two of its codes.
    """
    levels = 2**bits - 1
    return byte, bit, levels, 0x3210 + byte % 2 * 0x4444, 0x2200 + byte // 2 * 0x4444, (levels << bit) * 0x10001


def _power_of_two(x: Tensor) -> Tensor:
    """A power of two that is at least x, so that x over it is at most 1."""
    return torch.exp2(x.clamp_min(TINY).log2().ceil())


def _inverted(basis: Tensor) -> Tensor:
    """Inverses of bases [num_kv_heads, head_dim, head_dim], 0 for those that are 0 because nothing was fitted."""
    inverse, failed = torch.linalg.inv_ex(basis.double())
    return torch.where(failed[:, None, None] > 0, 0.0, inverse).float().contiguous()


def _decoded(stored: Tensor) -> Tensor:
    """Gains as they are stored, as numbers: float32 of the same shape."""
    x = stored.float()
    return torch.where(x > 0, torch.exp((x - UNIT_GAIN) * (math.log(2) / GAINS_PER_OCTAVE)), 0.0)
