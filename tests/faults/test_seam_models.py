"""Models whose projections are wrapped, quantized or offloaded."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import peft
import pytest
import torch
from factories import load, make_model, record
from families import make as make_family
from torch import Tensor, nn
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerGroup,
    quantize_,
)
from transformers import AutoModelForCausalLM

import kvcli
from kvcli.artifact import Artifact
from kvcli.errors import ArtifactError, UnsupportedModelError
from kvcli.fingerprint import differs, fingerprint
from kvcli.fit import assemble, fit_recording
from kvcli.models import check_finite
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


class Int4Linear(nn.Module):
    """A projection with 4-bit codes in int32 words, its buffers as GPTQ lays them out; no parameter is left.

    Codes of 8 input channels share a word of `qweight` [in / 8, out]; codes of zeros of 8 output channels share one of
    `qzeros` [groups, out / 8]. AWQ differs: there words of `qweight` [in, out / 8] hold output channels, and there is
    no `g_idx`.
    """

    group_size, keeps_order, packed_dim = 16, True, 0

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        groups = linear.weight.data.T.unflatten(0, (-1, self.group_size))
        low, high = groups.amin(1), groups.amax(1)
        scales = (high - low) / 15
        zeros = (-low / scales).round().clamp(0, 15)
        codes = (groups / scales.unsqueeze(1) + zeros.unsqueeze(1)).round().clamp(0, 15).flatten(0, 1)
        self.register_buffer("qweight", packed(codes, self.packed_dim))
        self.register_buffer("qzeros", packed(zeros, 1))
        self.register_buffer("scales", scales)
        if self.keeps_order:
            self.register_buffer("g_idx", torch.arange(self.in_features, dtype=torch.int32) // self.group_size)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.data)

    def forward(self, x: Tensor) -> Tensor:
        group = self.g_idx.long() if self.keeps_order else torch.arange(self.in_features) // self.group_size
        codes, zeros = unpacked(self.qweight, self.packed_dim), unpacked(self.qzeros, 1)
        y = x @ ((codes - zeros[group]) * self.scales[group]).to(x.dtype)
        return y if self.bias is None else y + self.bias.to(x.dtype)


class AwqLinear(Int4Linear):
    keeps_order, packed_dim = False, 1


def packed(codes: Tensor, dim: int) -> Tensor:
    """int32 words of 8 codes that are neighbours along a dimension."""
    words = (codes.to(torch.int64).unflatten(dim, (-1, 8)).movedim(dim + 1, -1) << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpacked(words: Tensor, dim: int) -> Tensor:
    codes = (words.unsqueeze(-1) >> torch.arange(0, 32, 4)) & 15
    return codes.movedim(-1, dim + 1).flatten(dim, dim + 1)


class Compressed(nn.Module):
    """A projection whose weight is decompressed at its first call, after which its scale is still there."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.data
        self.register_buffer("weight_scale", weight.abs().amax(1, keepdim=True) / 7)
        self.register_buffer("weight_packed", packed((weight / self.weight_scale).round() + 8, 1))
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "weight_packed"):
            self.weight = nn.Parameter((unpacked(self.weight_packed, 1) - 8) * self.weight_scale)
            del self.weight_packed
        return nn.functional.linear(x, self.weight, self.bias)


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


def replace_linears(model: Any, make: Any) -> Any:
    """Of all layers, as quantizers do."""
    for layer in model.model.layers:
        for name, module in list(layer.named_modules()):
            if isinstance(module, nn.Linear):
                parent, _, last = name.rpartition(".")
                setattr(layer.get_submodule(parent), last, make(module))
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


