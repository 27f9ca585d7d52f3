"""Planned bytes of caches are those that live caches report."""

from typing import Any

import pytest
import torch
from factories import make_model

from kvcli.artifact.choice import choose_offsets
from kvcli.attention import steps
from kvcli.attention.generation import SamplingConfig
from kvcli.attention.session import Session
from kvcli.methods.config import BiasOffsetConfig
from kvcli.methods.per_layer import build_codecs
from kvcli.plan.cache import CachePlan
from kvcli.registry import METHODS, get_config, get_method, make_config
from kvcli.seam.probe import probe
from kvcli.seam.versions import with_cache
from kvcli.spec import ModelSpec


def attached(model: Any, name: str) -> tuple[Session, CachePlan]:
    """A session with codecs that are not fitted, whose bytes are those of fitted ones, and the plan of its caches."""
    spec = ModelSpec.from_config(model.config)
    method = get_method(name)
    config = make_config(method.name, method.example_settings).resolve(spec)
    codecs = build_codecs(method, spec, config)
    choose_offsets(lambda: probe(model), config, codecs)
    plan = CachePlan.of_codecs(spec, method, config, codecs, model.dtype)
    return Session(model, spec, method, config, codecs, "reference"), plan


BIASED = [(name, "qwen2") for name in METHODS if issubclass(get_config(name), BiasOffsetConfig)]


@pytest.mark.parametrize(("name", "family"), [*((name, "llama") for name in METHODS), *BIASED])
def test_a_cache_after_prompt_and_passes(name: str, family: str) -> None:
    model = make_model(family, max_position_embeddings=4096).to(torch.bfloat16)
    for layer in model.model.layers:
        if layer.self_attn.k_proj.bias is not None:
            layer.self_attn.k_proj.bias.data.normal_()
    session, plan = attached(model, name)
    with session, torch.no_grad():
        assert plan.memory(0) == session.new_cache().memory()
        for tokens, passes, batch, chunk in ((1, 0, 1, None), (5, 3, 2, None), (300, 40, 3, None), (700, 9, 1, 64)):
            cache = session.new_cache()
            for ids in torch.randint(3, 97, (batch, tokens)).split(chunk or tokens, dim=1):
                model(ids, **with_cache(cache))
            for _ in range(passes):
                model(torch.randint(3, 97, (batch, 1)), **with_cache(cache))
            assert plan.memory(tokens, passes, batch, chunk=chunk) == cache.memory(), (tokens, passes, batch, chunk)


@pytest.mark.parametrize("name", ["fp16", "fp8", "kivi", "squat-pre", "qjl"])
def test_from_where_on_a_cache_is_smaller_than_in_16_bits(name: str) -> None:
    session, plan = attached(make_model("llama", max_position_embeddings=4096), name)
    first = plan.pays_from()
    assert (first is None) == (name == "fp16")
    with session, torch.no_grad():
        for tokens in () if first is None else (first - 1, first, first + 1, 3 * first):
            cache = session.new_cache()
            session.model(torch.zeros(1, tokens, dtype=torch.long), **with_cache(cache))
            assert (cache.memory().cache_bytes < cache.memory().fp16_bytes) == (tokens >= first), tokens


@pytest.mark.parametrize("name", ["kivi", "squat-pre", "qjl", "commvq"])
@pytest.mark.parametrize("new_tokens", [2, 17, 60])
def test_a_cache_after_steps(name: str, new_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_HEADROOM", 32)  # more steps than are prepared for at once
    session, plan = attached(make_model("llama", max_position_embeddings=4096), name)
    with session:
        for tokens in (3, 90):
            ids = torch.randint(3, 97, (2, tokens))
            made = session.generate(ids, sampling=SamplingConfig(new_tokens), mode="steps")
            assert plan.memory(tokens, new_tokens - 1, 2, steps=True) == made.cache.memory(), tokens
