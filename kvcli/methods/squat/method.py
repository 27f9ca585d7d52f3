"""SQuat's entries in the registry (arXiv 2503.24358): post-RoPE and pre-RoPE."""

from __future__ import annotations

from functools import partial

from kvcli.methods.base import Space
from kvcli.methods.kivi import kivi_schedules
from kvcli.methods.layer_codec import LayerCodec
from kvcli.methods.method import Method
from kvcli.methods.scalar.per_token import PerTokenValue
from kvcli.methods.squat.codec import SQuatKey
from kvcli.methods.squat.config import SQuatConfig
from kvcli.methods.squat.fit import fit_subspace
from kvcli.spec import ModelSpec


def _build(space: Space, spec: ModelSpec, config: SQuatConfig, layer_idx: int) -> LayerCodec[SQuatKey, PerTokenValue]:
    return LayerCodec(SQuatKey(spec, config, space), PerTokenValue(spec, config.v_bits, config.group_size))


def _method(name: str, summary: str, space: Space) -> Method:
    return Method(
        name=name,
        summary=summary,
        bits="1, 2, 4, 8",
        paper="SQuat, 2025",
        arxiv="2503.24358",
        config_cls=SQuatConfig,
        build=partial(_build, space),
        nominal_bits=lambda spec, config: (config.k_bits, config.v_bits),
        paper_settings={f"{name}-2": {"sink_length": 0, "residual_length": 32}},
        schedules=kivi_schedules,
        fit=fit_subspace,
        fit_metrics={"subspace_energy": "share of the queries' energy in the subspace"},
        attend_kernels="kvcli.methods.scalar.attend_kernels",
        example_settings={"residual_length": 8, "group_size": 4},
        bench=(f"{name}-2",),
    )


METHOD = _method("squat", "KIVI's format, key errors orthogonal to the query subspace", "post_rope")
METHOD_PRE = _method("squat-pre", "SQuat before RoPE, which is applied after dequantization", "pre_rope")