class RoundedInputs(nn.Module):
    """A projection that rounds its inputs to FP8, as dynamic quantization of activations does."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True).float().clamp_min(1e-12) / 448
        return self.linear(((x / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rounded_inputs_of_projections_do_not_look_like_other_attention(dtype: torch.dtype) -> None:
    """Tiny differences of what reaches o_proj become steps of FP8, which are no difference of the attention."""
    for seed in range(4):
        model = replace_linears(family_model("qwen2", seed).to(dtype), RoundedInputs)
        with kvcli.attach(model, "kivi-2", group_size=16, residual_length=16) as session:
            assert greedy(model, session.new_cache()).shape == (1, 42)


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


PARTS = ("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head", *(f"model.layers.{i}" for i in range(3)))


def placed(model: Any, folder: Path, **places: str) -> Any:
    """A model that accelerate runs on the CPU, with parts of it on disk."""
    device_map = {**dict.fromkeys(PARTS, "cpu"), **places}
    return accelerate.dispatch_model(model, device_map, "cpu", offload_dir=str(folder), force_hooks=True)


@pytest.mark.parametrize("part", [None, "lm_head", "model.embed_tokens", "model.norm"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])  # what caps gemma2's scores is found out by the probe alone
def test_placed_models_give_the_tokens_of_stock(family: str, part: str | None, tmp_path: Path) -> None:
    expected = greedy(make_family(family, num_hidden_layers=3))
    untied = make_family(family, num_hidden_layers=3, tie_word_embeddings=False)
    untied.lm_head.weight.data.copy_(untied.model.embed_tokens.weight)
    if family == "llama":
        expected = greedy(untied)
    model = placed(untied, tmp_path, **({} if part is None else {part: "disk"}))
    with kvcli.attach(model, "fp16", residual_length=8, sink_length=2, flush_block=1) as session:
        cache = session.new_cache()
        assert torch.equal(greedy(model, cache), expected)
        assert cache.memory().num_encoded
    with kvcli.attach(model, "kivi-2", group_size=16, residual_length=16) as session:
        assert greedy(model, session.new_cache()).shape == (1, 42)


@pytest.mark.parametrize("device_map", [{"": "cpu"}, "auto"])
def test_models_loaded_with_a_device_map(device_map: Any, tiny_model: Any, tmp_path: Path) -> None:
    tiny_model.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device_map).eval()
    with kvcli.attach(model, "fp16", residual_length=8, sink_length=2, flush_block=1) as session:
        assert torch.equal(greedy(model, session.new_cache()), greedy(tiny_model.to(model.device)))


REMEDY = "load the model without offloading, over more GPUs or with quantized weights"


@pytest.mark.parametrize("part", ["model.layers.1", "model.layers.1.mlp"])
def test_layers_on_disk_are_refused(part: str, tiny_model: Any, tmp_path: Path) -> None:
    places = {part: "disk"}
    if part.endswith("mlp"):
        places |= dict.fromkeys([f"model.layers.1.{x}" for x in ("self_attn", "input_layernorm")], "cpu")
        places["model.layers.1.post_attention_layernorm"] = "cpu"
    model = placed(tiny_model, tmp_path, **places)
    with pytest.raises(UnsupportedModelError, match=f"layer 1 is offloaded or not loaded .*{REMEDY}"):
        kvcli.attach(model, "kivi-2")


def test_a_device_map_that_needs_the_disk_is_refused(tiny_model: Any, tmp_path: Path) -> None:
    tiny_model.save_pretrained(tmp_path, max_shard_size="50KB")
    placing = {"device_map": "auto", "max_memory": {"cpu": "120KB"}, "offload_folder": tmp_path / "disk"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, **placing)
    with pytest.raises(UnsupportedModelError, match=REMEDY):
        kvcli.attach(model, "kivi-2")


def test_offloaded_layers_are_refused(tiny_model: Any, tiny_artifact: Callable[[Any], Artifact]) -> None:
    accelerate.cpu_offload(tiny_model, execution_device=torch.device("cpu"))
    with pytest.raises(UnsupportedModelError, match="offloaded"):
        kvcli.attach(tiny_model, "qjl")
    with pytest.raises(UnsupportedModelError, match="offloaded"):
        kvcli.attach(tiny_model, "commvq", artifact=tiny_artifact(get_method("commvq")))
