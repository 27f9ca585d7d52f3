"""Models that attend in ways of their own: refused in one line that says why, or right to rounding."""

from __future__ import annotations

from typing import Any

import odd_models
import odd_rotations
import pytest
import torch
from factories import WINDOW, make_model
from odd_models import Odd, with_attention
from odd_rotations import LateSwitch, LengthDependent, ShiftedPositions, with_rotary
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kvcli
from kvcli.errors import KvcliError, UnsupportedModelError
from kvcli.seam.probe import probe

STEPS = 3
REFUSED = {
    "ScalingPerHead": "layers.0.self_attn scales its scores by a tensor",
    "SharedKeys": "attends to what another one caches",
    "LastTokens": "layers.0.self_attn",
    "LongWindow": "mask",
    "LongWindowInOneLayer": "layer 1: the attention mask",
    "LearnedPrefix": "layers.0.self_attn: it caches 9 keys for 8 tokens",
    "KeysChangedAfterCache": "layers.0.self_attn",
    "ValuesChangedAfterCache": "layers.0.self_attn",
    "AttendsTwice": "layers.0.self_attn attends 2 times",
    "UnknownTensor": "layers.0.self_attn passes 'position_bias'",
    "UnknownNumber": "layers.0.self_attn passes 'local_window'",
    "Alibi": "layers.0.self_attn adds a bias",
    "NotCausal": "layers.0.self_attn is not causal",
    "GrowingScale": "layers.0.self_attn scales its scores by other factors",
}
ATTENTIONS = {
    name: with_attention(kind)
    for name, kind in (vars(odd_models) | vars(odd_rotations)).items()
    if isinstance(kind, type) and issubclass(kind, Odd) and kind is not Odd
}
RIGHT = {name: build for name, build in ATTENTIONS.items() if name not in (*REFUSED, "SmoothedKeys")} | {
    kind.__name__: with_rotary(kind) for kind in (ShiftedPositions, LateSwitch)
}


def logits(model: Any, cache: Any, parts: list[int]) -> Tensor:
    tokens = torch.randint(3, 97, (1, sum(parts)), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return torch.cat(
            [model(input_ids=x, past_key_values=cache, use_cache=True).logits for x in tokens.split(parts, dim=1)], 1
        )


@pytest.mark.parametrize("parts", [[33, *[1] * STEPS], [7, 9, 17, *[1] * STEPS]], ids=["prompt", "chunks"])
@pytest.mark.parametrize("name", RIGHT)
def test_right(name: str, parts: list[int]) -> None:
    model = RIGHT[name]()
    expected = logits(model, DynamicCache(config=model.config), parts)
    with kvcli.attach(model, "fp16", **WINDOW) as session:
        actual = logits(model, session.new_cache(), parts)
    assert (actual - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    model, parts = ATTENTIONS[name](), [33, 1, 1]
    model.set_attn_implementation("eager" if name == "ScalingPerHead" else "sdpa")
    logits(model, DynamicCache(config=model.config), parts)  # stock runs it
    with pytest.raises(KvcliError, match=REFUSED[name]) as refusal, kvcli.attach(model, "fp16", **WINDOW) as session:
        logits(model, session.new_cache(), parts)
    assert "\n" not in str(refusal.value)


def test_attention_functions_of_the_user_are_refused() -> None:
    def doubled(module: nn.Module, query: Tensor, *tensors: Any, **options: Any) -> Any:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, 2 * query, *tensors, **options)

    AttentionInterface.register("doubled", doubled)
    AttentionMaskInterface.register("doubled", sdpa_mask)
    model = make_model("llama", attn_implementation="doubled")
    with pytest.raises(UnsupportedModelError, match="its logits change by"):
        kvcli.attach(model, "fp16")


@pytest.mark.parametrize("kind", [ShiftedPositions, LengthDependent, LateSwitch])
def test_only_rotations_in_proportion_to_positions_are_ours(kind: type[ShiftedPositions]) -> None:
    assert not any(layer.own_rotation for layer in probe(make_model("llama")).layers)
    assert all(layer.own_rotation for layer in probe(with_rotary(kind)()).layers)
