"""KIVI: keys quantized per channel, values per token, the last tokens in full precision; and its baseline, RTN.

Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", ICML 2024, https://arxiv.org/abs/2402.02750
"""

from __future__ import annotations

from kvcli.methods.config import KIVIConfig, RTNConfig
from kvcli.methods.layer_codec import LayerCodec
from kvcli.methods.method import Method, Schedule
from kvcli.methods.scalar.codec import PerChannelKey, PerTokenKey, PerTokenValue


def kivi_schedules(config: KIVIConfig) -> tuple[Schedule, Schedule]:
    """Of T tokens, floor(T / R) * R keys and max(0, T - R) values are codes (KIVI section 3.3)."""
    length = config.residual_length
    return Schedule(keep=0, block=length, multiple_of=length), Schedule(keep=length, block=1)


METHOD = Method(
    name="kivi",
    summary="keys per channel, values per token, asymmetric",
    bits="1, 2, 4, 8",
    paper="KIVI, ICML 2024",
    arxiv="2402.02750",
    config_cls=KIVIConfig,
    build=lambda spec, config, layer_idx: LayerCodec(
        PerChannelKey(spec, config.k_bits, config.group_size), PerTokenValue(spec, config.v_bits, config.group_size)
    ),
    paper_settings={f"kivi-{bits}": {"sink_length": 0, "residual_length": 128} for bits in (4, 2)},
    schedules=kivi_schedules,
    attend_kernels="kvcli.methods.scalar.attend_kernels",
    bench=("kivi-2", "kivi-4"),
    example_settings={"residual_length": 8, "group_size": 4},
)

RTN = Method(
    name="rtn",
    summary="round to nearest, per token",
    bits="1, 2, 4, 8",
    config_cls=RTNConfig,
    build=lambda spec, config, layer_idx: LayerCodec(
        PerTokenKey(spec, config.k_bits, config.group_size), PerTokenValue(spec, config.v_bits, config.group_size)
    ),
    attend_kernels="kvcli.methods.token_attend_kernels",
    paper_settings={"rtn-2": {"sink_length": 0, "residual_length": 32}},
    example_settings={"residual_length": 6, "flush_block": 1, "group_size": 8},
)
"""Round to nearest: keys and values per token in groups of channels (section 3.1), with a window as other methods."""
