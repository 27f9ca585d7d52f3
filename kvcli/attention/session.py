"""Attaching a method to a model: the session that makes caches and attends over them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from kvcli.artifact import Artifact
from kvcli.attention.backend import choose_backend
from kvcli.attention.layer import attend_layer
from kvcli.cache.compressed import CompressedCache, NewTokens
from kvcli.errors import CacheError, ConfigError, UnsupportedModelError, UsageError, explain
from kvcli.methods.base import LayerCodec
from kvcli.methods.config import CacheConfig
from kvcli.methods.method import Method
from kvcli.models import LoadedModel, fingerprint
from kvcli.registry import parse_method
from kvcli.seam.patch import RotaryOutput, Seam
from kvcli.seam.sdpa import sdpa
from kvcli.spec import ModelSpec


class Session:
    """A model attached to a method; made by `attach`, ended by `detach` or by leaving the `with` block.

    Attributes:
        backend: what attention runs on; its `note` says why a method's own kernels are not used.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: ModelSpec,
        method: Method,
        config: CacheConfig,
        codecs: list[LayerCodec],
        impl: str,
    ) -> None:
        self.model, self.spec, self.method, self.config, self.codecs = model, spec, method, config, codecs
        self.backend = choose_backend(method, codecs, impl, next(model.parameters()).device)
        for codec in codecs:
            codec.use_kernels(self.backend.impl == "fused")
        self._seam = Seam(model, self._attend)
        self._seam.open()

    def new_cache(self) -> CompressedCache:
        """An empty cache, to be passed to the model or to `generate` as `past_key_values`."""
        return CompressedCache(self.spec, self.method, self.config, self.codecs, self._seam)

    def detach(self) -> None:
        """Restores the model exactly; detaching twice is harmless."""
        self._seam.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.detach()

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Any,
        value: Any,
        mask: Tensor | None,
        scaling: float,
        rotary: RotaryOutput,
    ) -> Tensor:
        if isinstance(key, NewTokens):
            with _current_device(query):
                return attend_layer(key, query, mask, rotary, self.backend, scaling)
        if key.shape[2] != query.shape[2]:
            raise CacheError("while a model is attached, pass past_key_values=session.new_cache() to it")
        rotate = rotary.rotation.apply
        return sdpa(rotate(query), rotate(key), value, mask, scaling)


def attach(
    model: nn.Module | LoadedModel,
    method: str,
    *,
    artifact: str | Path | Artifact | None = None,
    impl: str = "auto",
    **config: Any,
) -> Session:
    """Attaches a compression method to a transformers model.

    Args:
        model: a causal language model of a supported family, or what `kvcli.load_model` returned.
        method: name of a method, with or without bits (`kivi`, `kivi-2`); see `kvcli methods`.
        artifact: for methods that are fitted, the artifact or its folder.
        impl: `reference` (PyTorch, float32), `fused` (Triton kernels), or `auto`: fused on a GPU, else reference.
        config: settings of the method; with an artifact, only those of the cache (`sink_length`, `residual_length`,
            `flush_block`) may differ from the artifact's.

    Returns:
        A session; use it as a context manager or call `detach`.

    Raises:
        UsageError: unknown method or implementation, shapes that `fused` does not support, or a missing artifact.
        ConfigError: settings that do not exist or do not fit.
        ArtifactError: an artifact that cannot be used with this model.
        UnsupportedModelError: an architecture kvcli does not compress, or layers on several devices.

    Example:
        >>> with kvcli.attach(model, "kivi-2", residual_length=128) as session:
        ...     cache = session.new_cache()
        ...     model.generate(**inputs, past_key_values=cache)
    """
    loaded = model if isinstance(model, LoadedModel) else None
    module: Any = model.model if isinstance(model, LoadedModel) else model
    record, from_bits = parse_method(method)
    config = {**from_bits, **config}
    spec = loaded.spec if loaded is not None else ModelSpec.from_config(module.config)
    if isinstance(artifact, (str, Path)):
        artifact = Artifact.load(artifact)
    if record.needs_artifact and artifact is None:
        raise UsageError(
            f"method '{method}' needs an artifact; make one with 'kvcli fit --method {method}' and 'kvcli export'"
        )
    if artifact is None:
        settings = make_config(record, config)
        codecs = build_codecs(record, spec, settings)
    else:
        digest = loaded.fingerprint if loaded is not None else fingerprint(module, spec)
        artifact.check_model(spec, digest, record.name)
        settings = artifact.config_with(config)
        codecs = artifact.build_codecs(settings)
    device = _device_of_layers(module, spec.num_layers)
    for codec in codecs:
        codec.to(device).eval()
    return Session(module, spec, record, settings, codecs, impl)


def build_codecs(method: Method, spec: ModelSpec, config: CacheConfig) -> list[LayerCodec]:
    """The codecs of all layers of a method that is not fitted.

    Raises:
        ConfigError: settings that do not fit the model's shapes.
    """
    try:
        return [method.build(spec, config, layer_idx) for layer_idx in range(spec.num_layers)]
    except ValueError as error:
        raise ConfigError(f"{method.name}: {error}") from error


def make_config(method: Method, values: dict[str, Any]) -> CacheConfig:
    """A method's settings from plain values.

    Raises:
        ConfigError: unknown names or values out of range.
    """
    try:
        return method.config_cls(**values)
    except ValidationError as error:
        raise ConfigError(f"{method.name}: {explain(error, method.config_cls.model_fields)}") from error


def _current_device(x: Tensor) -> AbstractContextManager[Any]:
    """Makes a tensor's GPU the current one: Triton launches there, whatever its arguments are on."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return nullcontext()


def _device_of_layers(model: nn.Module, num_layers: int) -> torch.device:
    """The device that all layers' keys are made on."""
    ends = tuple(f"layers.{layer_idx}.self_attn.k_proj.weight" for layer_idx in range(num_layers))
    devices = {parameter.device for name, parameter in model.named_parameters() if name.endswith(ends)}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise UnsupportedModelError(f"the model's layers are on several devices ({names}); kvcli needs them on one")
    return devices.pop()
