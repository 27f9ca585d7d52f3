"""Kernels that find where the tokens of a pass go, next to what PyTorch finds."""

import random

import pytest
import torch
from parts import DEVICE
from test_batch import tensors

from kvcli.paged.batch import Batch
from kvcli.paged.rings import AssignedRings, ResidualRings
from kvcli.rope import NoRope

pytestmark = pytest.mark.kernels

PAGES = 6
"""Pages of a request."""


@pytest.mark.parametrize(
    ("requests", "rings", "residual", "group", "sinks", "page"),
    [
        (1, 3, 32, 1, 4, 32),
        (1, 3, 32, 32, 4, 32),
        (5, 6, 16, 16, 2, 32),
        (7, 70, 8, 4, 2, 16),
        (70, 80, 16, 16, 3, 32),
        (3, 200, 0, 1, 0, 16),
        (4, 6, 5, 8, 0, 16),
        (2, 3, 1, 1, 1, 16),
        (3, 5, 31, 32, 40, 64),
    ],
)
def test_the_places_of_a_step_are_those_of_the_reference(
    requests: int, rings: int, residual: int, group: int, sinks: int, page: int
) -> None:
    """Requests wait, go back, share full pages, and go on from pages that others fill."""
    draw = random.Random(requests)
    rings_of = [ResidualRings(rings, residual, group, DEVICE) for _ in range(2)]
    past = torch.tensor([draw.randrange(3 * page) for _ in range(requests)])
    past[0] = max(0, group - 5)  # its first group becomes whole, sinks and all
    table = torch.randperm(requests * PAGES).view(requests, PAGES).int() + 1
    copied = writers = 0
    any_kept = False
    for step in range(30):
        for i in range(requests):
            if draw.random() < (0.3 if step == 0 else 0.05) and (i > 0 or step > 12):
                other = draw.randrange(requests)
                full = int(past[other] + draw.randrange(2)) // page
                table[i, :full], past[i] = table[other, :full], full * page
        stored = torch.tensor([draw.random() < 0.8 for _ in range(requests)])
        slots = table.gather(1, (past // page).unsqueeze(1)).squeeze(1) * page + past % page
        lengths, where, slots = (x.to(DEVICE) for x in ((past + 1).int(), table, slots.where(stored, -1).long()))
        found, expected = (
            Batch.of(
                [1] * requests, lengths, where, slots, NoRope(8, DEVICE), page_size=page, group=group, sinks=sinks,
                rings=mine, null_page=0, most_rows=3, fused=fused,
            )
            for mine, fused in zip(rings_of, (True, False), strict=True)
        )  # fmt: skip
        pairs = [*zip(tensors(found), tensors(expected), strict=True)]
        assert len(pairs) > 5 * len(expected.parts)
        for a, b in pairs:
            torch.testing.assert_close(a, b, rtol=0, atol=0)
        assert found.encodes_beside == expected.encodes_beside
        for name in ("_passes", "_lost_exact_keys"):
            assert torch.equal(*(getattr(x, name) for x in rings_of))
        any_kept |= not rings_of[0]._lost_exact_keys
        for x in rings_of:
            x._lost_exact_keys.fill_(False)
        states = [x._state[:, 1:] for x in rings_of]  # ring 0 is nobody's
        assert torch.equal(*states)
        copied += int((found.ring_copies[0] != found.ring_copies[1]).sum())
        writers += int((found.ring_copies[2] >= 0).sum())
        past = (past + stored.long()).clamp(max=page * PAGES - 1)
    assert any_kept
    assert requests < 70 or (copied > 20 and writers > 0)


@pytest.mark.parametrize("group", [1, 16])
def test_rings_that_a_caller_assigns(group: int) -> None:
    rings = AssignedRings(*torch.tensor([[3, 1], [0, 32]], device=DEVICE), 16, group)
    table, slots = torch.tensor([[1, 2], [3, 4]], device=DEVICE), torch.tensor([79, -1], device=DEVICE)
    found, expected = (
        Batch.of(
            [1, 1], torch.tensor([48, 33], device=DEVICE), table, slots, NoRope(8, DEVICE), page_size=32, group=group,
            sinks=2, rings=rings, null_page=9, fused=fused,
        )
        for fused in (True, False)
    )  # fmt: skip
    for a, b in zip(tensors(found), tensors(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert found.dst_page.tolist() == [2, 9]
