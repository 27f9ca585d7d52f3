"""RTN: round to nearest, keys and values quantized per token in groups of channels, without fitting.

The baseline of "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache" (section 3.1, per-token quantization),
https://arxiv.org/abs/2402.02750
"""

from __future__ import annotations

from kvcli.methods.config import RTNConfig
from kvcli.methods.layer_codec import LayerCodec
from kvcli.methods.method import Method
from kvcli.methods.scalar.codec import PerTokenKey, PerTokenValue

METHOD = Method(
    name="rtn",
    summary="round to nearest, per token",
    bits="1, 2, 4, 8",
    config_cls=RTNConfig,
    build=lambda spec, config, layer_idx: LayerCodec(
        PerTokenKey(spec, config.k_bits, config.group_size), PerTokenValue(spec, config.v_bits, config.group_size)
    ),
    paper_settings={"rtn-2": {"sink_length": 0, "residual_length": 32}},
    example_settings={"residual_length": 6, "flush_block": 1, "group_size": 8},
)
