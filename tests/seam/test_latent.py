"""Latent attention (MLA) is attention of one kv head over the latents that the model caches."""

from pathlib import Path
from typing import Any

import pytest
import torch
from factories import CONFIG, WINDOW, record
from families import make
from torch import Tensor, nn

import kvcli
from kvcli.artifact.fit import assemble, fit_recording
from kvcli.calibrate import fisher
from kvcli.errors import ConfigError, UsageError
from kvcli.plan.cache import stored_bits
from kvcli.registry import get_method
from kvcli.report.facts import describe
from kvcli.seam import latent
from kvcli.seam.probe import probe
from kvcli.seam.versions import with_cache
from kvcli.spec import ModelSpec

FAMILIES = ["deepseek_v2", "deepseek_v3", "minicpm3", "glm4_moe_lite"]
has_latents = hasattr(make("deepseek_v3").model.layers[0].self_attn, "expand_kv")
pytestmark = pytest.mark.skipif(not has_latents, reason="this transformers caches keys and values of all heads")


def logits(model: Any, cache: Any, *lengths: int) -> Tensor:
    ids = torch.randint(3, 90, (2, sum(lengths)), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return torch.cat([model(x, **with_cache(cache)).logits for x in ids.split(lengths, dim=1)], dim=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_latents_are_cached_and_attended_to(family: str) -> None:
    model = make(family)
    spec, config = probe(model).spec, model.config
    assert spec == ModelSpec.from_config(config)
    assert (spec.latent, spec.num_kv_heads, spec.head_dim, spec.value_dim) == (True, 1, 16, 32)
    theirs = logits(model, None, 60)
    with kvcli.attach(model, "fp16", **WINDOW) as session:
        cache = session.new_cache()
        ours = logits(model, cache, 40, 1, 1, 18)
        assert stored_bits("fp16", {}, spec, [60])["effective"] == [16 + 40 / (spec.num_layers * (16 + 32))]
        assert cache.memory().fp16_bytes == 2 * 60 * spec.num_layers * (16 + 32) * 2
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))
    assert torch.equal(logits(model, None, 60), theirs)
    assert not any("expand_kv" in vars(module) for module in model.modules())


def test_products_are_absorbed() -> None:
    module = make("deepseek_v3").model.layers[0].self_attn.double()
    query, key, value = (torch.randn(2, *shape, dtype=torch.float64) for shape in ((4, 3, 40), (1, 5, 16), (1, 5, 32)))
    keys, values = latent.expanded(module, key, value)
    rows = latent.absorbed(module, query, 16, 32)
    torch.testing.assert_close(rows @ torch.cat((key, value), dim=-1).mT, query @ keys.mT)
    weights = torch.rand(2, 4, 3, 5, dtype=torch.float64)
    output = latent.projected(module, (weights @ value).transpose(1, 2), 24)
    torch.testing.assert_close(output, (weights @ values).transpose(1, 2))
    plain, module.kv_b_proj = rows, nn.Sequential(module.kv_b_proj)  # any module, such as one of quantized weights
    torch.testing.assert_close(latent.absorbed(module, query, 16, 32), plain)


@pytest.mark.parametrize("name", ["rtn-8", "kivi-4", "squat-4", "turboquant-4", "fp8", "qjl"])
def test_methods_code_latents(name: str) -> None:
    model = make("deepseek_v3")
    theirs = logits(model, None, 101)
    with kvcli.attach(model, name, residual_length=32, sink_length=2) as session:
        cache = session.new_cache()
        ours = logits(model, cache, 100, 1)
        memory, stored = cache.memory(), cache.context().encode()[0]
        assert memory.num_encoded > 0
        assert stored.bits == (memory.key_bits, memory.value_bits)
    assert (ours - theirs)[:, 100:].norm() < 0.2 * theirs[:, 100:].norm()


@pytest.mark.parametrize(("family", "changes"), [("deepseek_v3", {}), ("mimo_v2_flash", {"v_head_dim": 8})])
def test_methods_are_fitted_to_values_of_another_width(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    model = make(family, **changes)
    recording = record(model, tmp_path / "samples")
    kept = sum(path.stat().st_size for path in (tmp_path / "samples").glob("*.safetensors"))
    facts = describe(tmp_path / "samples")["bytes"]
    assert kept / 1.1 < facts["keys and values, 16 bits"] + facts["queries, 16 bits"] < kept
    for name in ("klt", "commvq", "kvquant", "blockgtq", "squat"):
        method = get_method(name)
        source = {"subspace_source": "calibration"} if name == "squat" else {}
        config = CONFIG if name == "commvq" else method.config_cls(**method.example_settings, **source)
        fit_recording(recording, method, config.resolve(recording.spec), tmp_path / name)
        with kvcli.attach(model, name, artifact=assemble([tmp_path / name])) as session:
            cache = session.new_cache()
            assert logits(model, cache, 200, 1).isfinite().all()
            assert cache.memory().num_encoded
    oscar = get_method("oscar")
    settings = oscar.config_cls(**oscar.example_settings).resolve(recording.spec)
    if family == "deepseek_v3":
        with pytest.raises(ConfigError, match="outputs of attention"):
            fit_recording(recording, oscar, settings, tmp_path / "oscar")
    else:
        fit_recording(recording, oscar, settings, tmp_path / "oscar")


def test_gradients_of_latents_are_those_of_their_scores_and_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """As autograd finds them in the model itself, where all tokens are read from codes."""
    monkeypatch.setattr(fisher, "_SINKS", 0)
    monkeypatch.setattr(fisher, "_WINDOW", 0)
    model, ids = make("deepseek_v3", num_hidden_layers=1), torch.arange(3, 60)
    value = fisher.backward(model, ids, torch.full((57,), 0.5, dtype=torch.float64))[0][1]
    norms: list[Tensor] = []
    norm = model.model.layers[0].self_attn.kv_a_layernorm
    norm.register_forward_hook(lambda module, args, output: norms.append(output))
    log_probs = model(ids[None]).logits[0].log_softmax(-1)
    drawn = (log_probs.exp().cumsum(-1) < 0.5).sum(-1, keepdim=True)
    (gradient,) = torch.autograd.grad(log_probs.gather(1, drawn).sum(), norms)
    assert value.grad is not None
    torch.testing.assert_close(value.grad[0, 0], gradient[0], rtol=1e-3, atol=1e-5)


def test_what_latents_do_not_have() -> None:
    with pytest.raises(UsageError, match="kivi does not support latents"):
        kvcli.attach(make("deepseek_v3"), "kivi-2", impl="fused")
