"""Packing of small unsigned integers into bytes along the last axis: as one little-endian bit stream, or in planes.

Products with packed codes need no particular order of the codes: `byte_fields` takes all codes out of their bytes as
they lie there, and `planes_to_fields` or `stream_to_fields` bring the other factor into the same order.
"""

from __future__ import annotations

import math
from functools import cache, reduce
from operator import or_

import torch
from torch import Tensor

MAX_BITS = 16

_WORD_BITS = 56
"""Up to so many bits, those after which codes and bytes begin together again are one integer."""


def packed_size(count: int, n_bits: int) -> int:
    """Bytes that `count` codes of `n_bits` bits take: ceil(count * n_bits / 8)."""
    return (count * n_bits + 7) // 8


def pack_bits(codes: Tensor, n_bits: int) -> Tensor:
    """Packs codes into bytes; code i takes bits [i * n_bits, (i + 1) * n_bits) of the stream.

    Integers [..., count] in [0, 2**n_bits), of 1 to 16 bits, become uint8 [..., ceil(count * n_bits / 8)]; unused high
    bits of the last byte are 0.
    """
    _check(n_bits)
    count, period = codes.shape[-1], math.lcm(n_bits, 8)
    if -count * n_bits % period:
        codes = torch.nn.functional.pad(codes, (0, -count % (period // n_bits)))
    if period <= _WORD_BITS:
        words = (codes.long().unflatten(-1, (-1, period // n_bits)) << _shifts(n_bits, period, codes.device)).sum(-1)
        packed = words.unsqueeze(-1) >> _shifts(8, period, codes.device)
    else:
        bits = (codes.int().unsqueeze(-1) >> _shifts(1, n_bits, codes.device) & 1).flatten(-2).unflatten(-1, (-1, 8))
        packed = (bits << _shifts(1, 8, codes.device)).sum(-1, keepdim=True)
    return (packed & 255).to(torch.uint8).flatten(-2)[..., : packed_size(count, n_bits)].contiguous()


def unpack_bits(packed: Tensor, n_bits: int, count: int) -> Tensor:
    """Inverse of `pack_bits`: uint8 [..., ceil(count * n_bits / 8)] to int32 [..., count]."""
    _check(n_bits)
    if n_bits in (1, 2, 4):
        looked_up = torch.nn.functional.embedding(packed.int(), _codes_of_bytes(n_bits, packed.device))
        return looked_up.flatten(-2)[..., :count]
    period = math.lcm(n_bits, 8)
    size = period // 8
    if packed.shape[-1] % size:
        packed = torch.nn.functional.pad(packed, (0, -packed.shape[-1] % size))
    if period <= _WORD_BITS:
        parts = packed.unflatten(-1, (-1, size)).to(torch.int32 if period < 32 else torch.int64).unbind(-1)
        words = reduce(or_, (part << (8 * byte) for byte, part in enumerate(parts)))
        codes = words.unsqueeze(-1) >> _shifts(n_bits, period, packed.device) & ((1 << n_bits) - 1)
        return codes.flatten(-2)[..., :count].int()
    parts, codes = packed.unflatten(-1, (-1, size)).int().unbind(-1), []
    for start in range(0, period, n_bits):  # each code of a period lies in the same bits of one to three bytes
        spanned = range(start // 8, (start + n_bits + 7) // 8)
        word = reduce(or_, (parts[byte] << (8 * i) for i, byte in enumerate(spanned)))
        codes.append((word >> (start % 8)) & ((1 << n_bits) - 1))
    return torch.stack(codes, dim=-1).flatten(-2)[..., :count]


@cache
def _shifts(step: int, stop: int, device: torch.device) -> Tensor:
    """Bit positions of what lies in a word, int32 [stop / step]."""
    with torch.inference_mode(False):
        return torch.arange(0, stop, step, device=device, dtype=torch.int32)


@cache
def _codes_of_bytes(n_bits: int, device: torch.device) -> Tensor:
    """The codes of each byte, int32 [256, 8 / n_bits]."""
    shifts = torch.arange(0, 8, n_bits, device=device, dtype=torch.int32)
    with torch.inference_mode(False):
        return (torch.arange(256, device=device, dtype=torch.int32).unsqueeze(1) >> shifts) & ((1 << n_bits) - 1)


def planes_size(count: int, n_bits: int) -> int:
    """Bytes that `pack_planes` makes of `count` codes: whole 16-bit words."""
    return 2 * -(-count * n_bits // 16)


def pack_planes(codes: Tensor, n_bits: int) -> Tensor:
    """Packs codes into 16-bit words, consecutive codes into consecutive words.

    Code i takes bits [n_bits * (i // W), n_bits * (i // W + 1)) of word i % W, with W words in all. One mask then
    extracts a field of each word: W consecutive codes (`kvcli.kernels.words`). Integers [..., count] in [0, 2**n_bits),
    with a divisor of 16 as bits, become uint8 [..., planes_size(count, n_bits)], words little-endian; unused fields
    are 0.
    """
    words = planes_size(codes.shape[-1], n_bits) // 2
    if codes.shape[-1] % words:
        codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % words))
    planes = codes.int().unflatten(-1, (-1, words))
    fields = planes << _plane_shifts(n_bits, planes.shape[-2], codes.device)
    return fields.sum(-2, dtype=torch.int32).to(torch.int16).view(torch.uint8)


def unpack_planes(packed: Tensor, n_bits: int, count: int) -> Tensor:
    """Inverse of `pack_planes`: uint8 [..., planes_size(count, n_bits)] to int32 [..., count]."""
    words = packed.view(torch.int16).int().unsqueeze(-2)
    codes = (words >> _plane_shifts(n_bits, 16 // n_bits, packed.device)) & (2**n_bits - 1)
    return codes.flatten(-2)[..., :count]


@cache
def _plane_shifts(n_bits: int, count: int, device: torch.device) -> Tensor:
    """Bit positions of the codes of the first planes in their words, int32 [count, 1]."""
    with torch.inference_mode(False):
        return n_bits * torch.arange(count, device=device, dtype=torch.int32).unsqueeze(1)


def byte_fields(packed: Tensor, n_bits: int) -> Tensor:
    """The codes where they lie in the bytes, which costs much less than to bring them into order.

    Bytes, uint8 [..., bytes], of codes whose bits are a divisor of 8 become float32 [..., 8 / n_bits * bytes]: for each
    field f of a byte, a code times 2^(f * n_bits), byte after byte.
    """
    if n_bits == 8:
        return packed.float()
    # as many copies of a byte as it has fields, then one mask for all of them; integers wrap around
    wide, copies, mask = _COPIES[n_bits]
    return packed.to(wide).mul_(copies).bitwise_and_(mask).view(torch.uint8).float()


_COPIES = {
    1: (torch.int64, 0x0101010101010101, 0x8040201008040201 - 2**64),
    2: (torch.int32, 0x01010101, 0xC0300C03 - 2**32),
    4: (torch.int16, 0x0101, 0xF00F - 2**16),
}
"""By bits of a code: an integer with a byte for each field of a byte, what copies the byte into all, the fields."""


def stream_to_fields(x: Tensor, n_bits: int) -> Tensor:
    """x [..., count] rearranged for products with the `byte_fields` of codes of `pack_bits`."""
    fields = 8 // n_bits
    padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % fields))
    return (padded.unflatten(-1, (-1, fields)) * _field_units(n_bits, x.device)).flatten(-2)


def planes_in_fields(x: Tensor, n_bits: int) -> Tensor:
    """Numbers x [..., count] of the codes of `pack_planes` in the order of their `byte_fields`, any where none is."""
    return x.index_select(-1, _codes_in_fields(n_bits, x.shape[-1], x.device)[0])


def planes_to_fields(x: Tensor, n_bits: int) -> Tensor:
    """x [..., count] rearranged for products with the `byte_fields` of codes of `pack_planes`."""
    return planes_in_fields(x, n_bits) * _codes_in_fields(n_bits, x.shape[-1], x.device)[1]


def fields_to_planes(sums: Tensor, n_bits: int, count: int) -> Tensor:
    """Sums of the `byte_fields` of `pack_planes` [..., fields], as sums of the codes in their order [..., count]."""
    index, units = _fields_of_codes(n_bits, count, sums.device)
    return sums.index_select(-1, index) * units


@cache
def _codes_in_fields(n_bits: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The code in each field of the bytes of `pack_planes`, and its unit, 0 where none is: int64, float32 [fields]."""
    with torch.inference_mode(False):
        # a byte is the low or the high half of a word
        sizes = planes_size(count, n_bits) // 2, 2, 8 // n_bits
        place = torch.cartesian_prod(*(torch.arange(size, device=device) for size in sizes))
        word, half, field = place.unbind(-1)
        code = (half * sizes[2] + field) * sizes[0] + word
        units = _field_units(n_bits, device)[field].masked_fill(code >= count, 0.0)
        return code.clamp(max=count - 1), units


@cache
def _fields_of_codes(n_bits: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The field of each code of `pack_planes`, and its unit: int64, float32 [count]."""
    code, units = _codes_in_fields(n_bits, count, device)
    with torch.inference_mode(False):
        fields = units.nonzero().squeeze(-1)
        fields = fields[code[fields].argsort()]
        return fields, units[fields]


@cache
def _field_units(n_bits: int, device: torch.device) -> Tensor:
    """2^-(f * n_bits) for each field f of a byte: float32 [8 / n_bits]."""
    with torch.inference_mode(False):
        return torch.exp2(-torch.arange(0.0, 8.0, n_bits, device=device))


def _check(n_bits: int) -> None:
    if not 1 <= n_bits <= MAX_BITS:
        raise ValueError(f"n_bits must lie in 1..{MAX_BITS}, got {n_bits}")
