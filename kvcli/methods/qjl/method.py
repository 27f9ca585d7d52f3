"""QJL's entry in the registry."""

from __future__ import annotations

from kvcli.methods.layer_codec import LayerCodec
from kvcli.methods.method import Method
from kvcli.methods.qjl.codec import QJLKey
from kvcli.methods.qjl.config import QJLConfig
from kvcli.methods.scalar.per_token import PerTokenValue
from kvcli.spec import ModelSpec


def _build(spec: ModelSpec, config: QJLConfig, layer_idx: int) -> LayerCodec[QJLKey, PerTokenValue]:
    return LayerCodec(QJLKey(spec, config, layer_idx), PerTokenValue(spec, config.v_bits, config.group_size))


def _nominal_bits(spec: ModelSpec, config: QJLConfig) -> tuple[float, float]:
    """Sign bits per key value, averaged over the layers, without norms as in the paper; and bits per value code."""
    dims = [sum(config.sketch_dims(spec, layer_idx)) for layer_idx in range(spec.num_layers)]
    return sum(dims) / len(dims) / spec.head_dim, config.v_bits


METHOD = Method(
    name="qjl",
    summary="signs of a random projection for keys, per-token values",
    bits="about 3",
    paper="QJL, 2024",
    arxiv="2406.03482",
    config_cls=QJLConfig,
    build=_build,
    nominal_bits=_nominal_bits,
    paper_settings={"qjl": {"sink_length": 0, "residual_length": 128}},
    attend_kernels="kvcli.methods.qjl.attend_kernels",
    bench=("qjl",),
    example_settings={"residual_length": 6, "flush_block": 1, "num_outliers": 2, "group_size": 8},
)
