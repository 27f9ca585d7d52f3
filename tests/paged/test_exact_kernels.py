"""Kernels of exact tokens in pages and rings, next to what they are in PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parts import DEVICE, make_codec
from torch import Tensor

from kvcli.methods.pages import PageTable
from kvcli.paged import kernels as paged_kernels
from kvcli.paged import reference as paged_reference
from kvcli.paged.batch import UniformBatch
from kvcli.paged.pages import PageFields
from kvcli.rope import NoRope, TokenRotations

PAGE = 32


MODULES: tuple[Any, Any] = paged_reference, paged_kernels


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(DEVICE, dtype)


def part_of(counts: int, past: list[int], closed: list[int], rings: list[int], order: Tensor) -> UniformBatch:
    requests = len(past)
    return UniformBatch(
        tokens=order[: requests * counts].view(requests, counts).to(DEVICE),
        first=-1,
        num_computed_tokens=torch.tensor(past, device=DEVICE),
        num_coded=torch.tensor(closed, dtype=torch.int32, device=DEVICE),
        ring_slots=torch.tensor(rings, device=DEVICE),
        pages=PageTable(torch.tensor([[4 - i, -1] for i in range(requests)], dtype=torch.int32, device=DEVICE), PAGE),
        rotations=TokenRotations.first(NoRope(8, DEVICE), 2 * PAGE, DEVICE),
        has_codes=True,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "sinks", "ring", "count", "new", "extra"),
    [
        (4, 2, 16, 3, 7, 1, True, {}),
        (6, 2, 20, 0, 33, 5, True, {"soft_cap": 2.0}),
        (3, 3, 64, 2, 0, 40, True, {"logits": True}),
        (8, 1, 32, 4, 63, 70, False, {}),
        (2, 2, 24, 0, 0, 2, True, {"logits": True}),
    ],
)
def test_attention_is_that_of_the_reference(
    heads: int, kv_heads: int, width: int, sinks: int, ring: int, count: int, new: bool, extra: dict[str, Any],
    others: bool, dtype: torch.dtype,
) -> None:  # fmt: skip
    """Short and long requests, and what is not written is NaN."""
    torch.manual_seed(0)
    past = [0, 2, 45, 300]
    closed = [0, 0, 45 - min(ring, 20), 300 - ring // 2]
    part = part_of(count, past, closed, [2, 0, 4, 1], torch.randperm(4 * count + 3))
    tokens = 4 * count + 3
    query, key, value = (random(tokens, n, width, dtype=dtype) for n in (heads, kv_heads, kv_heads))
    pages = random(6, sinks, 2, kv_heads, width, dtype=dtype)
    rings = random(5, ring, 2, kv_heads, width, dtype=dtype)
    pages[4], rings[2] = float("nan"), float("nan")  # of the first request
    pages[3, 2:], rings[0, 2:] = float("nan"), float("nan")  # of the second
    logits = random(heads) if extra.get("logits") else None
    state = random(4, heads, count, width), random(4, heads, count)
    state[0][1], state[1][1] = 0.0, float("-inf")
    found = []
    for exact in MODULES:
        output = torch.full((tokens, heads, width), 7.0, dtype=dtype, device=DEVICE)
        exact.attend(
            query, key, value, pages, rings, part, state if others else None, 0.3, extra.get("soft_cap"), logits,
            output, new=new,
        )  # fmt: skip
        found.append(output)
    assert (found[1] == 7.0).all(2).all(1).sum() == 3
    assert not found[0].isnan().any()
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(found[1], found[0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("kv_heads", "width"), [(2, 16), (3, 20), (1, 80)])
def test_tokens_are_stored_as_in_the_reference(kv_heads: int, width: int) -> None:
    torch.manual_seed(0)
    qkv = random(6, 3 * kv_heads, width)
    key, value = qkv[:, kv_heads : 2 * kv_heads], qkv[:, 2 * kv_heads :]
    for shape, places in (
        ((5, 3, 2, kv_heads, width), [[4, -1, 0, -1, 4, -1], [2, -1, 0, -1, 0, -1]]),
        ((9, 2, kv_heads, width), [[8, -1, 0, 3, -1, 4]]),
    ):
        found = []
        for exact in MODULES:
            stored = torch.zeros(shape, device=DEVICE)
            exact.store(key, value, stored, torch.tensor(places, device=DEVICE))
            found.append(stored)
        assert torch.equal(*found)
        assert found[0].any(-1).any(-1).all(-1).sum() == sum(x >= 0 for x in places[0])


@pytest.mark.parametrize(("kv_heads", "width"), [(2, 16), (3, 20), (1, 80)])
def test_what_is_encoded_is_selected_as_in_the_reference(kv_heads: int, width: int) -> None:
    """Of new tokens, which are not contiguous; blank ones, whose numbers may be NaN, are zeros."""
    torch.manual_seed(0)
    qkv = random(6, 3 * kv_heads, width, dtype=torch.float16)
    qkv[3] = float("nan")
    key, value = qkv[:, kv_heads : 2 * kv_heads], qkv[:, 2 * kv_heads :]
    cases: list[Any] = [
        (None, [0, 1, 0, 1, 0, 0]),
        ([5, 3, 0], [0, 1, 0]),
        ([5, 0, 1, 1], None),
        (None, None),
        ([], []),
    ]
    for stored, blank in cases:
        where = [
            None if x is None else torch.tensor(x, dtype=kind, device=DEVICE)
            for x, kind in ((stored, torch.int64), (blank, torch.bool))
        ]
        found = [module.select(key, value, *where) for module in MODULES]
        for i, new in enumerate((key, value)):
            expected = new.clone() if stored is None else new[where[0]]
            if blank is not None:
                expected[where[1]] = 0
            for ours in found:
                assert ours[i].dtype == torch.float16
                torch.testing.assert_close(ours[i], expected, rtol=0, atol=0, equal_nan=True)


def test_codes_are_put_into_pages_as_in_the_reference() -> None:
    """Fields with one head and with several, of one token and of groups, and what is beside them stays."""
    torch.manual_seed(0)
    for names in (("turboquant", "kvquant"), ("kivi",), ("fp8", "rtn")):
        fields, start = [], 16
        for name in names:
            codec = make_codec(name, 4, 2, 64)[1].key
            fields.append((codec, PageFields(codec, torch.float32, DEVICE, 64, start)))
            start = fields[-1][1].stop
        group = fields[0][0].tokens_per_group
        page, place = torch.tensor([[6, 0, 3, 6], [63 // group, 0, 7 // group, 0]], device=DEVICE)
        codes = [(x, codec.encode(random(1, 2, 4 * group, 64), None)) for codec, x in fields]
        found = []
        for module in MODULES:
            pages = torch.full((7, start + 16), 99, dtype=torch.uint8, device=DEVICE)
            module.put(pages, page, place, *codes)
            found.append(pages)
        assert torch.equal(*found)
        assert all((beside == 99).all() for beside in (found[1][:, :16], found[1][:, start:], found[1][[1, 2, 4, 5]]))
        for x, new in codes:
            for name, field in x.view(found[1]).tensors().items():
                entries = field.shape[2] // (64 // group)
                for i in range(4):
                    at = int(place[i]) * entries
                    stored = field[page[i], :, at : at + entries]
                    assert torch.equal(stored, new.tensors()[name][0, :, i * entries : (i + 1) * entries])


def test_codes_of_other_groups_are_not_put_into_pages() -> None:
    codec = make_codec("fp8", 4, 2, 64)[1].key
    fields, pages = (
        PageFields(codec, torch.float32, DEVICE, 64),
        torch.zeros(2, 2**14, dtype=torch.uint8, device=DEVICE),
    )
    page = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    for count, match in ((4, "for 3 groups"), (2, "for 3 groups")):
        for module in MODULES:
            with pytest.raises(ValueError, match=match):
                module.put(pages, page, page, (fields, codec.encode(random(1, 2, count, 64), None)))
    assert not pages.any()


@pytest.mark.parametrize(("kv_heads", "width"), [(2, 16), (3, 20), (1, 80)])
def test_groups_are_gathered_as_in_the_reference(kv_heads: int, width: int) -> None:
    """Of new keys, which are not contiguous, and of recent ones, in the dtype of these."""
    torch.manual_seed(0)
    of_pass = random(6, 3 * kv_heads, width)[:, kv_heads : 2 * kv_heads]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        key = of_pass.bfloat16() if dtype == torch.bfloat16 else of_pass
        recent = random(9, 2, kv_heads, width, dtype=dtype)
        is_new = torch.tensor([True, False, False, True, True], device=DEVICE)
        token = torch.tensor([5, 8, 0, 0, 3], device=DEVICE)
        found = [module.gather(key, recent, is_new, token) for module in MODULES]
        assert found[1].dtype == dtype
        assert torch.equal(*found)
        assert torch.equal(found[0][1], recent[8, 0])
        assert torch.equal(found[0][4], key[3].to(dtype))


def test_rings_are_copied_as_in_the_reference() -> None:
    for ring in (5, 0):
        rings, places = random(6, ring, 2, 3, 20), torch.tensor([[1, 2, 2, 5], [1, 4, 2, 0]], device=DEVICE)
        found = [rings.clone(), rings.clone()]
        for exact, mine in zip(MODULES, found, strict=True):
            exact.copy_rings(mine, places)
        assert torch.equal(*found)
        assert torch.equal(found[0], rings[[5, 1, 2, 3, 2, 5]])
