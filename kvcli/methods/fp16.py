"""`fp16`: keys and values as they are, in the model's dtype: the baseline, and a test of all that is not a codec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvcli.methods.base import Codes, KeyCodec, LayerCodec, State, ValueCodec
from kvcli.methods.config import CacheConfig
from kvcli.methods.method import Method
from kvcli.spec import ModelSpec


@dataclass(frozen=True)
class FP16Codes(Codes):
    """Attributes:
    x: [batch, num_kv_heads, time, head_dim] in the model's dtype.
    """

    x: Tensor


class _FP16Key(KeyCodec[FP16Codes]):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec

    def encode(self, x: Tensor, state: State | None = None) -> FP16Codes:
        return FP16Codes(x)

    def decode(self, codes: FP16Codes, state: State | None = None) -> Tensor:
        return codes.x.float()

    def bits_per_token(self) -> float:
        return 16.0 * self.spec.kv_dim


class _FP16Value(_FP16Key, ValueCodec[FP16Codes]):
    pass


def _build(spec: ModelSpec, config: Any, layer_idx: int) -> LayerCodec:
    return LayerCodec(_FP16Key(spec), _FP16Value(spec))


METHOD = Method(
    name="fp16",
    summary="keys and values uncompressed, in the model's 16-bit dtype",
    bits="16",
    paper="-",
    config_cls=CacheConfig,
    build=_build,
    nominal_bits=lambda spec, config: (16.0, 16.0),
    example_settings={"residual_length": 6, "flush_block": 1},
)
