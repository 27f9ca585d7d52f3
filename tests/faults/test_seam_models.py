"""Models whose projections are wrapped, quantized or offloaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kvcli
from kvcli.errors import UnsupportedModelError


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


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft reads it
def test_peft_model(tiny_model: Any) -> None:
    peft = pytest.importorskip("peft")
    settings = {"target_modules": ["q_proj", "k_proj", "v_proj"], "init_lora_weights": False}
    model = peft.get_peft_model(tiny_model, peft.LoraConfig(r=2, **settings))
    expected = greedy(model.eval())
    with kvcli.attach(model, "fp16", residual_length=8, sink_length=2, flush_block=1) as session:
        assert torch.equal(greedy(model, session.new_cache()), expected)


def test_torchao_int8_model(tiny_model: Any) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(tiny_model, quantization.Int8WeightOnlyConfig())
    expected = greedy(tiny_model)
    with kvcli.attach(tiny_model, "fp16", residual_length=8, sink_length=2, flush_block=1) as session:
        assert torch.equal(greedy(tiny_model, session.new_cache()), expected)


def test_offloaded_layers_are_refused(tiny_model: Any) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.cpu_offload(tiny_model, execution_device=torch.device("cpu"))
    with pytest.raises(UnsupportedModelError, match="offloaded"):
        kvcli.attach(tiny_model, "qjl")
