"""Kernels that read codes from pages give what they give for the same codes in rows, bit for bit."""

import dataclasses
from importlib import import_module
from typing import Any

import pytest
import torch
from parts import DEVICE, TOLERANCE, make_codec, make_part
from torch import Tensor

from kvcli.attention.decoded import attend_dequantized
from kvcli.attention.reference import attend_codes as reference_attend
from kvcli.attention.reference import partial_attention
from kvcli.errors import UsageError
from kvcli.kernels import splits
from kvcli.methods import token_attend_kernels
from kvcli.methods.base import Codes
from kvcli.methods.commvq import value_kernels as commvq_values
from kvcli.methods.layer_codec import EncodedTokens
from kvcli.methods.pages import PageTable
from kvcli.methods.token_attend_kernels import _Operand

SPARE = 5
"""Pages of a pool that no row has."""

HALF, FLOAT = torch.float16, torch.float32

CASES = [
    # method, heads, kv heads, head_dim, queries, page size, tokens of each row, dtype, settings
    ("klt-2", 4, 2, 64, 1, 16, [75, 0, 33], HALF, {}),
    ("klt-2", 4, 1, 128, 2, 32, [100], FLOAT, {}),
    ("klt-3", 8, 2, 64, 1, 64, [130, 64, 1], HALF, {}),
    ("klt-1", 4, 2, 64, 1, 256, [300], HALF, {}),
    ("klt-tcq-2", 4, 2, 64, 1, 16, [75, 0, 33], HALF, {}),
    ("klt-tcq-3", 4, 1, 128, 2, 32, [100], FLOAT, {}),
    ("kivi-2", 4, 1, 128, 1, 32, [192, 0, 96], HALF, {}),
    ("kivi-2", 4, 4, 64, 1, 64, [160], HALF, {}),  # eight groups at once
    ("kivi-4", 8, 1, 96, 2, 128, [160, 32, 128], FLOAT, {}),
    ("kivi-1", 3, 1, 80, 1, 16, [80], HALF, {"group_size": 16}),
    ("kivi-2", 2, 1, 64, 1, 128, [128, 256, 0], HALF, {"group_size": 128}),
    ("squat-2", 4, 2, 64, 1, 64, [192, 32], FLOAT, {}),
    ("squat-pre-2", 4, 1, 128, 1, 32, [96, 0, 32], HALF, {}),
    ("squat-pre-4", 4, 2, 64, 3, 256, [288], FLOAT, {}),
    ("qjl", 4, 2, 64, 1, 16, [75, 0, 33], HALF, {}),
    ("qjl", 4, 1, 128, 2, 64, [150], FLOAT, {}),
    ("qjl", 2, 2, 64, 1, 256, [300, 1, 256], HALF, {"num_outliers": 0}),
    ("rtn-4", 4, 2, 64, 1, 16, [75, 0, 33], HALF, {}),
    ("rtn-2", 4, 1, 128, 2, 32, [100], FLOAT, {}),
    ("rtn-2", 2, 1, 10, 1, 16, [16, 21], HALF, {"group_size": 10}),  # five numbers of a word's eight
    ("oscar-2", 8, 2, 64, 1, 64, [130, 64, 1], HALF, {}),
    ("fp8", 4, 2, 64, 1, 256, [300], HALF, {}),
    ("turboquant-3", 4, 2, 64, 1, 16, [75, 0, 33], HALF, {}),
    ("commvq-1", 4, 2, 64, 1, 16, [75, 0, 33], HALF, {}),
    ("commvq-1", 4, 1, 128, 2, 32, [100], FLOAT, {"pairs_per_group": 64}),
    ("commvq-2", 2, 2, 64, 1, 64, [130, 64, 1], HALF, {"pairs_per_group": 16, "key_norm": "per_head"}),
    ("commvq-1", 4, 2, 128, 1, 16, [70], HALF, {"value_code_bits": 560}),  # 35 words of value bits per token
    ("commvq-1", 8, 4, 64, 1, 16, [75, 0, 33], HALF, {"value_groups": 2}),
    ("commvq-1", 2, 1, 128, 1, 256, [130, 0], HALF, {"codebook_size": 256, "num_residuals": 6}),  # two passes of keys
]


def pool(page: Codes, num_pages: int) -> Any:
    """Pages like this one, as views of a pool whose bytes are 255: floats of it are NaN."""
    fields = list(page.tensors().values())
    data = torch.full((num_pages, sum(x.nbytes for x in fields) + 48), 255, dtype=torch.uint8, device=DEVICE)
    parts = data[:, 16:-32].split([x.nbytes for x in fields], 1)
    return type(page)(*[x.view(y.dtype).unflatten(1, y.shape[1:]) for x, y in zip(parts, fields, strict=True)])


