"""CommVQ's entry in the registry."""

from __future__ import annotations

from kvcli.methods.base import LayerCodec
from kvcli.methods.commvq.config import CommVQConfig
from kvcli.methods.commvq.fit import fit_layer
from kvcli.methods.commvq.keys import CommVQKeyCodec
from kvcli.methods.commvq.values import CommVQValueCodec
from kvcli.methods.method import Method
from kvcli.spec import ModelSpec


def _build(spec: ModelSpec, config: CommVQConfig, layer_idx: int) -> LayerCodec:
    resolved = config.resolve(spec)
    return LayerCodec(CommVQKeyCodec(spec, resolved), CommVQValueCodec(spec, resolved))


def _nominal_bits(spec: ModelSpec, config: CommVQConfig) -> tuple[float, float]:
    """CommVQ Eq. 21 for keys, Eq. 10 for values."""
    resolved = config.resolve(spec)
    keys = resolved.num_residuals * resolved.bits_per_code / 2 / resolved.pairs_per_group
    return keys, resolved.value_code_bits / spec.kv_dim


METHOD = Method(
    name="commvq",
    summary="RoPE-commutative vector quantization of keys, additive quantization of values",
    bits="1, 2",
    paper="CommVQ, ICML 2025",
    config_cls=CommVQConfig,
    build=_build,
    nominal_bits=_nominal_bits,
    fit=fit_layer,
    needs_artifact=True,
    for_bits=lambda bits: {"bits": bits},
    bench=("commvq-1", "commvq-2"),
    attend_kernels="kvcli.methods.commvq.attend_kernels",
)
