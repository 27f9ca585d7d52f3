"""KIVI (ICML 2024, arXiv 2402.02750): keys quantized per channel, values per token, a full-precision residual."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from kvcli.methods.base import LayerCodec
from kvcli.methods.config import CacheConfig
from kvcli.methods.method import Method
from kvcli.methods.scalar.per_channel import PerChannelKey
from kvcli.methods.scalar.per_token import PerTokenValue
from kvcli.methods.schedule import Schedule
from kvcli.spec import ModelSpec


class KIVIConfig(CacheConfig):
    """Settings of KIVI; `residual_length` is the paper's R, and keys leave full precision in blocks of R."""

    k_bits: Literal[1, 2, 4, 8] = Field(default=2, description="bits of a key code")
    v_bits: Literal[1, 2, 4, 8] = Field(default=2, description="bits of a value code")
    group_size: int = Field(default=32, ge=1, description="tokens (keys) or channels (values) that share a scale")

    @model_validator(mode="after")
    def _whole_groups(self) -> KIVIConfig:
        if self.residual_length % self.group_size or not self.residual_length:
            raise ValueError(
                f"residual_length {self.residual_length} must be a positive multiple of group_size {self.group_size}"
            )
        return self


def kivi_schedules(config: KIVIConfig) -> tuple[Schedule, Schedule]:
    """Of T tokens, floor(T / R) * R keys and max(0, T - R) values are codes (KIVI section 3.3)."""
    length = config.residual_length
    return Schedule(keep=0, block=length, granule=length), Schedule(keep=length, block=1)


def _build(spec: ModelSpec, config: KIVIConfig, layer_idx: int) -> LayerCodec:
    return LayerCodec(
        PerChannelKey(spec, config.k_bits, config.group_size), PerTokenValue(spec, config.v_bits, config.group_size)
    )


METHOD = Method(
    name="kivi",
    summary="keys per channel, values per token, asymmetric",
    bits="1, 2, 4, 8",
    paper="KIVI, ICML 2024",
    config_cls=KIVIConfig,
    build=_build,
    nominal_bits=lambda spec, config: (config.k_bits, config.v_bits),
    schedules=kivi_schedules,
    for_bits=lambda bits: {"k_bits": bits, "v_bits": bits},
    bench=("kivi-2", "kivi-4"),
    attend_kernels="kvcli.methods.scalar.score_kernels",
)
