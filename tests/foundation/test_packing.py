"""Codes as bits in bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcli.methods.packing import pack_bits, pack_planes, packed_size, planes_size, unpack_bits, unpack_planes


@settings(max_examples=200, deadline=None)
@given(n_bits=st.integers(1, 16), count=st.integers(1, 40), seed=st.integers(0, 1000))
def test_packing_round_trip_without_waste(n_bits: int, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**n_bits, (2, 3, count), generator=generator)
    packed = pack_bits(codes, n_bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (2, 3, packed_size(count, n_bits)) == (2, 3, -(-count * n_bits // 8))
    assert torch.equal(unpack_bits(packed, n_bits, count), codes.int())


def test_packing_is_little_endian() -> None:
    assert pack_bits(torch.tensor([0xABC, 0x123]), 12).tolist() == [0xBC, 0x3A, 0x12]
    assert pack_bits(torch.tensor([1, 0, 0, 0, 0, 0, 0, 0, 1]), 1).tolist() == [1, 1]


@pytest.mark.parametrize(("n_bits", "count"), [(1, 80), (2, 128), (4, 96), (8, 64), (2, 33), (1, 5)])
def test_planes_round_trip(n_bits: int, count: int) -> None:
    codes = torch.randint(0, 2**n_bits, (2, 3, count))
    packed = pack_planes(codes, n_bits)
    assert packed.shape[-1] == planes_size(count, n_bits) <= packed_size(count, n_bits) + 1
    assert torch.equal(unpack_planes(packed, n_bits, count), codes.int())


def test_planes_are_far_apart_in_a_word() -> None:
    words = pack_planes(torch.tensor([3, 0, 1, 2] + [0] * 12), 2).view(torch.int16)
    assert words.tolist() == [3 | 1 << 2, 0 | 2 << 2]


@pytest.mark.parametrize("n_bits", [0, 17])
def test_packing_refuses_other_widths(n_bits: int) -> None:
    with pytest.raises(ValueError, match="n_bits"):
        pack_bits(torch.zeros(3, dtype=torch.long), n_bits)