def in_pages(part: EncodedTokens, page_size: int) -> EncodedTokens:
    """The same tokens in pages of a pool; after the end of a row, there are bytes of 255 and no pages in the table."""
    assert part.lengths is not None
    batch, most = len(part.lengths), part.length // page_size
    order = torch.randperm(batch * most + SPARE, generator=torch.Generator().manual_seed(0))
    pages = PageTable(order[SPARE:].view(batch, most).int().to(DEVICE), page_size)
    sides = []
    for codes in (part.key_codes, part.value_codes):
        stored = pool(codes.slice(0, page_size).select([0]), len(order))
        for x, row_codes in zip(stored.tensors().values(), codes.tensors().values(), strict=True):
            x[pages.table.flatten()] = row_codes.unflatten(2, (most, -1)).transpose(1, 2).flatten(0, 1)
            for row, length in enumerate(part.lengths.tolist()):
                end = length * x.shape[2] // page_size
                for i, page in enumerate(pages.table[row].tolist()):
                    x[page, :, max(end - i * x.shape[2], 0) :] = 255 if x.dtype == torch.uint8 else torch.nan
        sides.append(stored)
    used = torch.arange(most, device=DEVICE) * page_size < part.lengths.unsqueeze(1)
    pages = PageTable(pages.table.where(used, -(2**30)), page_size)
    return dataclasses.replace(part, key_codes=sides[0], value_codes=sides[1], pages=pages)


def parts_of(case: Any) -> tuple[Any, Any, EncodedTokens, EncodedTokens]:
    """Attention kernels, codec, and random tokens in rows and in pages."""
    name, heads, kv_heads, head_dim, _, page_size, lengths, _, settings = case
    torch.manual_seed(0)
    method, codec = make_codec(name, heads, kv_heads, head_dim, **settings)
    length = -(-max(lengths) // page_size) * page_size
    part = make_part(codec, heads, len(lengths), length, lengths)
    kernels = None if method.attend_kernels is None else import_module(method.attend_kernels)
    return kernels, codec, part, in_pages(part, page_size)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:6])))
def test_attention_kernels_read_pages(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches in one split of several tiles, single rows in many splits."""
    if len(case[6]) > 1:
        monkeypatch.setattr(splits, "_PROGRAMS_PER_SM", 0)
        monkeypatch.setattr(commvq_values, "_PER_SM", 0)
        monkeypatch.setattr(token_attend_kernels, "_PROGRAMS_PER_SM", 0)
    kernels, codec, rows, paged = parts_of(case)
    query = torch.randn(len(case[6]), case[1], case[4], case[3], device=DEVICE).to(case[7])
    expected = kernels.fused_attend(codec, query, rows, 0.125)
    ours = kernels.fused_attend(codec, query, paged, 0.125)
    assert expected[0].isfinite().all()
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@pytest.mark.parametrize(
    "name", ["klt-2", "klt-tcq-2", "kivi-2", "squat-pre-2", "qjl", "commvq-1", "rtn-2", "fp8", "turboquant-3"]
)
def test_rows_shorter_than_the_table_are_divided_into_as_many_splits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three splits of up to 256 tokens, and of fewer where a row has fewer, but of whole tiles."""
    for module in (splits, commvq_values, token_attend_kernels):
        monkeypatch.setattr(module, "tokens_per_split", lambda *_: 256)
    seen: list[Tensor] = []
    merge = splits.merge_splits

    def spy(out: Tensor, lse: Tensor, *rest: Tensor) -> None:
        seen.append(lse)
        merge(out, lse, *rest)

    kernels, codec, rows, paged = parts_of((name, 2, 1, 64, 1, 256, [544, 288, 0], HALF, {}))
    for module in ("scalar.value_kernels", "klt.value_kernels", "commvq.value_kernels", "token_attend_kernels"):
        monkeypatch.setattr(import_module(f"kvcli.methods.{module}"), "merge_splits", spy)
    query = torch.randn(3, 2, 1, 64, device=DEVICE).half()
    expected, ours = (kernels.fused_attend(codec, query, part, 0.125) for part in (rows, paged))
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=TOLERANCE[HALF], atol=TOLERANCE[HALF])
    used = [x.isfinite().unflatten(0, (3, -1)).any(-1).any(1).sum(1).tolist() for x in seen]
    assert used == [[3, 2, 0], [3, 3, 0]]


SKIPPED = (("rtn-2", 32), ("fp8", 256), ("oscar-2", 64), ("turboquant-3", 16))


