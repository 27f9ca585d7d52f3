"""Layers made by hand that compute as wrapped and quantized projections of other libraries do."""

from typing import Any

import torch
from torch import Tensor, nn


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


class RoundedInputs(nn.Module):
    """A projection that rounds its inputs to FP8, as dynamic quantization of activations does."""

    least_scale = 1e-12

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True).float().clamp_min(self.least_scale) / 448
        return self.linear(((x / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype))


class RowScaledInputs(RoundedInputs):
    """The same, without a least scale: a row of zeros becomes NaN, as it does with torchao on a GPU."""

    least_scale = 0.0
