"""Logits of hidden states that were computed before, by the model's own code."""

from functools import partial
from typing import Any

import pytest
import torch
from families import make

import kvcli
from kvcli.eval.quality import measure, reference_states
from kvcli.seam.decoder import backbone, logits_of
from kvcli.seam.versions import with_cache

SCALED = {
    "granite": {"logits_scaling": 4.0},
    "cohere": {"logit_scale": 0.25},
    "gemma2": {"final_logit_softcapping": 2.0},
}
FAMILIES = [*SCALED, "llama", "llama4_text", "gpt2", "opt", "qwen3_moe"]


def made(family: str) -> tuple[Any, torch.Tensor]:
    model = make(family, **SCALED.get(family, {}))
    return model, torch.randint(3, model.config.vocab_size, (2, 70), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_they_are_those_of_a_whole_pass(family: str) -> None:
    model, ids = made(family)
    expected = model(ids).logits
    states = backbone(model)(ids).last_hidden_state
    assert torch.equal(logits_of(model, states), expected)
    assert torch.equal(logits_of(model, states[:, 3:5]), logits_of(model, states)[:, 3:5])
    with kvcli.attach(model, "fp16"):
        assert torch.equal(logits_of(model, states), expected)
        assert torch.allclose(model(ids, use_cache=False).logits, expected, atol=1e-5)
    with pytest.raises((RuntimeError, ValueError)):
        logits_of(model, torch.zeros(1, 1, 7))
    assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize("family", [*SCALED, "llama4_text"])
@torch.no_grad()
def test_quality_is_of_the_models_own_logits(family: str) -> None:
    model, ids = made(family)
    session = partial(kvcli.attach, model, "kivi-2", group_size=16, residual_length=16)
    kl = measure(model, session, ids, [reference_states(model, ids)], chunk=16, batch_size=2).figures["kl_mean"]
    theirs = model(ids).logits.log_softmax(-1)
    with session() as attached:
        cache = attached.new_cache()
        parts = [model(x, **with_cache(cache)).logits for x in ids.split(16, dim=1)]
    ours = torch.cat(parts, dim=1).log_softmax(-1)
    expected = (theirs.exp() * (theirs - ours)).sum(-1).mean()
    assert kl == pytest.approx(float(expected), rel=1e-2)
    assert kl > 0
