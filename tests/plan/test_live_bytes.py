"""Live bytes of traced code."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.plan.live_bytes import META, Peak, peak_bytes

N = 1000
X = torch.zeros(N, device=META)


def test_what_is_released_is_not_counted_on() -> None:
    def run() -> Tensor:
        y = X + 1
        z = y * 2
        del y
        return z.view(-1, 10).exp()

    assert peak_bytes(run) == Peak(8 * N, 0, 8 * N)


def test_changes_in_place_and_views_take_nothing() -> None:
    assert peak_bytes(lambda: X.clone().add_(1).view(10, -1).t()[0]).total == 4 * N


def test_copies_to_the_host_are_counted_apart() -> None:
    def run() -> list[Tensor]:
        return [(X + 1).to("cpu", torch.float16) for _ in range(3)]

    assert peak_bytes(run) == Peak(4 * N, 3 * 2 * N, 4 * N + 3 * 2 * N)


def test_gradients_keep_what_they_need() -> None:
    leaf = torch.zeros(N, device=META, requires_grad=True)

    def run() -> None:
        (leaf.exp().sin() * 3).sum().backward()

    assert 2 * 4 * N < peak_bytes(run).total < 6 * 4 * N


def test_questions_are_answered_as_code_hopes() -> None:
    answers = []

    def run() -> None:
        wrong = torch.zeros((), dtype=torch.bool, device=META)
        answers.extend(
            [
                bool(X.isfinite().all()),
                bool((X > 1).any()),
                bool(wrong | (X > 1).any()),
                X[:2].tolist(),
                len(X.nonzero()),
            ]
        )

    with torch.no_grad():
        peak_bytes(run)
    assert answers == [True, False, False, [1.0, 1.0], N]


def test_attention_keeps_no_scores() -> None:
    q = torch.zeros(1, 4, 512, 16, device=META)
    attend = torch.nn.functional.scaled_dot_product_attention
    assert peak_bytes(lambda: attend(q, q, q, is_causal=True)).total == q.nbytes
