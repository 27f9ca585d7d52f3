"""The codecs of layers, with each layer's own bits of keys and values."""

from __future__ import annotations

from typing import Any

from kvcli.errors import ConfigError
from kvcli.methods import fp16
from kvcli.methods.config import EXACT, CacheConfig
from kvcli.methods.layer_codec import LayerCodec
from kvcli.methods.method import Method
from kvcli.spec import ModelSpec


def make_codec(method: Method, spec: ModelSpec, config: CacheConfig, layer_idx: int) -> LayerCodec[Any, Any]:
    """The unfitted codec of a layer; ValueError: settings that do not fit the model's shapes."""
    config = config.in_layer(layer_idx, spec.num_layers)
    exact = {name for name in ("k_bits", "v_bits") if getattr(config, name, None) == EXACT}
    replaced = {name: method.config_cls.model_fields[name].get_default() for name in exact}
    codec = method.build(spec, config.model_copy(update=replaced), layer_idx)
    if exact:
        plain = fp16.METHOD.build(spec, config, layer_idx)
        codec.key = plain.key if "k_bits" in exact else codec.key
        codec.value = plain.value if "v_bits" in exact else codec.value
        codec.plain = True
    if spec.value_dim != spec.head_dim:
        codec.value = make_codec(method, spec.for_values(), config, layer_idx).value
    return codec


def build_codecs(method: Method, spec: ModelSpec, config: CacheConfig) -> list[LayerCodec[Any, Any]]:
    """The unfitted codecs of all layers; ConfigError for settings that do not fit the shapes."""
    try:
        return [make_codec(method, spec, config, layer_idx) for layer_idx in range(spec.num_layers)]
    except ValueError as error:
        raise ConfigError(f"{method.name}: {error}") from error
