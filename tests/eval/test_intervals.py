"""Figures of tokens and of their blocks; intervals and paired differences."""

import math

import numpy as np
import pytest
import torch

from kvcli.eval import quality
from kvcli.eval.intervals import MIN_UNITS, estimate, paired_difference
from kvcli.eval.quality import TokenScores, token_scores


def test_the_interval_of_normal_values_is_that_of_theory() -> None:
    values = np.random.default_rng(0).normal(3.0, 1.0, 200)
    found = estimate(values, np.ones(200))
    half = 1.96 * values.std(ddof=1) / np.sqrt(200)
    assert found.mean == pytest.approx(values.mean(), rel=1e-12)
    assert (found.low, found.high) == pytest.approx((found.mean - half, found.mean + half), abs=0.02)


def test_units_count_by_their_weight() -> None:
    assert estimate([1.0, 4.0], [3, 1]).mean == 7 / 4
    whole = estimate([1.0, 2.0] * 10, [2, 1] * 10)
    assert whole.mean == pytest.approx(4 / 3)
    assert whole.low < 4 / 3 < whole.high


def test_pairing_shows_a_small_difference_that_the_intervals_hide() -> None:
    draw = np.random.default_rng(1)
    difficulty = draw.lognormal(0, 1, 64)
    first, second = 1.05 * difficulty + 0.01 * draw.normal(size=64), difficulty
    weights = [1.0] * 64
    difference = paired_difference(first, second, weights)
    assert difference.excludes_zero
    assert difference.low < 0.05 * difficulty.mean() < difference.high
    assert estimate(first, weights).low < estimate(second, weights).high  # apart, they overlap


def test_noise_is_not_called_a_difference() -> None:
    draws = np.random.default_rng(2).normal(size=(40, 2, 30))
    assert sum(paired_difference(a, b, [1.0] * 30).excludes_zero for a, b in draws) <= 6  # 2 are expected


def test_blocks_of_dependent_tokens_give_the_wider_interval_that_is_right() -> None:
    draw, x = np.random.default_rng(3), np.zeros((16, 1024))
    noise = draw.normal(size=x.shape)
    for t in range(1, 1024):
        x[:, t] = 0.95 * x[:, t - 1] + noise[:, t]
    true_error = 1.96 * (1 / 0.05) / np.sqrt(x.size)
    tokens, blocks = x[:, ::8].ravel(), x.reshape(-1, 256).mean(1)
    by_token, by_block = estimate(tokens, np.ones(len(tokens))), estimate(blocks, np.ones(len(blocks)))
    assert (by_block.high - by_block.low) / 2 == pytest.approx(true_error, rel=0.3)
    assert by_token.high - by_token.low < 0.7 * (by_block.high - by_block.low)


@pytest.mark.parametrize("values", [[1.0] * 20, [0.0] * 20, [0.1 + 0.2] * 10 + [0.3] * 10, range(MIN_UNITS - 1)])
def test_there_is_no_interval_of_equal_or_of_few_units(values: list[float]) -> None:
    found = estimate(list(values), [1.0] * len(values))
    assert (found.low, found.high, found.excludes_zero) == (None, None, None)


def test_the_same_seed_gives_the_same_interval() -> None:
    values = list(np.random.default_rng(0).normal(size=20))
    assert estimate(values, [1.0] * 20, 5) == estimate(values, [1.0] * 20, 5) != estimate(values, [1.0] * 20, 6)


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
