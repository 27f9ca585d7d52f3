"""CommVQ through the whole cache on a tiny model: its re-ordered attention, batches, bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from commvq_reordered import reordered_attend
from factories import CONFIG, WINDOW, make_model, prompt_and_steps, record

import kvcli
from kvcli.artifact import Artifact
from kvcli.attention.backend import REFERENCE
from kvcli.attention.layer import attend_layer
from kvcli.cache.compressed import CompressedCache
from kvcli.cache.layer import NewTokens
from kvcli.errors import ConfigError, UsageError
from kvcli.fit import assemble, fit_recording
from kvcli.methods.commvq.config import CommVQConfig
from kvcli.methods.layer_codec import PartialAttention
from kvcli.registry import get_method
from kvcli.rope import Rotation
from kvcli.seam.layer import AttentionCall, RotaryOutput
from kvcli.seam.patch import Seam
from kvcli.seam.sdpa import sdpa
from kvcli.spec import ModelSpec


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Artifact]:
    """A tiny model with its artifact."""
    model, folder = make_model(request.param), tmp_path_factory.mktemp("trained")
    recording = record(model, folder / "samples")
    fit_recording(recording, get_method("commvq"), CONFIG.resolve(recording.spec), folder / "run")
    assemble([folder / "run"]).save(folder / "artifact")
    return model, Artifact.load(folder / "artifact")


def logits(model: Any, artifact: Artifact, pieces: list[dict[str, torch.Tensor]], **settings: Any) -> torch.Tensor:
    with kvcli.attach(model, "commvq", artifact=artifact, **{**WINDOW, **settings}) as session, torch.no_grad():
        cache = session.new_cache()
        for piece in pieces:
            out = model(**piece, past_key_values=cache).logits[:, -1]
    return out


@pytest.mark.parametrize("lengths", [(40,), (40, 17, 3)])
def test_reordered_attention_equals_the_reference(trained: Any, prompt: Any, lengths: tuple[int, ...]) -> None:
    model, artifact = trained
    inputs = prompt_and_steps(prompt, *lengths)
    expected = logits(model, artifact, inputs)
    calls = []

    def attend(*arguments: Any) -> PartialAttention:
        calls.append(arguments)
        return reordered_attend(*arguments)

    backend = replace(REFERENCE, attend_codes=attend, attend_decoded=attend)
    with kvcli.attach(model, "commvq", artifact=artifact, **WINDOW) as session, torch.no_grad():
        session.backend, cache = backend, session.new_cache()
        reordered = [model(**piece, past_key_values=cache).logits[:, -1] for piece in inputs][-1]
    assert torch.allclose(expected, reordered, atol=2e-5)
    assert len(calls) == 3 * len(model.model.layers)  # the prompt attends to itself, three steps to codes


def test_codes_really_replace_the_tokens(trained: Any, prompt: Any) -> None:
    model, artifact = trained
    inputs = prompt_and_steps(prompt, 60)
    exact = logits(model, artifact, inputs, residual_length=500)
    with torch.no_grad():
        ids = torch.cat([p["input_ids"] for p in inputs], dim=1)
        assert torch.allclose(exact, model(ids).logits[:, -1], atol=1e-4)
    lossy = logits(model, artifact, inputs)
    error = (lossy - exact).norm() / exact.norm()
    assert 1e-3 < error < 0.5


def test_memory_equals_the_formula(trained: Any, prompt: Any) -> None:
    model, artifact = trained
    with kvcli.attach(model, "commvq", artifact=artifact, **WINDOW) as session, torch.no_grad():
        cache = session.new_cache()
        model(**prompt(50, 31), past_key_values=cache)
        codec, memory = session.codecs[0], cache.memory()
    encoded = (50 - 8) + (31 - 8)
    assert memory.num_encoded == encoded
    assert memory.code_bytes * 8 == 3 * encoded * (codec.key.bits_per_token() + codec.value.bits_per_token())
    assert memory.artifact_bytes == artifact.nbytes


def test_smollm_shape_fits_in_a_fifth_and_a_half() -> None:
    """4096 tokens of the built-in model's shape at 2 bits: at most 1/5.5 of the fp16 bytes, everything counted."""
    model = make_model("llama", num_attention_heads=9, num_key_value_heads=3, head_dim=64, num_hidden_layers=1,
                       hidden_size=576, max_position_embeddings=8192)  # fmt: skip
    spec = ModelSpec.from_config(model.config)
    method, config = get_method("commvq"), CommVQConfig(bits=2).resolve(ModelSpec.from_config(model.config))
    seam = Seam(model, sdpa)  # type: ignore[arg-type]
    cache = CompressedCache(spec, method, config, [method.build(spec, config, 0)], seam)
    identity = Rotation(torch.ones(1, 1, 4096, 32), torch.zeros(1, 1, 4096, 32))
    tokens = torch.randn(1, 3, 4096, 64, dtype=torch.float16)
    rotary = RotaryOutput(torch.arange(4096)[None], identity)
    with torch.no_grad():
        layer = cache.compressed[0]
        new = NewTokens(layer, tokens, tokens)
        attend_layer(AttentionCall(layer.attention, tokens, new, tokens, None, 1.0, rotary), REFERENCE)
    memory = cache.memory()
    assert memory.num_tokens - memory.num_encoded == 128 + 4
    assert memory.ratio >= 5.5
    assert memory.fp16_bytes / memory.allocated_bytes >= 5.5
    assert (memory.key_bits, memory.value_bits) == (8 * (50 + 2) / 192, 8 * (48 + 2) / 192)


def test_settings_of_the_fit_cannot_be_changed_later(trained: Any) -> None:
    model, artifact = trained
    with pytest.raises(ConfigError, match="bits"):
        kvcli.attach(model, "commvq", artifact=artifact, bits=1)
    with pytest.raises(ConfigError, match="residual_length"):
        kvcli.attach(model, "commvq", artifact=artifact, residual_length=-1)
    with pytest.raises(UsageError, match="no implementation"):
        kvcli.attach(model, "commvq", artifact=artifact, impl="magic")
    with pytest.raises(UsageError, match="artifact"):
        kvcli.attach(model, "commvq")
    kvcli.attach(model, "fp16").detach()  # nothing of the above left the model attached


def test_several_sequences_of_a_prompt(trained: Any, prompt: Any) -> None:
    model, artifact = trained
    with kvcli.attach(model, "commvq", artifact=artifact, **WINDOW) as session, torch.no_grad():
        cache, settings = session.new_cache(), {"num_return_sequences": 2, "do_sample": True}
        out = model.generate(**prompt(30, 4), past_key_values=cache, max_new_tokens=20, **settings)
        assert out.shape == (4, 50)
        assert cache.memory().num_encoded > 0


def test_residual_and_sinks_may_be_zero(trained: Any, prompt: Any) -> None:
    model, artifact = trained
    out = logits(model, artifact, prompt_and_steps(prompt, 20, 1), residual_length=0, sink_length=0)
    assert out.isfinite().all()
