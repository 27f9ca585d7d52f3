"""Intervals and paired differences."""

from __future__ import annotations

import numpy as np
import pytest

from kvcli.eval.intervals import MIN_UNITS, estimate, paired_difference


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
