"""Bits of keys and values apart, and of each layer: what is stored, counted, kept in files, and refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from factories import record

import kvcli
from kvcli.artifact.artifact import Artifact
from kvcli.artifact.fit import assemble, fit_recording
from kvcli.errors import CacheError, ConfigError, UsageError
from kvcli.methods.turboquant import TurboQuantConfig
from kvcli.plan.cache import CachePlan
from kvcli.registry import METHODS, get_config, get_method
from kvcli.seam.versions import with_cache

APART = [
    x for x in METHODS if get_config(x).bit_settings() == ("k_bits", "v_bits") and not get_config(x).needs_artifact
]


def run(session: Any, prompt: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Any]:
    """Logits after a prompt in two pieces, the second of which attends to codes of the first, and the cache."""
    cache, end = session.new_cache(), prompt["input_ids"].shape[1]
    with torch.no_grad():
        for start, stop in ((0, end - 9), (end - 9, end)):
            ids, mask = prompt["input_ids"][:, start:stop], prompt["attention_mask"][:, :stop]
            logits = session.model(input_ids=ids, attention_mask=mask, **with_cache(cache)).logits
    return logits, cache


def attach(model: Any, name: str, **settings: Any) -> Any:
    return kvcli.attach(model, name, **{**get_method(name).example_settings, "sink_length": 2, **settings})


@pytest.mark.parametrize("name", APART)
def test_each_layer_stores_its_own_bits_and_all_are_counted(tiny_model: Any, prompt: Any, name: str) -> None:
    k_bits, v_bits, text = [4, 2, 1], [1, 4, 4], prompt(70)
    alike = {}
    for bits in (1, 2, 4):
        with attach(tiny_model, name, k_bits=bits, v_bits=bits) as session:
            sides = [(x.key.bits_per_token(), x.value.bits_per_token()) for x in session.codecs]
            alike[bits] = sides, run(session, text)[0]
    with attach(tiny_model, name, k_bits=k_bits, v_bits=v_bits) as session:
        logits, cache = run(session, text)
        sides = [(x.key.bits_per_token(), x.value.bits_per_token()) for x in session.codecs]
        codecs, method, config = session.codecs, session.method, session.config
    expected = [(alike[k][0][i][0], alike[v][0][i][1]) for i, (k, v) in enumerate(zip(k_bits, v_bits, strict=True))]
    assert sides == expected
    assert not any(torch.equal(logits, other) for _, other in alike.values())
    memory = cache.memory()
    means = [sum(side) / 3 / 32 for side in zip(*expected, strict=True)]
    assert (memory.key_bits, memory.value_bits) == pytest.approx(means)
    assert memory.nominal_bits == pytest.approx((7 / 3, 3))
    planned = CachePlan.of_codecs(session.spec, method, config, codecs, torch.float32).memory(61, 0)
    with attach(tiny_model, name, k_bits=k_bits, v_bits=v_bits) as session:
        cache = session.new_cache()
        tiny_model(input_ids=text["input_ids"][:, :61], **with_cache(cache))
    assert planned.code_bytes == cache.memory().code_bytes


def test_values_alone_have_bits_of_each_layer(tiny_model: Any, prompt: Any) -> None:
    with attach(tiny_model, "qjl", v_bits=[1, 2, 8]) as session:
        memory = run(session, prompt(40))[1].memory()
    assert memory.nominal_bits[1] == pytest.approx(11 / 3)
    assert memory.value_bits == pytest.approx(11 / 3 + 2 * 16 / 8)


def test_keys_and_values_of_16_bits_are_kept_as_they_are(tiny_model: Any, prompt: Any) -> None:
    text, window = prompt(60, 50), {"residual_length": 6, "flush_block": 1, "sink_length": 2}
    with kvcli.attach(tiny_model, "fp16", **window) as session:
        exact, full = run(session, text)
    with kvcli.attach(tiny_model, "rtn-16", **window) as session:
        logits, cache = run(session, text)
    assert torch.equal(logits, exact)
    assert cache.memory().code_bytes == full.memory().code_bytes
    errors = []
    for bits in ({"k_bits": [16, 2, 16], "v_bits": 16}, {"k_bits": 16, "v_bits": [16, 2, 16]}):
        with kvcli.attach(tiny_model, "rtn", **window, group_size=8, **bits) as session:
            logits, cache = run(session, text)
        errors.append(float((logits - exact).norm()))
        widths = cache.memory().key_bits, cache.memory().value_bits
        assert sorted(widths) == pytest.approx([(32 + 32 + 2 + 4) / 3, 32])  # 16 bits are the model's 32
    with kvcli.attach(tiny_model, "rtn-2", **window, group_size=8) as session:
        every = float((run(session, text)[0] - exact).norm())
    assert all(0 < error < every for error in errors)


@pytest.mark.parametrize("name", ["kivi", "squat-pre"])
def test_kernels_read_layers_of_different_bits(tiny_model: Any, prompt: Any, name: str) -> None:
    found = []
    for impl in ("reference", "fused"):
        settings = {"k_bits": [4, 16, 2], "v_bits": [2, 1, 16], "group_size": 16, "residual_length": 16}
        with attach(tiny_model, name, **settings, impl=impl) as session:
            assert session.backend.impl == impl
            found.append(run(session, prompt(60))[0])
    assert torch.allclose(found[0], found[1], atol=2e-2)
    with attach(tiny_model, name, **{**settings, "k_bits": 4}) as session:
        assert (run(session, prompt(60))[0] - found[0]).norm() > 10 * (found[0] - found[1]).norm()


@pytest.mark.parametrize("bits", [[4, 2], [4, 2, 2, 2], []])
def test_another_number_of_layers_is_refused(tiny_model: Any, bits: list[int]) -> None:
    with pytest.raises(ConfigError, match=f"v_bits has {len(bits)} numbers, but 3 layers"):
        attach(tiny_model, "kivi", v_bits=bits)


@pytest.mark.parametrize("bits", [[4, 3, 2], 3, [[4, 2, 2]], "4"])
def test_bits_that_do_not_exist_are_refused(tiny_model: Any, bits: Any) -> None:
    with pytest.raises(ConfigError, match="k_bits: Input should be 1, 2, 4 or 8"):
        attach(tiny_model, "kivi", k_bits=bits)


def test_checks_of_several_settings_look_at_every_layer() -> None:
    assert TurboQuantConfig(key_variant="prod", k_bits=(2, 3, 16)).k_bits == (2, 3, 16)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="prod needs k_bits 2"):
        TurboQuantConfig(key_variant="prod", k_bits=(2, 1))  # type: ignore[arg-type]


def test_a_context_remembers_bits_of_layers(tiny_model: Any, prompt: Any, tmp_path: Path) -> None:
    bits = {"k_bits": [4, 2, 1], "v_bits": [1, 16, 2]}
    text = prompt(50)
    with attach(tiny_model, "kivi", **bits) as session:
        _, cache = run(session, text)
        cache.save(tmp_path / "c.safetensors")
        again = session.load_cache(tmp_path / "c.safetensors")
        assert again.memory().code_bytes == cache.memory().code_bytes
    bits["k_bits"] = [4, 2, 2]
    with attach(tiny_model, "kivi", **bits) as session, pytest.raises(CacheError, match=r"k_bits \[4, 2, 1\]"):
        session.load_cache(tmp_path / "c.safetensors")


def test_an_artifact_has_bits_of_layers(tiny_model: Any, tmp_path: Path) -> None:
    method, samples = get_method("oscar"), record(tiny_model, tmp_path / "samples")
    config = method.config_cls(**{**method.example_settings, "k_bits": [4, 2, 8], "v_bits": [1, 2, 4]})
    fit_recording(samples, method, config.resolve(samples.spec), tmp_path / "run")
    assemble([tmp_path / "run"]).save(tmp_path / "artifact")
    artifact = Artifact.load(tmp_path / "artifact")
    with kvcli.attach(tiny_model, "oscar", artifact=artifact) as session:
        assert [x.key.n_bits for x in session.codecs] == [4, 2, 8]
        assert [x.value.n_bits for x in session.codecs] == [1, 2, 4]
    with pytest.raises(ConfigError, match="k_bits"):
        kvcli.attach(tiny_model, "oscar", artifact=artifact, k_bits=[4, 2, 2])
    blocks = get_method("blockgtq")
    config = blocks.config_cls(**{**blocks.example_settings, "k_bits": [4, 2, 3]})
    fit_recording(samples, blocks, config.resolve(samples.spec), tmp_path / "blocks")
    tensors = assemble([tmp_path / "blocks"]).tensors
    assert [int(tensors[f"layers.{i}.key.widths"].sum()) for i in range(3)] == [2 * 16 * bits for bits in (4, 2, 3)]
    exact = method.config_cls(**{**method.example_settings, "k_bits": [4, 16, 8]})
    with pytest.raises(UsageError, match="layer 1: 16 bits"):
        fit_recording(samples, method, exact.resolve(samples.spec), tmp_path / "exact")
