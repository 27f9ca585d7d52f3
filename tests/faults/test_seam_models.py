"""Models whose projections are wrapped or quantized."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from factories import load, make_model, record
from families import make as make_family
from passes import greedy
from quantized_layers import (
    Adapter,
    AwqLinear,
    Compressed,
    Int4Linear,
    Int8Linear,
    Packed,
    RoundedInputs,
    RowScaledInputs,
    replace_linears,
    replace_projections,
)
from torch import nn
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerGroup,
    quantize_,
)

import kvcli
from kvcli.artifact import Artifact
from kvcli.errors import ArtifactError, ModelError, UnsupportedModelError
from kvcli.fingerprint import differs, fingerprint
from kvcli.fit import assemble, fit_recording
from kvcli.models import check_finite
from kvcli.registry import get_method
from kvcli.spec import ModelSpec

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # peft reads it
    pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated:UserWarning"),  # it cannot merge
]


@pytest.mark.parametrize("make", [Adapter, Int8Linear, Packed])
def test_wrapped_and_quantized_projections(tiny_model: Any, make: Any) -> None:
    model = replace_projections(tiny_model, make)
    expected = greedy(model)
    with kvcli.attach(model, "fp16", residual_length=8, sink_length=2, flush_block=1) as session:
        cache = session.new_cache()
        assert torch.equal(greedy(model, cache), expected)
        assert cache.memory().num_encoded


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rounded_inputs_of_projections_do_not_look_like_other_attention(dtype: torch.dtype) -> None:
    """Tiny differences of what reaches o_proj become steps of FP8, which are no difference of the attention."""
    for seed in range(4):
        model = replace_linears(family_model("qwen2", seed).to(dtype), RoundedInputs)
        with kvcli.attach(model, "kivi-2", group_size=16, residual_length=16) as session:
            assert greedy(model, session.new_cache()).shape == (1, 42)


def test_weights_are_sampled_without_inputs_of_zeros() -> None:
    """Activations that are quantized by rows may be divided by the largest of a row; biases stay out."""
    model = family_model("qwen2")
    for name, x in model.named_parameters():
        if name.endswith("bias"):
            x.data.normal_()
    spec = ModelSpec.from_config(model.config)
    plain = fingerprint(model, spec)
    assert differs(fingerprint(replace_linears(model, RowScaledInputs), spec), plain) is None
    model.model.layers[1].self_attn.v_proj.linear.weight.data.fill_(torch.nan)
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn\.v_proj \(RowScaledInputs\) .* they are not finite"):
        fingerprint(model, spec)


def with_adapter(model: Any, weight: float = 1.0) -> Any:
    """A model with random low-rank updates of all projections, multiplied by `weight`."""
    settings = {"target_modules": ["q_proj", "k_proj", "v_proj"], "init_lora_weights": False}
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, **settings)).eval()
    for name, x in model.named_parameters():
        if "lora_B" in name:
            x.data *= weight
    return model


def with_int8(model: Any, config: Any = Int8WeightOnlyConfig) -> Any:
    quantize_(model, config())
    return model


def with_int4(model: Any) -> Any:
    return with_int8(model, partial(IntxWeightOnlyConfig, weight_dtype=torch.int4, granularity=PerGroup(16)))


def with_fp8(model: Any) -> Any:
    return with_int8(model, Float8WeightOnlyConfig)


QUANTIZED = (
    with_int8,
    with_int4,
    with_fp8,
    lambda model: replace_linears(model, Int4Linear),
    lambda model: replace_linears(model, AwqLinear),
    lambda model: replace_linears(model, Compressed),
)
NAMES = ("torchao int8", "torchao int4", "torchao fp8", "GPTQ's layout", "AWQ's layout", "decompressed later")


@pytest.mark.parametrize("make", [with_adapter, *QUANTIZED], ids=["adapter", *NAMES])
def test_peft_and_torchao_models(tiny_model: Any, make: Any) -> None:
    model = make(tiny_model)
    expected = greedy(model)
    with kvcli.attach(model, "fp16", residual_length=8, sink_length=2, flush_block=1) as session:
        cache = session.new_cache()
        assert torch.equal(greedy(model, cache), expected)
        assert cache.memory().num_encoded


COPIES = (
    with_int4,
    with_fp8,
    lambda model: replace_linears(model, Int4Linear),
    lambda model: replace_linears(model, AwqLinear),
    with_adapter,
    with_int8,
    lambda model: with_int8(model, Int8DynamicActivationInt8WeightConfig),
    lambda model: with_int8(model.to(torch.bfloat16)),
    lambda model: replace_projections(model, Int8Linear),
    lambda model: replace_projections(model, Packed),
    lambda model: with_adapter(with_int8(model)),
)


@pytest.mark.parametrize("make", COPIES)
@pytest.mark.parametrize("family", ["llama", "qwen2"])  # qwen2's projections have biases
def test_adapters_and_quantized_copies_are_the_same_model(make: Any, family: str) -> None:
    """Fault (calls): adapters (LoRA), quantized copies. Result: the same model as without; a merged adapter makes
    another. A quantized fine-tune cannot be told from a quantized original.
    """
    model, other = make_model(family), make_model(family)
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            if mine.dim() == 1:
                theirs.copy_(mine.normal_())
            else:
                theirs.add_(0.5 * theirs.std() * torch.randn_like(theirs))
    spec = ModelSpec.from_config(model.config)
    first, unlike = fingerprint(model, spec), fingerprint(other, spec)
    copied = fingerprint(make(model), spec)
    assert differs(copied, first) is None
    assert differs(first, copied) is None
    assert "differ by" in str(differs(copied, unlike))


@pytest.mark.parametrize("make", QUANTIZED, ids=NAMES)
@pytest.mark.parametrize("family", ["llama", "phi3"])  # phi3 projects queries, keys and values by one matrix
def test_quantized_models_are_recorded_fitted_and_run(make: Any, family: str, tmp_path: Path) -> None:
    model, plain = make(family_model(family)), family_model(family)
    check_finite(model)
    other = make(family_model(family, seed=2))
    samples = record(model, tmp_path / "samples")
    assert [samples.load(layer).k.isfinite().all() for layer in range(2)]
    assert differs(load(model).fingerprint, load(plain).fingerprint) is None
    assert differs(load(model).fingerprint, load(other).fingerprint) is not None
    for name in ("kivi", "squat", "qjl", "commvq"):
        method = get_method(name)
        settings = {**method.example_settings, **({"subspace_source": "calibration"} if name == "squat" else {})}
        artifact = None
        if method.fit is not None:
            folder = tmp_path / name
            fit_recording(samples, method, method.config_cls(**settings).resolve(samples.spec), folder)
            artifact, settings = assemble([folder]), {}
        for attached in (model, plain) if artifact is not None else (model,):
            with kvcli.attach(attached, name, artifact=artifact, **settings) as session:
                assert greedy(attached, session.new_cache()).shape == (1, 42)
    if artifact is not None:
        with pytest.raises(ArtifactError, match="differ by"):
            kvcli.attach(other, "commvq", artifact=artifact)


def family_model(family: str, seed: int = 1) -> Any:
    model = make_family(family)
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.copy_(torch.randn(weight.shape, generator=generator) * weight.std())
    return model


@pytest.mark.parametrize("make", [with_adapter, with_int8])
def test_an_artifact_of_the_base_model_is_accepted(
    tiny_model: Any, make: Any, tiny_artifact: Callable[[Any], Artifact]
) -> None:
    artifact = tiny_artifact(get_method("commvq"))
    model = make(tiny_model)
    with kvcli.attach(model, "commvq", artifact=artifact) as session:
        assert greedy(model, session.new_cache()).shape == (1, 42)


@pytest.mark.parametrize("make", [with_adapter, with_int8])
def test_an_artifact_fitted_on_an_adapted_or_quantized_model(tiny_model: Any, make: Any, tmp_path: Path) -> None:
    model, method = make(tiny_model), get_method("squat")
    samples = record(model, tmp_path / "samples")
    config = method.config_cls(**{**method.example_settings, "subspace_source": "calibration"}).resolve(samples.spec)
    fit_recording(samples, method, config, tmp_path / "run")
    assemble([tmp_path / "run"]).save(tmp_path / "artifact")
    for fitting in (model, load(model), make_model("llama")):
        with kvcli.attach(fitting, "squat", artifact=tmp_path / "artifact") as session:
            attached = getattr(fitting, "model", fitting) if isinstance(fitting, kvcli.models.LoadedModel) else fitting
            assert greedy(attached, session.new_cache()).shape == (1, 42)


def test_a_merged_adapter_makes_another_model(tiny_model: Any, tiny_artifact: Callable[[Any], Artifact]) -> None:
    """Fault (calls): an artifact and a model with other weights. Result: refused; the message says by how much a
    sample of the key and value projections differs.
    """
    artifact = tiny_artifact(get_method("commvq"))
    merged = with_adapter(tiny_model).merge_and_unload()
    with pytest.raises(ArtifactError, match=r"weights .* differ by .* %.* or an adapter that was merged"):
        kvcli.attach(merged, "commvq", artifact=artifact)


@pytest.mark.parametrize("thing", [object(), nn.Linear(2, 2)])
def test_what_is_no_model_is_refused(thing: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="is not a model of transformers"):
        kvcli.attach(thing, "kivi-2")


def test_commands_are_silent_about_an_installed_torchao(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvcli", "generate", str(tmp_path), "--prompt", "hi"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr.count("\n") == 1, done.stderr
    assert "config.json" in done.stderr
