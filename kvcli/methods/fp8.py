"""FP8: 8-bit floating point (OCP e4m3, as torch.float8_e4m3fn) with one scale per token and head.

The format: Micikevicius et al., "FP8 Formats for Deep Learning", 2022, https://arxiv.org/abs/2209.05433
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcli.kernels.launch import FP16_MAX, TINY
from kvcli.methods.base import Codes, KeyCodec, ValueCodec
from kvcli.methods.config import BiasOffsetConfig
from kvcli.methods.layer_codec import LayerCodec
from kvcli.methods.method import Method
from kvcli.spec import ModelSpec

_E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max
_LIFT = 256.0


@dataclass(frozen=True)
class FP8Codes(Codes):
    """Tokens in 8-bit floats, a scale per token and head.

    Attributes:
        x: float8_e4m3fn bits as uint8, [batch, num_kv_heads, time, head_dim].
        scale: float16 [batch, num_kv_heads, time, 1], the largest magnitude divided by 448 / 256; the factor 256 keeps
            scales of small values out of float16's subnormal numbers.
    """

    x: Tensor
    scale: Tensor


class FP8(KeyCodec[FP8Codes, None], ValueCodec[FP8Codes]):
    """x_hat = scale / 256 * x8, with the scale that makes a token's largest magnitude in a head 448."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec

    def bits_per_token(self) -> float:
        return 8.0 * self.spec.kv_dim + 16 * self.spec.num_kv_heads

    def encode(self, x: Tensor, state: None = None) -> FP8Codes:
        x = x.float()
        peak = x.abs().amax(-1, keepdim=True) / _E4M3_MAX
        scale = (peak * _LIFT).clamp(max=FP16_MAX).half()
        step = scale.float() / _LIFT
        unit = torch.where(step > 0, x / step.clamp_min(TINY), 0.0).clamp(-_E4M3_MAX, _E4M3_MAX)
        return FP8Codes(unit.to(torch.float8_e4m3fn).view(torch.uint8), scale)

    def decode(self, codes: FP8Codes, state: None = None) -> Tensor:
        return codes.x.view(torch.float8_e4m3fn).float() * (codes.scale.float() / _LIFT)


METHOD = Method(
    name="fp8",
    summary="8-bit floats (e4m3), a scale per token and head",
    bits="8",
    config_cls=BiasOffsetConfig,
    build=lambda spec, config, layer_idx: LayerCodec(FP8(spec), FP8(spec)),
    nominal_bits=lambda spec, config: (8.0, 8.0),
    paper_settings={"fp8": {"sink_length": 0, "residual_length": 0}},
    attend_kernels="kvcli.methods.token_attend_kernels",
    example_settings={"residual_length": 6, "flush_block": 1},
)
