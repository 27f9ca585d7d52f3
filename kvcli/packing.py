"""Packing of small unsigned integers into bytes along the last axis: as one little-endian bit stream, or in planes."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_BITS = 16


def packed_size(count: int, n_bits: int) -> int:
    """Bytes that `count` codes of `n_bits` bits take: ceil(count * n_bits / 8)."""
    return (count * n_bits + 7) // 8


def pack_bits(codes: Tensor, n_bits: int) -> Tensor:
    """Packs codes into bytes; code i takes bits [i * n_bits, (i + 1) * n_bits) of the stream.

    Args:
        codes: [..., count] integers in [0, 2**n_bits).
        n_bits: bits per code, 1 to 16.

    Returns:
        uint8 [..., ceil(count * n_bits / 8)]; unused high bits of the last byte are 0.
    """
    _check(n_bits)
    shifts = torch.arange(n_bits, device=codes.device, dtype=torch.int32)
    bits = (codes.to(torch.int32).unsqueeze(-1) >> shifts & 1).flatten(-2)
    padding = -bits.shape[-1] % 8
    if padding:
        bits = torch.nn.functional.pad(bits, (0, padding))
    weights = 1 << torch.arange(8, device=codes.device, dtype=torch.int32)
    return (bits.unflatten(-1, (-1, 8)) * weights).sum(-1).to(torch.uint8)


def unpack_bits(packed: Tensor, n_bits: int, count: int) -> Tensor:
    """Inverse of `pack_bits`.

    Args:
        packed: uint8 [..., ceil(count * n_bits / 8)].
        n_bits: bits per code, 1 to 16.
        count: number of codes.

    Returns:
        int32 [..., count].
    """
    _check(n_bits)
    offsets = torch.arange(count, device=packed.device) * n_bits
    first = offsets // 8
    last = packed.shape[-1] - 1
    word = packed[..., first].to(torch.int32)
    for byte in range(1, (n_bits + 14) // 8):  # a code that starts at bit 7 spans this many bytes
        # the byte past the end holds no bit of any code, and what is read instead is masked off
        word |= packed[..., (first + byte).clamp(max=last)].to(torch.int32) << (8 * byte)
    return (word >> (offsets % 8).to(torch.int32)) & ((1 << n_bits) - 1)


def planes_size(count: int, n_bits: int) -> int:
    """Bytes that `pack_planes` makes of `count` codes: whole 16-bit words."""
    return 2 * -(-count * n_bits // 16)


def pack_planes(codes: Tensor, n_bits: int) -> Tensor:
    """Packs codes into 16-bit words, consecutive codes into consecutive words.

    Code i takes bits [n_bits * (i // W), n_bits * (i // W + 1)) of word i % W, with W words in all. One mask then
    extracts a field of each word: W consecutive codes (`kvcli.kernels.words`).

    Args:
        codes: [..., count] integers in [0, 2**n_bits).
        n_bits: bits per code, a divisor of 16.

    Returns:
        uint8 [..., planes_size(count, n_bits)], words little-endian; unused fields are 0.
    """
    words = planes_size(codes.shape[-1], n_bits) // 2
    padded = torch.nn.functional.pad(codes, (0, words * (16 // n_bits) - codes.shape[-1]))
    return pack_bits(padded.unflatten(-1, (-1, words)).transpose(-1, -2).flatten(-2), n_bits)


def unpack_planes(packed: Tensor, n_bits: int, count: int) -> Tensor:
    """Inverse of `pack_planes`: uint8 [..., planes_size(count, n_bits)] to int32 [..., count]."""
    words = packed.shape[-1] // 2
    codes = unpack_bits(packed, n_bits, words * (16 // n_bits))
    return codes.unflatten(-1, (words, -1)).transpose(-1, -2).flatten(-2)[..., :count]


def _check(n_bits: int) -> None:
    if not 1 <= n_bits <= MAX_BITS:
        raise ValueError(f"n_bits must lie in 1..{MAX_BITS}, got {n_bits}")
