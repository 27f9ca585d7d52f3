"""The laws of the cache, on every method of the registry."""

from typing import Any

import pytest
import torch
from contract import CacheContract, alone, logits
from factories import WINDOW, make_spec, prompt_and_steps
from parts import DEVICE

import kvcli
from kvcli.methods.method import Method
from kvcli.registry import METHODS, get_method


class TestRegistry(CacheContract):
    """A new method is tested here as soon as it has its line in the registry."""

    @pytest.fixture(params=METHODS)
    def method(self, request: pytest.FixtureRequest) -> Method:
        """One method after another."""
        return get_method(request.param)


@pytest.mark.parametrize(
    ("sink_length", "impl"), [(0, "reference"), (3, "reference"), pytest.param(3, "fused", marks=pytest.mark.kernels)]
)
def test_lossless_keys_before_rope_are_exact(
    tiny_model: Any, prompt: Any, monkeypatch: pytest.MonkeyPatch, sink_length: int, impl: str
) -> None:
    """Keys lose their rotation when they are encoded and get the same one back, in every row."""
    fp16 = get_method("fp16")
    key = fp16.build(make_spec(), fp16.config_cls(), 0).key
    monkeypatch.setattr(type(key), "space", "pre_rope")
    lengths = (40, 17, 9)
    device = DEVICE if impl == "fused" else "cpu"
    tiny_model.to(device)
    pieces = [{name: x.to(device) for name, x in piece.items()} for piece in prompt_and_steps(prompt, *lengths)]
    with kvcli.attach(tiny_model, "fp16", impl=impl, **{**WINDOW, "sink_length": sink_length}) as session:
        assert session.codecs[0].key.space == "pre_rope"
        actual = logits(tiny_model, session, pieces)
    for row, length in enumerate(lengths):
        ids = torch.cat([piece["input_ids"] for piece in alone(pieces, row, length)], dim=1)
        with torch.no_grad():
            expected = tiny_model(ids).logits[:, -1]
        assert torch.allclose(actual[row : row + 1], expected, atol=1e-4), f"row {row} of {length} tokens"
