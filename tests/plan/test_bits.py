"""The bits of the documentation's table against live caches."""

from typing import Any

import pytest
import torch
from factories import make_model

from kvcli.attention.session import Session
from kvcli.methods.per_layer import build_codecs
from kvcli.plan.cache import stored_bits
from kvcli.registry import make_config, parse_method
from kvcli.seam.versions import with_cache
from kvcli.spec import ModelSpec

GROUPED = {"residual_length": 32, "group_size": 16}
SETTINGS: dict[str, dict[str, Any]] = {
    "fp16": {},
    "fp8": {"residual_length": 16},
    "rtn-4": GROUPED,
    "kivi-2": GROUPED,
    "squat-2": GROUPED,
    "qjl": {"residual_length": 16, "group_size": 8, "num_outliers": 2},
    "commvq-2": {"residual_length": 16},
}


@pytest.mark.parametrize(("name", "settings"), SETTINGS.items())
@pytest.mark.parametrize("context", [20, 150, 333])
def test_the_formula_is_what_a_cache_holds(name: str, settings: dict[str, Any], context: int) -> None:
    model = make_model("llama").to(torch.bfloat16)
    spec = ModelSpec.from_config(model.config)
    method, from_bits = parse_method(name)
    config = make_config(method.name, {**from_bits, **settings})
    codecs = build_codecs(method, spec, config)  # unfitted: bytes do not depend on what codebooks hold
    with Session(model, spec, method, config, codecs, "auto") as session, torch.no_grad():
        cache = session.new_cache()
        model(torch.randint(3, 97, (1, context)), **with_cache(cache))
        memory = cache.memory()
    formula = stored_bits(name, settings, spec, [context])
    # positions live in a buffer with headroom; everything else must agree exactly
    held = 8 * (memory.code_bytes + memory.window_bytes)
    positions = context * (32 + 8)
    expected = formula["effective"][0] * 2 * context * spec.kv_dim * spec.num_layers - positions
    assert held == pytest.approx(expected, rel=1e-9)
    if memory.num_encoded:
        assert memory.key_bits == pytest.approx(formula["key_bits"])
        assert memory.value_bits == pytest.approx(formula["value_bits"])
    assert memory.nominal_bits == tuple(formula["nominal"])
