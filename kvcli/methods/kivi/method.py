"""KIVI's entry in the registry."""

from __future__ import annotations

from kvcli.methods.base import LayerCodec, Method, Schedule, kernel_form
from kvcli.methods.kivi.codec import PerChannelKey
from kvcli.methods.kivi.config import KIVIConfig
from kvcli.methods.pertoken import PerTokenValue
from kvcli.spec import ModelSpec


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
    attend_forms={"fused": kernel_form("kvcli.methods.kivi.kernels")},
)
