"""`rtn`: round to nearest, keys and values per token: the baseline that needs nothing."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvcli.methods.base import LayerCodec
from kvcli.methods.config import CacheConfig
from kvcli.methods.method import Method
from kvcli.methods.scalar.per_token import PerTokenKey, PerTokenValue
from kvcli.spec import ModelSpec


class RTNConfig(CacheConfig):
    """Settings of round-to-nearest."""

    k_bits: Literal[1, 2, 4, 8] = Field(default=4, description="bits of a key code")
    v_bits: Literal[1, 2, 4, 8] = Field(default=4, description="bits of a value code")
    group_size: int = Field(default=32, ge=1, description="channels that share a scale")


def _build(spec: ModelSpec, config: RTNConfig, layer_idx: int) -> LayerCodec:
    return LayerCodec(
        PerTokenKey(spec, config.k_bits, config.group_size), PerTokenValue(spec, config.v_bits, config.group_size)
    )


METHOD = Method(
    name="rtn",
    summary="round to nearest, per token",
    bits="1, 2, 4, 8",
    paper="-",
    config_cls=RTNConfig,
    build=_build,
    nominal_bits=lambda spec, config: (config.k_bits, config.v_bits),
    for_bits=lambda bits: {"k_bits": bits, "v_bits": bits},
    example_settings={"residual_length": 6, "flush_block": 1, "group_size": 8},
)
