"""Kernels of exact tokens in pages and rings, next to what they are in PyTorch."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from parts import DEVICE, make_codec
from torch import Tensor

from kvcli.methods.pages import PageTable
from kvcli.paged import kernels as paged_kernels
from kvcli.paged import reference as paged_reference
from kvcli.paged.batch import UniformBatch
from kvcli.paged.pages import NewCodes, PageFields
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
    recent = torch.full((1, tokens), -1, device=DEVICE)
    stored = part.tokens[2:].flip(1)[:, : min(ring, 5)]  # the last ones; those of the first requests are not stored
    recent[0, stored] = part.ring_slots[2:, None] * ring + torch.arange(stored.shape[1], device=DEVICE) * 2 % max(
        ring, 1
    )
    found, kept = [], []
    for exact in MODULES:
        output, written = torch.full((tokens, heads, width), 7.0, dtype=dtype, device=DEVICE), rings.clone()
        own = torch.empty_like(state[0]), torch.empty_like(state[1])
        exact.attend(query, key, value, pages, written, part, recent, own, 0.3, extra.get("soft_cap"), new=new)
        exact.merge(part, own, state if others else None, logits, output)
        found.append(output)
        kept.append(written)
    torch.testing.assert_close(*kept, rtol=0, atol=0, equal_nan=True)
    for place, token in zip(recent[0, stored].flatten(), stored.flatten(), strict=True):
        assert torch.equal(kept[1].flatten(0, 1)[place], torch.stack((key[token], value[token])))
    assert len(stored.flatten()) == 2 * min(ring, count, 5)
    assert (found[1] == 7.0).all(2).all(1).sum() == 3
    assert not found[0].isnan().any()
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(found[1], found[0], rtol=tolerance, atol=tolerance)


def batch_of(stored: list[int] | None, blank: list[int] | None, sinks: list[list[int]], copies: list[list[int]]) -> Any:
    """What `prepare` reads of a batch."""
    return SimpleNamespace(
        stored=None if stored is None else torch.tensor(stored, dtype=torch.int64, device=DEVICE),
        is_blank=None if blank is None else torch.tensor(blank, dtype=torch.bool, device=DEVICE),
        sinks=torch.tensor(sinks, device=DEVICE),
        ring_copies=torch.tensor(copies, device=DEVICE),
    )


@pytest.mark.parametrize("dtypes", [(torch.float16, torch.float16), (torch.float32, torch.float16)])
@pytest.mark.parametrize(("kv_heads", "width"), [(2, 16), (3, 20), (1, 80)])
@pytest.mark.parametrize(
    ("stored", "blank"),
    [(None, [0, 1, 0, 1, 0, 0]), ([5, 3, 0], [0, 1, 0]), ([5, 0, 1, 1], None), (None, None), ([], [])],
)
def test_new_tokens_are_prepared_as_in_the_reference(
    stored: list[int] | None, blank: list[int] | None, kv_heads: int, width: int, dtypes: tuple[torch.dtype, ...]
) -> None:
    """New tokens are not contiguous; blank ones, whose numbers may be NaN, are zeros; sinks and rings of a dtype."""
    torch.manual_seed(0)
    qkv = random(6, 3 * kv_heads, width, dtype=dtypes[0])
    qkv[3] = float("nan")
    key, value = qkv[:, kv_heads : 2 * kv_heads], qkv[:, 2 * kv_heads :]
    sinks, rings = random(5, 3, 2, kv_heads, width, dtype=dtypes[1]), random(6, 7, 2, kv_heads, width, dtype=dtypes[1])
    batch = batch_of(
        stored,
        blank,
        [[4, -1, 0, -1, 4, -1], [2, -1, 0, -1, 0, -1]],
        [[1, 2, 2, 5], [1, 4, 2, 0], [-1, 1, -1, -1], [0, 4 * 7 + 3, 0, 0]],
    )
    found = []
    for module in MODULES:
        written = sinks.clone(), rings.clone()
        found.append((*module.prepare(key, value, *written, batch), *written))
    for i, new in enumerate((key, value)):
        expected = new.clone() if stored is None else new[batch.stored]
        if blank is not None:
            expected[batch.is_blank] = 0
        for ours in found:
            assert ours[i].dtype == dtypes[0]
            torch.testing.assert_close(ours[i], expected, rtol=0, atol=0, equal_nan=True)
    expected = sinks.clone()
    for token, page, place in ((0, 4, 2), (2, 0, 0), (4, 4, 0)):
        expected[page, place] = torch.stack((key[token], value[token])).to(dtypes[1])
    assert all(torch.equal(ours[2], expected) for ours in found)
    kept = rings[[5, 1, 2, 3, 2, 5]]
    kept[4, 3] = torch.stack((key[1], value[1]))  # the token that follows
    assert all(torch.equal(ours[3], kept) for ours in found)


@pytest.mark.parametrize(("sinks", "ring"), [(0, 5), (2, 0)])
def test_nothing_is_kept_where_there_is_no_place(sinks: int, ring: int) -> None:
    key, pages, rings = random(2, 1, 16), random(3, sinks, 2, 1, 16), random(4, ring, 2, 1, 16)
    batch = batch_of(None, [1, 0], [[-1, -1]] * 2, [[1, 3], [1, 3], [-1, -1], [0, 0]])
    for module in MODULES:
        written = pages.clone(), rings.clone()
        selected = module.prepare(key, key, *written, batch)
        assert torch.equal(selected[1], torch.stack((torch.zeros_like(key[0]), key[1])))
        assert all(map(torch.equal, written, (pages, rings)))


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
            module.put(pages, *(NewCodes(page, place, x, new) for x, new in codes))
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
    fields = PageFields(codec, torch.float32, DEVICE, 64)
    pages = torch.zeros(2, 2**14, dtype=torch.uint8, device=DEVICE)
    page = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    for count, match in ((4, "for 3 groups"), (2, "for 3 groups")):
        for module in MODULES:
            with pytest.raises(ValueError, match=match):
                module.put(pages, NewCodes(page, page, fields, codec.encode(random(1, 2, count, 64), None)))
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


def test_groups_of_keys_and_their_values_go_to_places_of_their_own() -> None:
    """Four tokens' values and two groups' keys, and one token's value beside three groups."""
    torch.manual_seed(0)
    key, value = make_codec("kivi", 2, 2, 32)[1].key, make_codec("kivi", 2, 2, 32)[1].value
    keys = PageFields(key, torch.float32, DEVICE, 64)
    values = PageFields(value, torch.float32, DEVICE, 64, keys.stop)
    for tokens, groups in ((4, 2), (1, 3)):
        places = [torch.tensor(x, device=DEVICE) for x in ([6, 0, 3, 6][:tokens], [63, 0, 7, 1][:tokens])]
        others = [torch.tensor(x, device=DEVICE) for x in ([2, 6, 0][:groups], [1, 0, 1][:groups])]
        new = (
            NewCodes(*places, values, value.encode(random(1, 2, tokens, 32), None)),
            NewCodes(*others, keys, key.encode(random(1, 2, 32 * groups, 32), None)),
        )
        found = []
        for module in MODULES:
            pages = torch.full((7, values.stop), 99, dtype=torch.uint8, device=DEVICE)
            module.put(pages, *new)
            found.append(pages)
        assert torch.equal(*found)
        for where, x in zip((places, others), new, strict=True):
            for name, field in x.layout.view(found[1]).tensors().items():
                stored = field.unflatten(2, (64 // x.layout.group, -1))[where[0], :, where[1]]
                assert torch.equal(stored.transpose(0, 1).flatten(1, 2), x.codes.tensors()[name][0])
