"""Where the tokens of a pass go, found from tensors alone: as in a CUDA graph, which is made from other ones."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from kvcli.integrations.batch import Batch
from kvcli.integrations.windows import Windows
from kvcli.rope import NoRope

CPU = torch.device("cpu")
PAGE, REQUESTS = 32, 5


def tensors(x: Any) -> list[Tensor]:
    """All tensors of a batch, in the order of the fields."""
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, list):
        return [y for part in x for y in tensors(part)]
    if hasattr(x, "__dataclass_fields__"):
        return [y for field in fields(x) for y in tensors(getattr(x, field.name))]
    return []


def decoding(windows: Windows, group: int) -> Any:
    """What finds the tokens of a pass in which each request has one."""

    def batch(lengths: Tensor, table: Tensor, slots: Tensor) -> list[Tensor]:
        found = Batch.of(
            [1] * REQUESTS, lengths, table, slots, NoRope(8, CPU), page_size=PAGE, group=group, sinks=2,
            windows=windows, null_page=0, most_rows=2,
        )  # fmt: skip
        assert [len(part.past) for part in found.parts] == [2, 2, 1]
        return tensors(found)

    return batch


@pytest.mark.parametrize("group", [1, 16])
def test_a_pass_that_was_recorded_finds_what_one_made_anew_finds(group: int) -> None:
    """Recorded with requests that are not stored; requests come, go, share a full page, and pass groups and pages."""
    recorded, anew = (Windows(6, 16, group, CPU) for _ in range(2))
    nothing = torch.zeros(REQUESTS, dtype=torch.int32)
    pages = torch.zeros(REQUESTS, 4, dtype=torch.int32)
    replay = make_fx(decoding(recorded, group))(nothing, pages, nothing.long() - 1)
    expect = decoding(anew, group)
    table = torch.arange(1, 4 * REQUESTS + 1, dtype=torch.int32).view(REQUESTS, 4)
    table[1, 0] = table[0, 0]  # of as many tokens, so that it has the same ring at first
    past = torch.tensor([PAGE, PAGE, 17, 64, 1])
    for windows in (recorded, anew):
        prompt, last = past[[0, 2, 3, 4]], torch.tensor([1, 9, 14, 17])
        windows.advance(0 * prompt - 1, last, 0 * prompt, prompt, torch.tensor([1, 9, 13, 14, 17]))
    seen = []
    for step in range(40):
        stored = torch.ones(REQUESTS, dtype=torch.bool)
        stored[2], stored[3] = step < 9, step >= 4  # the third ends, the fourth waits
        slots = table.long().gather(1, (past // PAGE).unsqueeze(1)).squeeze(1) * PAGE + past % PAGE
        given = (past + 1).int(), table, slots.where(stored, -1)
        found, expected = replay(*given), expect(*given)
        assert len(found) == len(expected) > 20
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
        seen.append([x.tolist() for x in expected])
        past += stored
    assert len({str(x) for x in seen}) == 40
    for windows in (recorded, anew):
        windows.check()
