"""Models that attend in ways of their own: refused in one line that says why, or right to rounding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from factories import WINDOW, make_model
from odd_models import POSITIONS, REFUSED, RIGHT, with_attention, with_positions
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kvcli
from kvcli.errors import KvcliError, UnsupportedModelError
from kvcli.seam.probe import probe
from kvcli.seam.recorder import NotUnderstood
from kvcli.seam.trial import LayerProbe
from kvcli.seam.versions import with_cache


@torch.no_grad()
def logits(model: Any, cache: Any, *parts: int) -> Tensor:
    tokens = torch.randint(3, 97, (1, sum(parts)), generator=torch.Generator().manual_seed(0)).split(parts, dim=1)
    return torch.cat([model(input_ids=x, **with_cache(cache)).logits for x in tokens], dim=1)


@pytest.mark.parametrize("parts", [(33, 1, 1, 1), (7, 9, 17, 1, 1, 1)], ids=["prompt", "chunks"])
@pytest.mark.parametrize("name", [*RIGHT, "shifted", "switched late"])
def test_right(name: str, parts: tuple[int, ...]) -> None:
    model = with_positions(name) if name in POSITIONS else with_attention(RIGHT[name])
    expected = logits(model, DynamicCache(config=model.config), *parts)
    with kvcli.attach(model, "fp16", **WINDOW) as session:
        actual = logits(model, session.new_cache(), *parts)
    assert (actual - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    said, steps = REFUSED[name]
    model, parts = with_attention(steps), (33, 1, 1)
    model.set_attn_implementation("eager" if name == "scaling per head" else "sdpa")
    logits(model, DynamicCache(config=model.config), *parts)  # stock runs it
    with pytest.raises(KvcliError, match=said) as refusal, kvcli.attach(model, "fp16", **WINDOW) as session:
        logits(model, session.new_cache(), *parts)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_keys_with_biases_of_hundreds_are_rotated_as_others(dtype: torch.dtype) -> None:
    """As in the first and last layers of Qwen2.5-7B: rounding in the rotation moves scores, and hides in no channel."""
    model = make_model("qwen2")
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.data[5], layer.self_attn.k_proj.bias.data[23] = 300, -250
    attention = probe(model.to(dtype))
    assert [layer.rotated and not layer.own_rotation for layer in attention.layers] == [True] * 3
    assert not attention.drops_state
    key = torch.tensor([300.0, 1.0, 300.0, 1.0], dtype=dtype).expand(1, 1, 2, 4)
    other = key * torch.tensor([1.0, 1.1, 1.0, 1.1], dtype=dtype)
    LayerProbe.check(SimpleNamespace(is_finite=True), other, key, "")  # type: ignore[arg-type]
    with pytest.raises(NotUnderstood):
        LayerProbe.check(SimpleNamespace(is_finite=True), other, key, "", 4)  # type: ignore[arg-type]


def test_attention_functions_of_the_user_are_refused() -> None:
    def doubled(module: nn.Module, query: Tensor, *tensors: Any, **options: Any) -> Any:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, 2 * query, *tensors, **options)

    AttentionInterface.register("doubled", doubled)
    AttentionMaskInterface.register("doubled", sdpa_mask)
    model = make_model("llama", attn_implementation="doubled")
    with pytest.raises(UnsupportedModelError, match="its logits change by"):
        kvcli.attach(model, "fp16")


@pytest.mark.parametrize("name", POSITIONS)
def test_only_rotations_in_proportion_to_positions_are_ours(name: str) -> None:
    assert not any(layer.own_rotation for layer in probe(make_model("llama")).layers)
    found = probe(with_positions(name))
    of_two_lengths = name == "dependent on length"  # whose angles are in proportion to positions in either
    assert {layer.own_rotation for layer in found.layers} == {not of_two_lengths}
    assert found.rope.switch == (16 if of_two_lengths else None)