@pytest.mark.parametrize(
    "case", [*(CASES[i] for i in (0, 5, 9, 10, 12, 13, 15)), *(x for x in CASES if (x[0], x[5]) in SKIPPED)], ids=str
)
def test_the_first_tokens_are_skipped(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By kernels, by chunks and by the reference, as if these tokens had never been; their scores are the largest."""
    if len(case[6]) > 1:
        for module in (splits, token_attend_kernels):
            monkeypatch.setattr(module, "_PROGRAMS_PER_SM", 0)
    kernels, codec, rows, paged = parts_of(case)
    query = torch.randn(len(case[6]), case[1], case[4], case[3], device=DEVICE).to(case[7])
    rotation = None if rows.rotations is None else rows.rotations.tokens(0, rows.length)
    keys = codec.decode_keys(rows.key_codes, rows.key_state, rotation, torch.float32)
    values = codec.value.decode(rows.value_codes, None)
    scores = (query[:, :: case[1] // case[2], :1].float() @ keys.transpose(-1, -2))[:, :, 0]
    top = scores.amax((0, 1)).topk(1).indices.item()
    for skip in {4, top + 1}:
        token = torch.arange(rows.length, device=DEVICE)
        visible = (token >= skip) & (token < rows.lengths.unsqueeze(1))
        expected = partial_attention(query, keys, values, visible[:, None], 0.125)
        for attend in (kernels.fused_attend, attend_dequantized, reference_attend):
            codec.use_kernels(attend is not reference_attend)
            ours = attend(codec, query, dataclasses.replace(paged, skip=skip), 0.125)
            for a, b in zip(ours, expected, strict=True):
                assert torch.equal(a.isfinite(), b.isfinite())
                assert torch.allclose(a, b, atol=TOLERANCE[case[7]] * max(1.0, expected[0].abs().max().item())), skip


@pytest.mark.parametrize("name", ["kivi-2", "turboquant-3", "rtn-4", "klt-2", "fp8"])
@pytest.mark.parametrize("attend", [reference_attend, attend_dequantized])
def test_reference_and_chunk_kernels_read_pages(attend: Any, name: str) -> None:
    """Of any method, by codes that are gathered; many queries, and few."""
    _, codec, rows, paged = parts_of((name, 4, 2, 64, 1, 32, [96, 0, 64], FLOAT, {}))
    codec.use_kernels(attend is attend_dequantized)
    for queries in (1, 33):
        query = torch.randn(3, 4, queries, 64, device=DEVICE)
        expected, ours = attend(codec, query, rows, 0.125), attend(codec, query, paged, 0.125)
        # products of tensors with other strides may differ in their last bits
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours, expected, strict=True))


@pytest.mark.parametrize("name", ["turboquant-3", "klt-2", "kivi-2", "qjl"])
def test_codes_are_gathered_as_they_were(name: str) -> None:
    _, _, rows, paged = parts_of((name, 4, 2, 64, 1, 32, [64, 64], FLOAT, {}))
    assert paged.pages is not None
    for field, x in paged.pages.gather(paged.key_codes, 0, 64).tensors().items():
        assert torch.equal(x, getattr(rows.key_codes, field)), field


def test_pages_are_refused_by_name() -> None:
    *_, paged = parts_of(("kivi-2", 4, 2, 64, 1, 32, [64], FLOAT, {}))
    table = torch.zeros(1, 4, dtype=torch.int32, device=DEVICE)
    for size in (8, 48):
        with pytest.raises(UsageError, match=f"pages of {size} tokens"):
            PageTable(table, size)
    with pytest.raises(UsageError, match="int32"):
        PageTable(table.long(), 16)
    with pytest.raises(UsageError, match="pages of 32 tokens with a block table of pages of 64"):
        dataclasses.replace(paged, pages=PageTable(table, 64))
    shifted = paged.value_codes.map(lambda x: torch.cat((x, x), 2)[:, :, 1 : 1 + x.shape[2]])
    with pytest.raises(UsageError, match="scale: tokens of a page"):
        dataclasses.replace(paged, value_codes=shifted)


@pytest.mark.parametrize(("bits", "head_dim", "fields"), [(2, 10, 5), (2, 128, 8), (4, 128, 4), (4, 20, 4)])
def test_fields_without_channels_are_not_read(bits: int, head_dim: int, fields: int) -> None:
    """They would have scales and zeros of the next token."""
    codec = make_codec(f"rtn-{bits}", 1, 1, head_dim, group_size=head_dim)[1].key
    operand = _Operand.of(codec, codec.encode(torch.randn(1, 1, 3, head_dim).to(DEVICE), None))
    assert (operand.fields, (fields - 1) * operand.words < head_dim <= fields * operand.words) == (fields, True)
