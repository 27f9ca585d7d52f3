"""The codes of transform coding: a gain per token and head, and a level of each transformed channel, chosen for itself
or, with a trellis, by all channels of the head together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn

from kvcli.errors import UsageError
from kvcli.methods.base import CachedFromBuffers, Codec, Codes, KeyCodec, Space, ValueCodec
from kvcli.methods.klt import trellis
from kvcli.methods.klt.fields import BANDS, GAINS_PER_OCTAVE, MAX_SHIFT, SCALAR, TRIED_GAINS, UNIT_GAIN, Code, Fields
from kvcli.methods.klt.tables import QueryTables, Tables
from kvcli.rope import OFFSET_BLOCK, ROPE_TILE, Rotation, TokenRotations
from kvcli.spec import ModelSpec

_LARGEST_GAIN = 2.0 ** ((255 - UNIT_GAIN) / GAINS_PER_OCTAVE)


@dataclass(frozen=True)
class KLTCodes(Codes):
    """Codes and gains of tokens.

    Attributes:
        packed: uint8 [batch, 1, time, bytes], of one head after the other: for each of its bytes, `head_dim / 8`
            channels; byte and bits of a band's field are those of `Code.places`. With a trellis, bit f of byte 0 is
            that of band f.
        gain: uint8 [batch, num_kv_heads, time, 1], 0 for a gain of 0, else 128 + 16 log2 of it, rounded.
    """

    packed: Tensor
    gain: Tensor


class _KLT(Codec[KLTCodes, None]):
    """x_hat = mean + B (g (c - l / 2)): levels c from 0 to l, gains g of the token, basis B of a group of heads.

    y = B^-1 (x - mean) is in units of the steps of levels. The channels of y are dealt to the heads of the group in
    turn: each head has fields and a gain for its share. Codes are chosen with a gain that is the root mean square of
    what is coded of it, in units of its standard deviation in the calibration samples, times `widening`.

    Args:
        fields: of each kv head, the same for those of a group.
        joint: heads of a group, J: consecutive ones, whose channels one transform takes.

    Buffers:
        basis: float32 [num_kv_heads / J, J * head_dim, J * head_dim], B; columns of bands without code are there for
            its inverse.
        mean: float32 [num_kv_heads, head_dim].

    Raises:
        ValueError: a head_dim that is no multiple of 8, fields that do not fill bytes or differ within a group.
    """

    widening = 1.0
    """By how much steps are wider than those of normal variables."""
    searches_gain = False
    """Whether codes are chosen with another gain, of TRIED_GAINS around it: that of the least squared error of y."""
    unbiased = False
    """Whether the stored g is not that with which codes are chosen, but the one for which <y_hat, y> = <y, y>."""

    calibrated_range = True
    max_magnitude = 0.99 * _LARGEST_GAIN

    def __init__(self, spec: ModelSpec, fields: Sequence[Fields], code: Code = SCALAR, joint: int = 1) -> None:
        super().__init__()
        if spec.head_dim % BANDS:
            raise ValueError(f"head_dim {spec.head_dim} is no multiple of {BANDS}, the bands of channels")
        self.spec, self.fields, self.code, self.width = spec, tuple(fields), code, spec.head_dim // BANDS
        self.joint = joint
        if any(len({*self.fields[first : first + joint]}) > 1 for first in range(0, len(self.fields), joint)):
            raise ValueError(f"heads that share a transform, {joint} each, have different fields")
        self.num_bytes = [sum(of_head) // 8 * self.width for of_head in self.fields if code.places(of_head)]
        channels = joint * spec.head_dim
        self.basis: Tensor = nn.Buffer(torch.zeros(spec.num_kv_heads // joint, channels, channels))
        self.mean: Tensor = nn.Buffer(torch.zeros(spec.num_kv_heads, spec.head_dim))
        self._inverse: CachedFromBuffers[Tensor] = CachedFromBuffers()
        self._tables: CachedFromBuffers[Tables] = CachedFromBuffers()

    def of_rank(self, rank: int, ranks: int) -> Self:
        if self.spec.num_kv_heads % (ranks * self.joint):
            super().of_rank(rank, ranks)
        count = self.spec.num_kv_heads // ranks
        sizes = {sum(self.num_bytes[first : first + count]) for first in range(0, ranks * count, count)}
        if len(sizes) > 1:
            each = ", ".join(map(str, sorted(sizes)))
            raise UsageError(f"codes of the heads of {ranks} ranks have different bytes ({each})")
        heads = slice(rank * count, (rank + 1) * count)
        spec = replace(self.spec, num_heads=self.spec.num_heads // ranks, num_kv_heads=count)
        part = type(self)(spec, self.fields[heads], self.code, self.joint)
        part.basis, part.mean = self.basis.tensor_split(ranks)[rank], self.mean[heads]
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
        """Takes a basis shaped as the buffer, of components of unit variance."""
        self.basis.copy_(basis * self.tables.steps.reshape(len(basis), 1, -1))

    @property
    def tables(self) -> Tables:
        """What follows from the fields, on the device of the buffers."""
        return self._tables.get(
            lambda: Tables.of(self.code, self.fields, self.width, self.widening, self.basis.device), self.basis
        )

    def analyse(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Transformed channels in units of steps, and their root mean squares as gains are: float32 shaped like x and
        [batch, num_kv_heads, time, 1].
        """
        y = self._apart(self._together(x.float() - self.mean.unsqueeze(1)) @ self.inverse.mT)
        return y, (y.square() * self.tables.weights.unsqueeze(1)).sum(-1, keepdim=True).sqrt()

    def _together(self, x: Tensor) -> Tensor:
        """x [batch, num_kv_heads, time, head_dim] as [batch, groups, time, joint * head_dim]."""
        return x if self.joint == 1 else x.unflatten(1, (-1, self.joint)).transpose(2, 3).flatten(3)

    def _apart(self, x: Tensor) -> Tensor:
        """The inverse of `_together`."""
        return x if self.joint == 1 else x.unflatten(3, (self.joint, -1)).transpose(2, 3).flatten(1, 2)

    def peak(self, x: Tensor, codes: KLTCodes) -> Tensor:
        return self.analyse(x)[1].amax()

    @property
    def inverse(self) -> Tensor:
        """B^-1, float32, shaped as B."""
        return self._inverse.get(lambda: _inverted(self.basis), self.basis)

    def make_kernel_tables(self) -> None:
        _ = self.inverse, self.tables

    def encode_into(self, x: Tensor, state: None, codes: KLTCodes, peak: Tensor | None = None) -> None:
        if self.fused:
            from kvcli.methods.klt.token_kernels import encode_tokens

            tables = self.tables
            encode_tokens(
                x, self.inverse, self.mean, tables.weights, tables.fields, codes.packed, codes.gain, peak,
                joint=self.joint, trellis=self.code.trellis, searches_gain=self.searches_gain, unbiased=self.unbiased,
            )  # fmt: skip
        else:
            super().encode_into(x, state, codes)

    def encode_noted(self, x: Tensor, peak: Tensor) -> KLTCodes:
        return self._new_codes(x, peak) if self.fused else super().encode_noted(x, peak)

    def _new_codes(self, x: Tensor, peak: Tensor | None = None) -> KLTCodes:
        """Codes that a kernel writes."""
        shapes = (x.shape[0], 1, x.shape[2], sum(self.num_bytes)), (*x.shape[:3], 1)
        written = KLTCodes(*(x.new_empty(shape, dtype=torch.uint8) for shape in shapes))
        self.encode_into(x, None, written, peak)
        return written

    def decode_to(self, codes: KLTCodes, state: None, dtype: torch.dtype) -> Tensor:
        if not self.fused:
            return super().decode_to(codes, state, dtype)
        from kvcli.methods.klt.token_kernels import decode_tokens

        fields = self.tables.fields
        return decode_tokens(codes.packed, codes.gain, self.basis, self.mean, fields, dtype, self.code.trellis)

    def encode(self, x: Tensor, state: None = None) -> KLTCodes:
        if self.fused:
            return self._new_codes(x)
        y, exact = self.analyse(x)
        stored = (UNIT_GAIN + GAINS_PER_OCTAVE * exact.log2()).round().nan_to_num(255.0).clamp(0, 255)
        tables = self.tables
        if self.searches_gain:
            stored = self.best_gain(y, stored)
        scaled = y / _divisor(stored) + tables.levels.unsqueeze(1) / 2
        if self.code.trellis:
            bits, fields = self._searched(scaled)
        else:
            bits, fields = None, scaled.round_().clamp_min_(0).minimum(tables.levels.unsqueeze(1)).int()
        fields <<= tables.bit.unsqueeze(1)
        # fields of a byte share no bit, so the sum joins them
        packed = fields.new_zeros(x.shape[0], x.shape[2], sum(self.num_bytes))
        for index, part in ((tables.byte, fields), (tables.lane, bits)):
            if part is not None:
                packed.scatter_add_(2, index.flatten().expand(*packed.shape[:2], -1), part.transpose(1, 2).flatten(2))
        codes = KLTCodes(packed.unsqueeze(1).to(torch.uint8), stored.to(torch.uint8))
        return replace(codes, gain=self.unbiased_gain(y, codes)) if self.unbiased else codes

    def unbiased_gain(self, y: Tensor, codes: KLTCodes) -> Tensor:
        """The gain for which what codes decode to has the product with y that y has with itself, at most MAX_SHIFT from
        theirs: uint8 [batch, num_kv_heads, time, 1], as it is stored.

        A sum of many decoded values, as attention's, is then as long as that of the values.
        """
        product = (y * self._coded(codes)).sum(-1, keepdim=True)
        square = (y * self.tables.levels.sign().unsqueeze(1)).square_().sum(-1, keepdim=True)
        gain = (UNIT_GAIN + GAINS_PER_OCTAVE * (square / product).log2()).round()
        stored = codes.gain.float()
        gain = gain.maximum(stored - MAX_SHIFT).minimum(stored + MAX_SHIFT).clamp(1, 255)
        return gain.where((product > 0) & (square > 0) & (stored > 0), stored).to(torch.uint8)

    def best_gain(self, y: Tensor, stored: Tensor) -> Tensor:
        """Of gains around `stored`, as they are stored, float32 [batch, num_kv_heads, time, 1], that with the least
        squared error of y [batch, num_kv_heads, time, head_dim]; the first of several.
        """
        levels = self.tables.levels.unsqueeze(1)
        y, best, least = y * levels.sign(), stored, torch.full_like(stored, math.inf)
        scaled, nearest = torch.empty_like(y), torch.empty_like(y)  # new memory for each gain takes a third more time
        for more in TRIED_GAINS:
            tried = (stored + more).clamp(1, 255).where(stored > 0, 0)
            gain = _divisor(tried)
            torch.addcmul(levels / 2, y, 1 / gain, out=scaled)
            torch.round(scaled, out=nearest).clamp_(torch.zeros_like(levels), levels).sub_(scaled)
            left = nearest.norm(dim=-1, keepdim=True) * gain
            best, least = tried.where(left < least, best), least.minimum(left)
        return best

    def _searched(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Bits of the trellis in their places, and fields of y [batch, num_kv_heads, time, head_dim]: int32."""
        bits, fields = (torch.zeros_like(y, dtype=torch.int32) for _ in range(2))
        for bands in {*map(len, self.fields)}:  # heads with as many channels at once
            heads, coded = [i for i, of_head in enumerate(self.fields) if len(of_head) == bands], bands * self.width
            vectors = y[:, heads, :, :coded].permute(3, 1, 0, 2)
            most = self.tables.field[heads, :coded].T.float()[..., None, None].expand_as(vectors)
            found = trellis.search(vectors.flatten(1), most.flatten(1))
            for out, part in zip((bits, fields), found, strict=True):
                out[:, heads, :, :coded] = part.view_as(vectors).permute(2, 1, 3, 0)
        band = torch.arange(BANDS, device=y.device).repeat_interleave(self.width)
        return bits << band.int(), fields

    def decode(self, codes: KLTCodes, state: None = None) -> Tensor:
        y = self._together(self._coded(codes) * _decoded(codes.gain))
        return self._apart(y @ self.basis.mT) + self.mean.unsqueeze(1)

    def _coded(self, codes: KLTCodes) -> Tensor:
        """Levels less half of the last one: float32 [batch, num_kv_heads, time, head_dim]."""
        tables = self.tables
        packed = codes.packed[:, 0].mT.contiguous()  # what is done to a channel is done to neighbours in memory

        def taken(byte: Tensor) -> Tensor:
            return packed.index_select(1, byte.flatten()).unflatten(1, byte.shape)

        levels = (taken(tables.byte) >> tables.bit.byte().unsqueeze(2) & tables.field.byte().unsqueeze(2)).float()
        if self.code.trellis:
            levels = levels.mul_(4).add_(self._subsets(taken(tables.lane[:, : self.width])))
        return levels.sub_(tables.levels.unsqueeze(2) / 2).mT

    def _subsets(self, bits: Tensor) -> Tensor:
        """Subsets of levels [batch, num_kv_heads, head_dim, time] from first bytes [.., head_dim / 8, time], uint8."""
        tables = self.tables
        bands = tables.fields[:, BANDS, 2, None, None].byte()
        mask = (1 << bands) - 1
        bits = bits & mask
        # the channels before the first ones of a band are the last ones of another
        last, turn = bits.index_select(-2, tables.last), tables.turns.byte().unsqueeze(2)
        bits = torch.cat(((last << turn | last >> bands - turn) & mask, bits), -2)
        now, *before = (bits[:, :, x : x + self.width] for x in (4, *(4 - tap for tap in trellis.TAPS)))
        y1, y0 = now ^ before[0] ^ before[2], before[1]
        # two bits each, of even bands and of odd ones
        pairs = torch.stack((y0 & 0x55 | (y1 & 0x55) << 1, y0 >> 1 & 0x55 | y1 & 0xAA), -3)
        shift = torch.arange(0, BANDS, 2, dtype=torch.uint8, device=bits.device).view(-1, 1, 1, 1)
        return (pairs.unsqueeze(-4) >> shift & 3).flatten(-4, -2)


class KLTKey(_KLT, KeyCodec[KLTCodes, None]):
    """Keys, rotated by their position within a tile: the transform of a score's query is that of the tile's start."""

    space: Space = "tile"

    def __init__(self, spec: ModelSpec, fields: Sequence[Fields], code: Code = SCALAR, joint: int = 1) -> None:
        super().__init__(spec, fields, code, joint)
        self.searches_gain = not code.trellis
        self.widening = 1.08 if code.trellis else 1.0  # chosen by KL divergence: SmolLM2-135M, notes/quality_log.md
        self._query_tables: dict[torch.dtype, CachedFromBuffers[QueryTables]] = {}

    def codebook_bytes(self) -> int:
        heads, head_dim, blocks = self.spec.num_kv_heads, self.spec.head_dim, ROPE_TILE // OFFSET_BLOCK
        # what 16-bit queries are multiplied with, offsets included
        offsets = heads * (4 * head_dim * blocks + 4 * (2 * head_dim + 1))
        return super().codebook_bytes() + 2 * self.basis.numel() + offsets

    def query_tables(self, offset: Tensor | None, rotations: TokenRotations, dtype: torch.dtype) -> QueryTables:
        """Tables of an offset [1, num_kv_heads, 1, head_dim] and of queries of a dtype."""

        def make() -> QueryTables:
            offsets = self.basis.new_empty(*self.mean.shape, 0)
            if offset is not None:
                turns = rotations.offsets(ROPE_TILE)
                blocks = Rotation(turns.cos[:, :, ::OFFSET_BLOCK], turns.sin[:, :, ::OFFSET_BLOCK])
                offsets = blocks.at_each_position(offset)[0].mT.float()
            return QueryTables.of(self.basis, self.tables, offsets, dtype, self.code.trellis)

        cached = self._query_tables.setdefault(dtype, CachedFromBuffers())
        return cached.get(make, self.basis, *([] if offset is None else [offset]))


class KLTValue(_KLT, ValueCodec[KLTCodes]):
    """Values."""

    widening = 1.15  # chosen by KL divergence: SmolLM2-135M, notes/quality_log.md
    unbiased = True
    max_magnitude = 0.99 * _LARGEST_GAIN / 2 ** (MAX_SHIFT / GAINS_PER_OCTAVE)

    def weighted_sum(self, weights: Tensor, codes: KLTCodes) -> Tensor:
        # the basis is applied to sums of codes: of each head's share, with the weights of all heads of its group
        joint, rows = self.joint, weights.shape[2]
        of_group = weights.unflatten(1, (-1, joint)).flatten(2, 3).repeat_interleave(joint, 1)
        sums = self._together((of_group * _decoded(codes.gain).transpose(-1, -2)) @ self._coded(codes)) @ self.basis.mT
        own = self._apart(sums).unflatten(1, (-1, joint)).unflatten(3, (joint, rows)).diagonal(dim1=2, dim2=3)
        return own.movedim(-1, 2).flatten(1, 2) + weights.sum(-1, keepdim=True) * self.mean.unsqueeze(1)


def _inverted(basis: Tensor) -> Tensor:
    """Inverses of bases [groups, channels, channels], 0 for those that are 0 because nothing was fitted."""
    inverse, failed = torch.linalg.inv_ex(basis.double())
    return torch.where(failed[:, None, None] > 0, 0.0, inverse).float().contiguous()


def _divisor(stored: Tensor) -> Tensor:
    """Gains by which channels are divided."""
    return _decoded(stored).clamp_min(1e-30)


def _decoded(stored: Tensor) -> Tensor:
    """Gains as they are stored, as numbers: float32 of the same shape."""
    x = stored.float()
    return torch.where(x > 0, torch.exp((x - UNIT_GAIN) * (math.log(2) / GAINS_PER_OCTAVE)), 0.0)
