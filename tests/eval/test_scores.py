"""Figures of tokens and of their blocks."""

from __future__ import annotations

import math

import pytest
import torch

from kvcli.eval import quality
from kvcli.eval.quality import TokenScores, token_scores


def test_token_scores_are_the_formulas() -> None:
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.2, 0.5, 0.3])
    scores = token_scores(q.log()[None, None].expand(1, 2, 3), p.log()[None, None].expand(1, 2, 3), torch.tensor([[2]]))
    expected = sum(a * math.log(a / b) for a, b in ((0.7, 0.2), (0.2, 0.5), (0.1, 0.3)))
    assert scores.kl.flatten().tolist() == pytest.approx([expected, expected], rel=1e-5)
    assert scores.flips.flatten().tolist() == [1, 1]
    assert float(scores.nll[0, 0]) == pytest.approx(-math.log(0.3), rel=1e-5)
    assert float(scores.reference_nll[0, 0]) == pytest.approx(-math.log(0.1), rel=1e-5)
    assert scores.nll[0, 1].isnan()  # the last token has no next one


def test_blocks_hold_every_token_once_and_average_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "BLOCK_TOKENS", 8)
    x = torch.rand(3, 17, dtype=torch.float64)
    nll = x.clone()
    nll[:, -1] = math.nan
    scores = TokenScores(kl=x, flips=(x > 0.5).double(), nll=nll, reference_nll=nll)
    blocks = scores.blocks()
    found = [(b["sequence"], b["start"], b["tokens"], b["predicted"]) for b in blocks[:3]]
    assert found == [(0, 0, 8, 8), (0, 8, 8, 8), (0, 16, 1, 0)]
    assert blocks[2]["nll"] == 0  # without a next token there is no loss
    assert len(blocks) == 9
    total = sum(b["tokens"] for b in blocks)
    assert sum(b["tokens"] * b["kl"] for b in blocks) / total == pytest.approx(float(x.mean()), rel=1e-12)
    predicted = sum(b["predicted"] for b in blocks)
    loss = sum(b["predicted"] * b["nll"] for b in blocks) / predicted
    assert loss == pytest.approx(float(nll.nanmean()), rel=1e-12)
