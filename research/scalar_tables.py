"""Table 1 of KIVI's paper (arXiv 2402.02750): round-to-nearest along either axis of keys and values."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from kvcli.methods.base import ValueCodec
from kvcli.methods.config import RTNConfig
from kvcli.methods.kivi import RTN as METHOD
from kvcli.methods.layer_codec import LayerCodec
from kvcli.methods.method import Method, Schedule
from kvcli.methods.scalar.codec import PerChannelCodec, PerChannelKey, PerTokenKey, PerTokenValue, ScalarCodes
from kvcli.spec import ModelSpec
from research.paper_tables import Measurement, PaperTable

_GROUP = 32
_ROWS = (
    (4, "token", "token", "66.48 / 29.51"),
    (2, "token", "token", "52.93 / 24.98"),
    (2, "channel", "channel", "2.88 / 0.74"),
    (2, "token", "channel", "2.80 / 0.26"),
    (2, "channel", "token", "63.53 / 28.60"),
)


class PerChannelValue(PerChannelCodec[None], ValueCodec[ScalarCodes]):
    """Values, quantized per channel: only to show why nobody does."""


def _measurements(spec: ModelSpec) -> Sequence[Measurement]:
    """All tokens are codes, as far as groups of 32 tokens are complete."""
    made = []
    for bits, keys, values, paper in _ROWS:
        settings = {"k_bits": bits, "v_bits": bits, "group_size": _GROUP, "residual_length": 0, "sink_length": 0}
        made.append(Measurement({"bits": bits, "keys": keys, "values": values}, _rtn(keys, values), settings, paper))
    return made


def _rtn(keys: str, values: str) -> Method:
    """Round-to-nearest along an axis each for keys and values."""

    def build(spec: ModelSpec, config: RTNConfig, layer_idx: int) -> LayerCodec[Any, Any]:
        key_codec = PerChannelKey if keys == "channel" else PerTokenKey
        value_codec = PerChannelValue if values == "channel" else PerTokenValue
        return LayerCodec(
            key_codec(spec, config.k_bits, config.group_size), value_codec(spec, config.v_bits, config.group_size)
        )

    schedule = {"channel": Schedule(0, _GROUP, _GROUP), "token": Schedule(0, 1)}
    return dataclasses.replace(METHOD, build=build, schedules=lambda config: (schedule[keys], schedule[values]))


TABLES = {
    "kivi-1": PaperTable(
        "KIVI, Table 1: round-to-nearest by axis, no window",
        "CoQA / TruthfulQA of Llama-2-13B, 66.37 / 29.53 without quantization",
        measurements=_measurements,
    )
}
