"""Constants in place of a rotary embedding: whatever a model computes with them is what ones and zeros would give."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

from kvcli.seam.identity import IdentityFactor, identity_factors


def constants(tokens: int = 40, width: int = 8, **kind: Any) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = identity_factors(torch.randn(2, tokens, width, **kind))
    assert isinstance(cos, IdentityFactor)
    assert isinstance(sin, IdentityFactor)
    return cos, sin


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma", "olmo2", "phi3", "glm", "cohere"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_and_keys_do_not_change(family: str, dtype: torch.dtype) -> None:
    """Also where a family computes with them in ways of its own."""
    rotate = import_module(f"transformers.models.{family}.modeling_{family}").apply_rotary_pos_emb
    query, key = torch.randn(2, 4, 40, 8, dtype=dtype), torch.randn(2, 2, 40, 8, dtype=dtype)
    for ours, before in zip(rotate(query, key, *constants(dtype=dtype)), (query, key), strict=True):
        assert type(ours) is torch.Tensor
        assert torch.equal(ours, before)
        assert ours.dtype == dtype


def test_nothing_is_computed() -> None:
    cos, sin = (x.unsqueeze(1) for x in constants())
    query = torch.randn(2, 4, 40, 8)
    assert query * cos is query
    nothing = query * sin
    assert isinstance(nothing, IdentityFactor)
    assert nothing.shape == query.shape
    assert query + nothing is query


def test_operations_that_change_something() -> None:
    cos, sin = constants()
    x = torch.randn(2, 40, 8)
    assert torch.equal(x + cos, x + 1)
    assert torch.equal(x - cos, x - 1)
    assert torch.equal(cos * cos, torch.ones(2, 40, 8))
    assert torch.equal(torch.add(x, cos, alpha=2), x + 2)
    assert torch.equal(x.add(cos, alpha=2), x + 2)
    assert torch.equal(torch.cat((cos, sin), dim=-1).sum(-1), torch.full((2, 40), 8.0))
    assert torch.equal(cos[..., :3].sum(), torch.tensor(240.0))


def test_results_of_another_shape_or_dtype() -> None:
    """An operand is the result only where it has the result's shape and dtype."""
    cos, sin = constants()
    row, one, half = torch.randn(8), torch.randn(1, 40, 8), torch.randn(2, 40, 8).bfloat16()
    assert (row * cos).shape == (2, 40, 8)
    assert torch.equal(one * cos, one.expand(2, 40, 8))
    assert torch.equal(one * sin + one, one.expand(2, 40, 8))
    assert torch.equal(row + sin, row.expand(2, 40, 8))
    assert (half * cos).dtype == torch.float32
    assert torch.equal(half + sin, half.float())
    assert torch.equal((half * sin), torch.zeros(2, 40, 8))


def change_by_addition(x: torch.Tensor) -> None:
    x += 1


def change_an_entry(x: torch.Tensor) -> None:
    x[0] = 2


@pytest.mark.parametrize(
    "change",
    [
        change_by_addition,
        change_an_entry,
        lambda x: x.mul_(3).add_(2),
        lambda x: x.copy_(torch.randn(2, 40, 8)),
        lambda x: torch.add(x, 3, out=x),
    ],
)
@pytest.mark.parametrize("which", [0, 1])
def test_constants_changed_in_place(change: Any, which: int) -> None:
    """Whatever it holds then is computed with."""
    constant, x = constants()[which], torch.randn(2, 40, 8)
    before = constant.tolist()
    change(constant)
    assert constant.tolist() != before
    plain = torch.tensor(constant.tolist())
    rows = constant.unsqueeze(1)
    for ours, theirs in ((x * constant, x * plain), (x + constant, x + plain), (x.unsqueeze(1) * rows, x * plain)):
        assert torch.equal(ours.view(2, 40, 8), theirs)


def test_few_tokens_take_ordinary_numbers() -> None:
    cos, sin = identity_factors(torch.randn(2, 16, 8))
    assert type(cos) is torch.Tensor
    assert type(sin) is torch.Tensor
    assert torch.equal(cos, torch.ones(2, 16, 8))
    assert torch.equal(sin, torch.zeros(2, 16, 8))
