"""From the tensors of an artifact to the codecs of a model's layers, with every shape and dtype checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvcli.errors import ArtifactError
from kvcli.methods.config import CacheConfig
from kvcli.methods.layer_codec import LayerCodec
from kvcli.methods.method import Method
from kvcli.spec import ModelSpec

_TENSOR_NAME = re.compile(r"layers\.(?P<layer>0|[1-9][0-9]{0,3})\.(?P<buffer>.+)")


def fitted_codecs(
    method: Method, spec: ModelSpec, config: CacheConfig, tensors: Mapping[str, Tensor]
) -> list[LayerCodec[Any, Any]]:
    """The codecs of all layers, with their fitted state.

    Args:
        method: of the artifact.
        spec: shapes of its model.
        config: settings of the codecs.
        tensors: the codecs' buffers by name, `layers.L.key.*` and `layers.L.value.*`.

    Returns:
        New codecs on the CPU, one per layer.

    Raises:
        ArtifactError: tensors that are missing, unknown or of the wrong shape.
    """
    states: list[dict[str, Tensor]] = [{} for _ in range(spec.num_layers)]
    for name, x in tensors.items():
        match = _TENSOR_NAME.fullmatch(name)
        if match is None or int(match["layer"]) >= spec.num_layers:
            raise ArtifactError(f"the artifact has a tensor '{name}', which belongs to no layer")
        states[int(match["layer"])][match["buffer"]] = x
    return [_fitted_codec(method, spec, config, layer_idx, state) for layer_idx, state in enumerate(states)]


def _fitted_codec(
    method: Method, spec: ModelSpec, config: CacheConfig, layer_idx: int, state: dict[str, Tensor]
) -> LayerCodec[Any, Any]:
    """A layer's codec with its state; shapes are compared before anything of their size is allocated.

    Raises:
        ArtifactError: tensors that are not those of the codec.
    """
    wrong = f"layer {layer_idx} of the artifact does not fit its settings"
    try:
        with torch.device("meta"):
            expected = method.build(spec, config, layer_idx).state_dict()
        for name in sorted(expected.keys() | state.keys()):
            if name not in state or name not in expected:
                raise ArtifactError(f"{wrong}: tensor {name} is {'missing' if name in expected else 'unknown'}")
            ours, theirs = ((list(x.shape), x.dtype) for x in (expected[name], state[name]))
            if ours != theirs:
                raise ArtifactError(f"{wrong}: tensor {name} is {theirs[1]} {theirs[0]} instead of {ours[1]} {ours[0]}")
        codec = method.build(spec, config, layer_idx)
        codec.load_state_dict(state)
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        raise ArtifactError(f"{wrong}: {' '.join(str(error).split())}") from error
    return codec
