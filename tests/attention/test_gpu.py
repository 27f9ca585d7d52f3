"""The same laws on a GPU: the cache against transformers' own, codes and fits against the CPU's."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from commvq_reordered import reordered_attend
from factories import CONFIG, WINDOW, clustered, fitted_keys, make_model, make_spec, prompt_and_steps, record
from transformers import DynamicCache

import kvcli
from kvcli.artifact.artifact import Artifact
from kvcli.artifact.fit import assemble, fit_recording
from kvcli.attention.backend import REFERENCE
from kvcli.methods.commvq.config import CommVQConfig
from kvcli.methods.commvq.fit_keys import fit_keys
from kvcli.methods.commvq.keys import CommVQKeyCodec
from kvcli.methods.samples import BLOCK_TOKENS, TokenBlocks
from kvcli.registry import get_method
from kvcli.seam.versions import with_cache

pytestmark = pytest.mark.gpu


def moved(*pieces: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    return [{name: x.cuda() for name, x in piece.items()} for piece in pieces]


def test_tokens_equal_dynamic_cache_in_float32(any_model: Any, prompt: Any) -> None:
    model = any_model.cuda()
    (inputs,) = moved(prompt(6, 23, 40))
    settings = {"max_new_tokens": 24, "do_sample": False}
    expected = model.generate(**inputs, **with_cache(DynamicCache(config=model.config)), **settings)
    with kvcli.attach(model, "fp16", **WINDOW) as session:
        assert torch.equal(model.generate(**inputs, **with_cache(session.new_cache()), **settings), expected)


def test_logits_agree_in_bfloat16(any_model: Any, prompt: Any) -> None:
    model = any_model.cuda().to(torch.bfloat16)
    inputs = moved(*prompt_and_steps(prompt, 12, 31))

    def logits(cache: Any) -> list[torch.Tensor]:
        with torch.no_grad():
            return [model(**x, **with_cache(cache)).logits[:, -1].float() for x in inputs]

    expected = logits(DynamicCache(config=model.config))
    with kvcli.attach(model, "fp16", **WINDOW) as session:
        actual = logits(session.new_cache())
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours - theirs).norm() / theirs.norm() < 2e-2


@pytest.mark.parametrize("method", ["kivi-2", "qjl"])
def test_two_streams_encode_long_prompts_as_one_does(method: str, prompt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama", head_dim=64).cuda()
    pieces = moved(*prompt_and_steps(prompt, 700, 1100))
    actual = []
    for longest in (512, 10**9):
        monkeypatch.setattr("kvcli.attention.layer._MIN_SIDE_STREAM_TOKENS", longest)
        with kvcli.attach(model, method, residual_length=32) as session, torch.no_grad():
            cache = session.new_cache()
            for piece in pieces:
                model(**piece, **with_cache(cache))
            stores = [layer.store for layer in cache.layers]
            actual.append([x.codes.tensors() for s in stores for x in (s.key_codes, s.value_codes)])
    for two_streams, one_stream in zip(*actual, strict=True):
        for name, codes in two_streams.items():
            assert torch.equal(codes, one_stream[name]), name


def test_offloaded_layers_come_back(prompt: Any) -> None:
    model = make_model("llama").cuda()
    with kvcli.attach(model, "kivi-2", residual_length=32) as session, torch.no_grad():
        cache = session.new_cache()
        model(**moved(prompt(70))[0], **with_cache(cache))
        layer = cache.layers[0]
        layer.offload()
        assert layer.store.keys.device.type == layer.store.values.device.type == "cpu"
        layer.prefetch()
        assert layer.store.keys.device.type == layer.store.values.device.type == "cuda"


def test_codes_are_those_of_the_cpu() -> None:
    codec, keys = fitted_keys(make_spec(), CommVQConfig(codebook_size=16, num_residuals=4, key_iterations=6))
    expected = codec.encode(keys[None]).packed
    actual = codec.cuda().encode(keys[None].cuda()).packed.cpu()
    assert (actual == expected).float().mean() > 0.999  # sums in another order may flip a near-tie


def test_fit_and_attention_on_the_gpu(tiny_model: Any, prompt: Any, tmp_path: Any) -> None:
    recording = record(tiny_model, tmp_path / "samples")
    method, config = get_method("commvq"), CONFIG.resolve(recording.spec)
    errors: dict[str, list[float]] = {"cpu": [], "cuda": []}
    for device, found in errors.items():

        def note(layer: Any, metrics: Any, actual: Any, found: list[float] = found) -> None:
            found.extend((*metrics["key_nmse"], *metrics["value_nmse"]))

        fit_recording(recording, method, config, tmp_path / device, device=device, done=note)
    assert torch.allclose(*map(torch.tensor, errors.values()), rtol=0.15)
    artifact: Artifact = assemble([tmp_path / "cuda"])
    model = tiny_model.cuda()
    inputs = moved(*prompt_and_steps(prompt, 40, 17, 3))
    outputs, calls = [], []

    def reordered(*arguments: Any) -> Any:
        calls.append(arguments)
        return reordered_attend(*arguments)

    for attend in (REFERENCE.attend_codes, reordered):
        with kvcli.attach(model, "commvq", artifact=artifact, impl="reference", **WINDOW) as session, torch.no_grad():
            session.backend = replace(REFERENCE, attend_codes=attend, attend_dequantized=attend)
            cache = session.new_cache()
            outputs.append([model(**piece, **with_cache(cache)).logits[:, -1] for piece in inputs][-1])
    assert torch.allclose(*outputs, atol=1e-4)
    assert calls


def test_memory_of_a_million_tokens_stays_bounded() -> None:
    spec, tokens, config = make_spec(64, 1), 1_000_000, CommVQConfig(bits=1, key_iterations=2)
    torch.cuda.reset_peak_memory_stats()
    codec = CommVQKeyCodec(spec, config.resolve(spec)).cuda()
    keys = clustered(1, 10_000, 64).cuda().repeat(1, tokens // 10_000, 1)
    keys = keys + 0.1 * torch.randn_like(keys)
    blocks = TokenBlocks(tokens, lambda: keys.split(BLOCK_TOKENS, dim=1))
    with torch.no_grad():
        fit_keys(codec, blocks, config.resolve(spec), torch.Generator().manual_seed(0))
    assert torch.cuda.max_memory_allocated() < 12 * keys.nbytes
    assert codec.codebook.isfinite().all()
