"""Models whose projections are wrapped, quantized or offloaded."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from factories import load, make_model, record
from torch import Tensor, nn
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_

import kvcli
from kvcli.artifact import Artifact
from kvcli.errors import ArtifactError, UnsupportedModelError
from kvcli.fingerprint import differs, fingerprint
from kvcli.fit import assemble, fit_recording
from kvcli.registry import get_method
from kvcli.spec import ModelSpec

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # peft reads it
    pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated:UserWarning"),  # it cannot merge
]


class Adapter(nn.Module):
    """A projection with a low-rank update, its modules named as peft names them."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, base_layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


class Int8Linear(nn.Module):
    """A projection whose weight is int8 in buffers, as quantizers keep it; no parameter is left."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.data
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("qweight", (weight / scale).round().to(torch.int8))
        self.register_buffer("scales", scale)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.qweight * self.scales).T


class Packed(nn.Module):
    """A projection without any tensor that torch knows of."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = [linear.weight.data]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight[0].T


def replace_projections(model: Any, make: Any) -> Any:
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, name, make(getattr(layer.self_attn, name)))
    return model


def greedy(model: Any, cache: Any = None) -> Tensor:
    ids = torch.randint(3, 97, (1, 30), generator=torch.Generator().manual_seed(0))
    return model.generate(ids, past_key_values=cache, max_new_tokens=12, do_sample=False)


@pytest.mark.parametrize("make", [Adapter, Int8Linear, Packed])
def test_wrapped_and_quantized_projections(tiny_model: Any, make: Any) -> None:
    model = replace_projections(tiny_model, make)
    expected = greedy(model)
    with kvcli.attach(model, "fp16", residual_length=8, sink_length=2, flush_block=1) as session:
        cache = session.new_cache()
        assert torch.equal(greedy(model, cache), expected)
        assert cache.memory().num_encoded


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


@pytest.mark.parametrize("make", [with_adapter, with_int8])
def test_peft_and_torchao_models(tiny_model: Any, make: Any) -> None:
    model = make(tiny_model)
    expected = greedy(model)
    with kvcli.attach(model, "fp16", residual_length=8, sink_length=2, flush_block=1) as session:
        cache = session.new_cache()
        assert torch.equal(greedy(model, cache), expected)
        assert cache.memory().num_encoded


COPIES = (
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


def test_offloaded_layers_are_refused(tiny_model: Any, tiny_artifact: Callable[[Any], Artifact]) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.cpu_offload(tiny_model, execution_device=torch.device("cpu"))
    with pytest.raises(UnsupportedModelError, match="offloaded"):
        kvcli.attach(tiny_model, "qjl")
    with pytest.raises(UnsupportedModelError, match="offloaded"):
        kvcli.attach(tiny_model, "commvq", artifact=tiny_artifact(get_method("commvq")))
