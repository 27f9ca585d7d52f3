"""A method on chosen layers: what it computes, what it stores, what it refuses."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from factories import WINDOW

import kvcli
from kvcli.artifact.artifact import Artifact
from kvcli.errors import CacheError, UsageError
from kvcli.methods.method import Method
from kvcli.registry import get_method, parse_method
from kvcli.seam.versions import with_cache

METHODS = ("kivi-2", "squat-2", "squat-pre-2", "qjl", "rtn-2", "commvq")
STATEFUL = ("squat-2", "squat-pre-2", "qjl")


def attach(model: Any, name: str, artifact: Callable[[Method], Artifact], **changes: Any) -> Any:
    method, from_bits = parse_method(name)
    if method.needs_artifact:
        return kvcli.attach(model, name, artifact=artifact(method), **WINDOW, **changes)
    settings = {**method.example_settings, **from_bits, "sink_length": WINDOW["sink_length"], **changes}
    return kvcli.attach(model, name, **settings)


def run(model: Any, session: Any, prompt: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Any]:
    """Logits of the last token, read in pieces of many and of one, and the cache."""
    cache, mask = session.new_cache(), prompt["attention_mask"]
    end = mask.shape[1]
    with torch.no_grad():
        for start, stop in pairwise((0, end - 40, end - 2, end - 1, end)):
            ids, shown = prompt["input_ids"][:, start:stop], mask[:, :stop]
            logits = model(input_ids=ids, attention_mask=shown, **with_cache(cache)).logits
    return logits, cache


@pytest.mark.parametrize("name", METHODS)
def test_a_layer_alone_costs_less_than_all(tiny_model: Any, tiny_artifact: Any, prompt: Any, name: str) -> None:
    text = prompt(90, 70)
    with kvcli.attach(tiny_model, "fp16", **WINDOW) as session:
        exact, full = run(tiny_model, session, text)
    with attach(tiny_model, name, tiny_artifact) as session:
        all_logits, all_cache = run(tiny_model, session, text)
        codecs = session.codecs
    with attach(tiny_model, name, tiny_artifact, layers=[2, 0, 1]) as session:  # all layers by name
        named_logits, named_cache = run(tiny_model, session, text)
    assert torch.equal(named_logits, all_logits)
    assert named_cache.memory() == all_cache.memory()
    for layer, codec in enumerate(codecs):
        with attach(tiny_model, name, tiny_artifact, layers=[layer]) as session:
            logits, cache = run(tiny_model, session, text)
            memory, fitted = cache.memory(), session.codecs[layer].fitted_bytes()
        assert 0 < (logits - exact).norm() < 1.5 * (all_logits - exact).norm()
        assert memory.artifact_bytes == fitted
        nominal = parse_method(name)[0].nominal_bits(session.spec, session.config)
        assert memory.nominal_bits == pytest.approx([(bits + 2 * 16) / 3 for bits in nominal])
        # two layers store 32 bits in a model of float32; the third what it stores among all
        own = [side.bits_per_token() / 32 for side in (codec.key, codec.value)]
        assert (memory.key_bits, memory.value_bits) == pytest.approx([(bits + 2 * 32) / 3 for bits in own], rel=1e-6)
    assert all_cache.memory().code_bytes < full.memory().code_bytes


@pytest.mark.parametrize("name", METHODS)
def test_one_layer_refuses_what_all_refuse(tiny_model: Any, tiny_artifact: Any, prompt: Any, name: str) -> None:
    group = max(get_method(parse_method(name)[0].name).example_settings.get("group_size", 1), 1)
    with attach(tiny_model, name, tiny_artifact, layers=[2]) as session:
        _, cache = run(tiny_model, session, prompt(90))
        grouped = session.codecs[2].tokens_per_group > 1
        if grouped or name in STATEFUL:
            with pytest.raises(CacheError, match="speculative"):
                cache.activate_past_recording()
        if grouped:
            with pytest.raises(CacheError, match="encoded together"):
                cache.crop(-(90 - WINDOW["sink_length"] - group - 1))
        else:
            cache.crop(-3)


@pytest.mark.parametrize("name", ["kivi-2", "qjl"])
def test_fused_between_full_layers_is_the_reference(
    tiny_model: Any, tiny_artifact: Any, prompt: Any, name: str
) -> None:
    text, found = prompt(50), []
    changes = {"group_size": 16, "residual_length": 16} if name == "kivi-2" else {}
    for impl in ("reference", "fused"):
        with attach(tiny_model, name, tiny_artifact, layers=[1], impl=impl, **changes) as session:
            found.append(run(tiny_model, session, text)[0])
    assert torch.allclose(found[0], found[1], atol=2e-2)
    with kvcli.attach(tiny_model, "fp16", **WINDOW) as session:
        assert (run(tiny_model, session, text)[0] - found[0]).norm() > 10 * (found[0] - found[1]).norm()


@pytest.mark.parametrize("layers", [[], [3], [-1], [0, 7]])
def test_layers_that_the_model_does_not_have_are_refused(tiny_model: Any, layers: list[int]) -> None:
    with pytest.raises(UsageError, match="some of 0 to 2"):
        kvcli.attach(tiny_model, "kivi-2", layers=layers)
