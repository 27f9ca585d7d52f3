"""Where the tokens of a pass go."""

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcli.paged.batch import Batch
from kvcli.paged.rings import ResidualRings
from kvcli.rope import NoRope

CPU = torch.device("cpu")
PAGE = 32


def tensors(x: Any) -> list[Tensor]:
    """All tensors of a batch, in the order of the fields."""
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, list):
        return [y for part in x for y in tensors(part)]
    if hasattr(x, "__dataclass_fields__"):
        return [y for field in fields(x) for y in tensors(getattr(x, field.name))]
    return []


@pytest.mark.parametrize("group", [1, 16])
def test_a_pass_that_waits_for_nothing_writes_the_same(group: int) -> None:
    """Where all have one token, what is not stored goes to a page that nobody reads, and nothing else changes."""
    table = torch.tensor([[1, 2], [3, 4], [5, 0], [6, 7]], dtype=torch.int32)
    lengths, slots = torch.tensor([32, 48, 16, 33]), torch.tensor([PAGE + 31, 4 * PAGE + 15, -1, 7 * PAGE])
    batches = []
    for null_page in (None, 0):
        windows = ResidualRings(4, 16, group, CPU)
        ones, pages = torch.ones(3, dtype=torch.int64), torch.tensor([1, 4, 6])
        windows.advance(-ones, pages, 0 * ones, torch.tensor([31, 47, 32]), torch.tensor([1, 3, 4, 6]))
        batches.append(
            Batch.of(
                [1] * 4, lengths, table, slots, NoRope(8, CPU), page_size=PAGE, group=group, sinks=2, rings=windows,
                null_page=null_page,
            )
        )  # fmt: skip
        windows.check()
    left_out, captured = batches
    assert captured.stored is None
    assert left_out.stored is not None
    assert left_out.stored.tolist() == [0, 1, 3]
    assert captured.dst_page.tolist() == [1, 4, 0, 7]
    for name in ("dst_page", "dst_offset"):
        assert torch.equal(getattr(captured, name)[left_out.stored], getattr(left_out, name))
    assert torch.equal(captured.recent, left_out.recent)
    assert (captured.recent[0] >= 0).tolist() == [True, True, False, True]
    (part,), (same,) = captured.parts, left_out.parts
    assert torch.equal(part.num_coded, same.num_coded)
    assert part.num_coded.tolist() == [x // group * group for x in (15, 31, 15, 16)]
    if group > 1:
        assert captured.groups is not None
        assert left_out.groups is not None
        assert captured.groups.page.tolist() == [1, 4, 0, 0]
        assert left_out.groups.page.tolist() == [1, 4]
        assert left_out.groups.place.tolist() == [1, 0]
        assert torch.equal(captured.groups.token[: 2 * group], left_out.groups.token)


def test_the_last_tokens_of_a_prompt_go_into_its_ring() -> None:
    """As many as it has places, and the first ones among the sinks; of a short prompt all."""
    windows = ResidualRings(4, 7, 4, CPU)
    table, slots = torch.tensor([[1, 2], [3, 0]]), torch.cat((torch.arange(45) + PAGE, torch.arange(6) + 3 * PAGE))
    batch = Batch.of(
        [45, 6], torch.tensor([45, 6]), table, slots, NoRope(8, CPU), page_size=PAGE, group=4, sinks=2,
        rings=windows, has_codes=False,
    )  # fmt: skip
    ring = windows.length
    assert ring == 10
    assert (batch.recent[0] >= 0).nonzero().squeeze(1).tolist() == [*range(35, 45), *range(45, 51)]
    assert (batch.recent[0, 35:45] % ring).tolist() == [t % ring for t in range(35, 45)]
    assert [x[x >= 0].tolist() for x in batch.sinks] == [[1, 1, 3, 3], [0, 1, 0, 1]]
    assert (batch.sinks[0] >= 0).nonzero().squeeze(1).tolist() == [0, 1, 45, 46]
    assert batch.groups is not None
    assert batch.groups.page.tolist() == [1] * 8 + [2] * 3 + [3]
    assert batch.groups.place.tolist() == [*range(8), 0, 1, 2, 0]
    assert batch.groups.token[:4].tolist() == [2, 2, 2, 3]  # sinks do not widen the scale of their group
    assert batch.groups.is_new.all()


def test_requests_with_as_many_new_tokens_are_one_part_wherever_they_are() -> None:
    windows, table = ResidualRings(4, 0, 1, CPU), torch.tensor([[1], [2], [0], [3], [4]])
    slots = torch.tensor([PAGE + 9, *range(2 * PAGE, 2 * PAGE + 3), 3 * PAGE + 4, *range(4 * PAGE, 4 * PAGE + 3)])
    lengths = torch.tensor([10, 3, 0, 5, 3])
    batch = Batch.of(
        [1, 3, 0, 1, 3], lengths, table, slots, NoRope(8, CPU), page_size=PAGE, group=1, sinks=0, rings=windows
    )
    ones, threes = batch.parts
    assert (ones.tokens.tolist(), ones.first) == ([[0], [4]], -1)
    assert (threes.tokens.tolist(), threes.first) == ([[1, 2, 3], [5, 6, 7]], -1)
    assert [part.num_computed_tokens.tolist() for part in batch.parts] == [[9, 4], [0, 0]]
    assert [part.pages.table.tolist() for part in batch.parts] == [[[1], [3]], [[2], [4]]]
    x = torch.arange(8)
    assert torch.equal(ones.of(x), ones.tokens)
    alone = Batch.of(
        [1, 3, 3], lengths[[0, 1, 4]], table[[0, 1, 4]], slots[[0, 1, 2, 3, 5, 6, 7]], NoRope(8, CPU), page_size=PAGE,
        group=1, sinks=0, rings=windows,
    ).parts[1]  # fmt: skip
    assert alone.first == 1
    assert torch.equal(alone.of(x), alone.tokens)
