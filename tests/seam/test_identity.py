"""Constants in place of a rotary embedding: whatever a model computes with them is what ones and zeros would give."""

import operator
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from factories import make_model

import kvcli
from kvcli.seam.identity import IdentityFactor, Shortcut, identity_factors


def constants(**kind: Any) -> tuple[torch.Tensor, torch.Tensor]:
    made = identity_factors(torch.randn(2, 40, 8, **kind))
    assert all(isinstance(x, IdentityFactor) for x in made)
    return made


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


@pytest.fixture
def model_file(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A file of a model with an attention module."""
    module = type("Attention", (torch.nn.Module,), {"__module__": "file_of_a_model"})
    file = ModuleType("file_of_a_model")
    file.module = module()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "file_of_a_model", file)
    return file


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "glm", "cohere"])
def test_shortcut(family: str, model_file: ModuleType) -> None:
    """Queries and keys themselves come back; a real rotation, or one of another dtype, is the model's own."""
    rotate: Any = import_module(f"transformers.models.{family}.modeling_{family}").apply_rotary_pos_emb
    file: Any = model_file
    file.apply_rotary_pos_emb = rotate
    shortcuts = [Shortcut(file.module, (4, 2), 8, 8) for _ in range(2)]
    query, key, (cos, sin) = torch.randn(2, 4, 40, 8), torch.randn(2, 2, 40, 8), constants()
    assert all(x is y for x, y in zip(file.apply_rotary_pos_emb(query, key, cos, sin), (query, key), strict=True))
    other = cos.mul(0.5).as_subclass(torch.Tensor), sin + 0.5
    cos.add_(1)
    for q, k, factors in ((query, key, other), (query, key, (cos, sin)), (query.half(), key.half(), constants())):
        for ours, theirs in zip(file.apply_rotary_pos_emb(q, k, *factors), rotate(q, k, *factors), strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)
    for shortcut in shortcuts:
        shortcut.remove()
    assert file.apply_rotary_pos_emb is rotate


@pytest.mark.parametrize(
    "function",
    [
        lambda q, k, cos, sin: (q.flip(-1) * cos, k.flip(-1) * cos),
        lambda q, k, cos, sin: (q.float() * 2, k),
        lambda x, cos, sin: x * cos,
        lambda q, k, cos, sin: q * cos,
        None,
    ],
)
def test_no_shortcut_past_functions_that_change_queries_or_keys(function: Any, model_file: ModuleType) -> None:
    file: Any = model_file
    file.apply_rotary_pos_emb = function
    shortcut = Shortcut(file.module, (4, 2), 8, 8)
    assert file.apply_rotary_pos_emb is function
    shortcut.remove()
    assert file.apply_rotary_pos_emb is function


def test_a_session_takes_the_shortcut_and_gives_it_back() -> None:
    """Also where two models of a family are attached at once."""
    file: Any = import_module("transformers.models.llama.modeling_llama")
    before = file.apply_rotary_pos_emb
    with kvcli.attach(make_model("llama"), "kivi-2", impl="reference"):
        shortcut = file.apply_rotary_pos_emb
        assert shortcut is not before
        with kvcli.attach(make_model("llama"), "kivi-2", impl="reference"):
            assert file.apply_rotary_pos_emb is shortcut
        assert file.apply_rotary_pos_emb is shortcut
    assert file.apply_rotary_pos_emb is before


def test_nothing_is_computed() -> None:
    cos, sin = (x.unsqueeze(1) for x in constants())
    query = torch.randn(2, 4, 40, 8)
    assert query * cos is query
    nothing = query * sin
    assert isinstance(nothing, IdentityFactor)
    assert nothing.shape == query.shape
    assert query + nothing is query


def test_operations_that_change_something_or_results_of_another_shape_or_dtype_are_computed() -> None:
    cos, sin = constants()
    x, row, one = torch.randn(2, 40, 8), torch.randn(8), torch.randn(1, 40, 8)
    half = x.bfloat16()
    for ours, expected in (
        (x + cos, x + 1),
        (x - cos, x - 1),
        (cos * cos, torch.ones(2, 40, 8)),
        (torch.add(x, cos, alpha=2), x + 2),
        (x.add(cos, alpha=2), x + 2),
        (torch.cat((cos, sin), dim=-1).sum(-1), torch.full((2, 40), 8.0)),
        (cos[..., :3].sum(), torch.tensor(240.0)),
        (row * cos, row.expand(2, 40, 8)),
        (one * cos, one.expand(2, 40, 8)),
        (one * sin + one, one.expand(2, 40, 8)),
        (row + sin, row.expand(2, 40, 8)),
        (half * cos, half.float()),
        (half + sin, half.float()),
        (half * sin, torch.zeros(2, 40, 8)),
    ):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: operator.iadd(x, 1),
        lambda x: operator.setitem(x, 0, 2),
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
    for x, number in zip(identity_factors(torch.randn(2, 16, 8)), (1.0, 0.0), strict=True):
        assert type(x) is torch.Tensor
        assert torch.equal(x, torch.full((2, 16, 8), number))
