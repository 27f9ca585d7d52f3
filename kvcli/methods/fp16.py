"""FP16: keys and values uncompressed, in the model's dtype: the baseline, which also exercises cache and attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcli.methods.base import Codes, KeyCodec, ValueCodec
from kvcli.methods.config import CacheConfig
from kvcli.methods.layer_codec import LayerCodec
from kvcli.methods.method import Method
from kvcli.spec import ModelSpec


@dataclass(frozen=True)
class FP16Codes(Codes):
    """Uncompressed tokens x [batch, num_kv_heads, time, head_dim] in the model's dtype."""

    x: Tensor


class _FP16(KeyCodec[FP16Codes, None], ValueCodec[FP16Codes]):
    max_magnitude, exact = float("inf"), True

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec

    def encode(self, x: Tensor, state: None = None) -> FP16Codes:
        return FP16Codes(x)

    def decode(self, codes: FP16Codes, state: None = None) -> Tensor:
        return codes.x.float()

    def decode_to(self, codes: FP16Codes, state: None, dtype: torch.dtype) -> Tensor:
        return codes.x.to(dtype)

    def bits_per_token(self) -> float:
        return 16.0 * self.spec.kv_dim


METHOD = Method(
    name="fp16",
    summary="keys and values uncompressed, in the model's 16-bit dtype",
    bits="16",
    config_cls=CacheConfig,
    build=lambda spec, config, layer_idx: LayerCodec(_FP16(spec), _FP16(spec)),
    nominal_bits=lambda spec, config: (16.0, 16.0),
    example_settings={"residual_length": 6, "flush_block": 1},
)
