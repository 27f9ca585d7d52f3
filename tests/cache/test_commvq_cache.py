"""CommVQ through the whole cache on a tiny model: its re-ordered attention, batches, bytes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from commvq_reordered import reordered_attend
from factories import CONFIG, WINDOW, make_model, prompt_and_steps, record

import kvcli
from kvcli.artifact.artifact import Artifact
from kvcli.artifact.fit import assemble, fit_recording
from kvcli.attention.backend import REFERENCE, AttentionBackend
from kvcli.attention.layer import attend_layer
from kvcli.cache.compressed import CompressedCache
from kvcli.cache.layer import NewTokens
from kvcli.errors import ConfigError, UsageError
from kvcli.methods.commvq.config import CommVQConfig
from kvcli.methods.layer_codec import PartialAttention
from kvcli.registry import get_method
from kvcli.rope import Rotation
from kvcli.seam.layer import AttentionCall, RotaryOutput
from kvcli.seam.patch import Seam
from kvcli.seam.sdpa import sdpa
from kvcli.seam.versions import with_cache
from kvcli.spec import ModelSpec


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Artifact]:
    """A tiny model with its artifact."""
    model, folder = make_model(request.param), tmp_path_factory.mktemp("trained")
    recording = record(model, folder / "samples")
    fit_recording(recording, get_method("commvq"), CONFIG.resolve(recording.spec), folder / "run")
    assemble([folder / "run"]).save(folder / "artifact")
    return model, Artifact.load(folder / "artifact")


def logits(
    model: Any, artifact: Artifact, pieces: list[dict[str, torch.Tensor]], backend: AttentionBackend = REFERENCE
) -> torch.Tensor:
    with kvcli.attach(model, "commvq", artifact=artifact, **WINDOW) as session, torch.no_grad():
        session.backend, cache = backend, session.new_cache()
        return [model(**piece, **with_cache(cache)).logits[:, -1] for piece in pieces][-1]


@pytest.mark.parametrize("lengths", [(40,), (40, 17, 3)])
def test_reordered_attention_equals_the_reference(trained: Any, prompt: Any, lengths: tuple[int, ...]) -> None:
    model, artifact = trained
    inputs, calls = prompt_and_steps(prompt, *lengths), []

    def attend(*arguments: Any) -> PartialAttention:
        calls.append(arguments)
        return reordered_attend(*arguments)

    reordered = logits(model, artifact, inputs, replace(REFERENCE, attend_codes=attend, attend_dequantized=attend))
    assert torch.allclose(logits(model, artifact, inputs), reordered, atol=2e-5)
    assert len(calls) == 3 * len(model.model.layers)  # the prompt attends to itself, three steps to codes


def test_codes_really_replace_the_tokens(trained: Any, prompt: Any) -> None:
    model, artifact = trained
    inputs = prompt_and_steps(prompt, 60)
    with torch.no_grad():
        exact = model(torch.cat([p["input_ids"] for p in inputs], dim=1)).logits[:, -1]
    assert 1e-3 < (logits(model, artifact, inputs) - exact).norm() / exact.norm() < 0.5


def test_memory_equals_the_formula(trained: Any, prompt: Any) -> None:
    model, artifact = trained
    with kvcli.attach(model, "commvq", artifact=artifact, **WINDOW) as session, torch.no_grad():
        cache = session.new_cache()
        model(**prompt(50, 31), **with_cache(cache))
        codec, memory = session.codecs[0], cache.memory()
    assert memory.num_encoded == (50 - 8) + (31 - 8)
    bits = codec.key.bits_per_token() + codec.value.bits_per_token()
    assert memory.code_bytes * 8 == 3 * memory.num_encoded * bits
    assert memory.artifact_bytes == artifact.nbytes


def test_smollm_shape_fits_in_a_fifth_and_a_half() -> None:
    """4096 tokens of the built-in model's shape at 2 bits: at most 1/5.5 of the fp16 bytes, everything counted."""
    model = make_model("llama", num_attention_heads=9, num_key_value_heads=3, head_dim=64, num_hidden_layers=1,
                       hidden_size=576, max_position_embeddings=8192)  # fmt: skip
    spec, method = ModelSpec.from_config(model.config), get_method("commvq")
    config, seam = CommVQConfig(bits=2).resolve(spec), Seam(model, sdpa)  # type: ignore[arg-type]
    cache = CompressedCache(spec, method, config, [method.build(spec, config, 0)], seam)
    tokens, layer = torch.randn(1, 3, 4096, 64, dtype=torch.float16), cache.compressed[0]
    identity = Rotation(torch.ones(1, 1, 4096, 32), torch.zeros(1, 1, 4096, 32))
    rotary, new = RotaryOutput(torch.arange(4096)[None], identity), NewTokens(layer, tokens, tokens)
    with torch.no_grad():
        attend_layer(AttentionCall(layer.attention, tokens, new, tokens, None, 1.0, rotary), REFERENCE)
    memory = cache.memory()
    assert memory.num_tokens - memory.num_encoded == 128 + 4
    assert memory.ratio >= 5.5
    assert memory.fp16_bytes / memory.allocated_bytes >= 5.5
    assert (memory.key_bits, memory.value_bits) == (8 * (50 + 2) / 192, 8 * (48 + 2) / 192)


def test_settings_of_the_fit_cannot_be_changed_later(trained: Any) -> None:
    model, artifact = trained
    for options, error, said in (
        ({"bits": 1}, ConfigError, "bits"),
        ({"residual_length": -1}, ConfigError, "residual_length"),
        ({"impl": "magic"}, UsageError, "no implementation"),
        ({"artifact": None}, UsageError, "artifact"),
    ):
        with pytest.raises(error, match=said):
            kvcli.attach(model, "commvq", **{"artifact": artifact, **options})
    kvcli.attach(model, "fp16").detach()  # nothing of the above left the model attached
