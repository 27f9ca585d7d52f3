"""Models whose projections are wrapped or quantized."""

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from factories import load, make_model, record
from families import make as make_family
from passes import assert_same_tokens, greedy
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
from kvcli.artifact.fit import assemble, fit_recording
from kvcli.errors import ArtifactError, ModelError, UnsupportedModelError
from kvcli.models.fingerprint import differs, fingerprint
from kvcli.models.load import LoadedModel, check_finite
from kvcli.registry import get_method
from kvcli.spec import ModelSpec

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # peft reads it
    pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated:UserWarning"),  # it cannot merge
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rounded_inputs_of_projections_do_not_look_like_other_attention(dtype: torch.dtype) -> None:
    """Tiny differences of what reaches o_proj become steps of FP8, which are no difference of the attention."""
    for seed in range(4):
        model = replace_linears(family_model("qwen2", seed).to(dtype), RoundedInputs)
        assert generates(model, "kivi-2", group_size=16, residual_length=16)


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
    partial(replace_linears, make=Int4Linear),
    partial(replace_linears, make=AwqLinear),
    partial(replace_linears, make=Compressed),
)
NAMES = ("torchao int8", "torchao int4", "torchao fp8", "GPTQ's layout", "AWQ's layout", "decompressed later")


@pytest.mark.parametrize(
    "make",
    [with_adapter, *QUANTIZED, *(partial(replace_projections, make=x) for x in (Adapter, Int8Linear, Packed))],
    ids=["adapter", *NAMES, "wrapped", "int8 buffers", "no tensor"],
)
def test_wrapped_and_quantized_models_give_their_own_tokens(tiny_model: Any, make: Any) -> None:
    assert_same_tokens(model := make(tiny_model), greedy(model))


COPIES = (
    *QUANTIZED[:-1],
    with_adapter,
    lambda model: with_int8(model, Int8DynamicActivationInt8WeightConfig),
    lambda model: with_int8(model.to(torch.bfloat16)),
    partial(replace_projections, make=Int8Linear),
    partial(replace_projections, make=Packed),
    lambda model: with_adapter(with_int8(model)),
)


@pytest.mark.parametrize("make", COPIES)
@pytest.mark.parametrize("family", ["llama", "qwen2"])  # qwen2's projections have biases
def test_adapters_and_quantized_copies_are_the_same_model(make: Any, family: str) -> None:
    """Fault: adapters (LoRA), quantized copies. Result: the same model as without; a merged adapter makes
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


def family_model(family: str, seed: int = 1) -> Any:
    model = make_family(family)
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.copy_(torch.randn(weight.shape, generator=generator) * weight.std())
    return model


def generates(attached: Any, method: str, **options: Any) -> bool:
    """Whether a model, or a loaded one, generates with a method."""
    with kvcli.attach(attached, method, **options) as session:
        model = attached.model if isinstance(attached, LoadedModel) else attached
        return greedy(model, session.new_cache(), 4).shape == (1, 34)


@pytest.mark.parametrize(
    ("family", "make"),
    [("llama", with_adapter), *((family, make) for family in ("llama", "phi3") for make in QUANTIZED)],
    ids=["llama adapter", *(f"{family} {name}" for family in ("llama", "phi3") for name in NAMES)],
)
def test_adapted_and_quantized_models_are_recorded_fitted_and_run(family: str, make: Any, tmp_path: Path) -> None:
    """phi3 projects queries, keys and values by one matrix."""
    model, plain, other = make(family_model(family)), family_model(family), make(family_model(family, seed=2))
    check_finite(model)
    samples = record(model, tmp_path / "samples")
    assert [samples.load(layer).k.isfinite().all() for layer in range(2)]
    assert differs(load(model).fingerprint, load(plain).fingerprint) is None
    assert differs(load(model).fingerprint, load(other).fingerprint) is not None
    for name in ("kivi", "qjl"):
        assert generates(model, name, **get_method(name).example_settings)
    for name, changes, ours in (("squat", {"subspace_source": "calibration"}, load(model)), ("commvq", {}, model)):
        method = get_method(name)
        config = method.config_cls(**{**method.example_settings, **changes}).resolve(samples.spec)
        fit_recording(samples, method, config, tmp_path / name)
        artifact = assemble([tmp_path / name])
        for attached in (ours, plain):
            assert generates(attached, name, artifact=artifact)
        with pytest.raises(ArtifactError, match="differ by"):
            kvcli.attach(other, name, artifact=artifact)


def test_an_artifact_of_the_base_model_is_accepted_until_an_adapter_is_merged(tiny_artifact: Any) -> None:
    """Fault: an artifact and a model with other weights. Result: refused; the message says by how much a
    sample of the key and value projections differs.
    """
    artifact = tiny_artifact(get_method("commvq"))
    for make in (with_adapter, with_int8):
        assert generates(make(make_model("llama")), "commvq", artifact=artifact)
    with pytest.raises(ArtifactError, match=r"weights .* differ by .* %.* or an adapter that was merged"):
        kvcli.attach(with_adapter(make_model("llama")).merge_and_unload(), "commvq", artifact=artifact)


@pytest.mark.parametrize("thing", [object(), nn.Linear(2, 2)])
def test_what_is_no_model_is_refused(thing: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="is not a model of transformers"):
        kvcli.attach(thing, "kivi-2")


def test_commands_are_silent_about_an_installed_torchao(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvcli", "generate", str(tmp_path), "--prompt", "hi"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr.count("\n") == 1, done.stderr
    assert "config.json" in done.stderr
