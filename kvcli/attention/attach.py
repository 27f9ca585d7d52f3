"""Attaching a method to a model: settings and codecs from plain values or an artifact, and the session with them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from kvcli.artifact.artifact import Artifact
from kvcli.artifact.recipe import Recipe
from kvcli.attention.session import Session, devices_of_layers
from kvcli.errors import ConfigError, UnsupportedModelError, UsageError, explain
from kvcli.methods.config import BiasOffsetConfig, CacheConfig, SequenceOffsetConfig
from kvcli.methods.layer_codec import LayerCodec
from kvcli.methods.method import Method
from kvcli.methods.per_layer import make_codec
from kvcli.models.fingerprint import fingerprint
from kvcli.models.load import LoadedModel
from kvcli.registry import BASELINE, get_method, parse_method
from kvcli.seam.model import ModelAttention
from kvcli.seam.probe import probe
from kvcli.spec import ModelSpec


def attach(
    model: nn.Module | LoadedModel,
    method: str = "",
    *,
    artifact: str | Path | Artifact | None = None,
    recipe: str | Path | None = None,
    impl: str = "auto",
    layers: Collection[int] | None = None,
    **config: Any,
) -> Session:
    """Attaches a compression method to a transformers model.

    Args:
        model: a causal language model of transformers, or what `kvcli.load_model` returned.
        method: name of a method, with or without bits (`kivi`, `kivi-2`); see `kvcli methods`.
        artifact: for methods that are fitted, the artifact or its folder.
        recipe: file of `kvcli tune`, which names method, artifact and settings in place of these arguments.
        impl: `reference` (PyTorch, float32), `fused` (Triton kernels), or `auto`: fused on a GPU, else reference.
        layers: indices of the layers to compress; the others keep their keys and values in full precision. Default all.
        config: settings of the method; with an artifact, only those of the cache (`sink_length`, `residual_length`,
            `flush_block`) may differ from the artifact's.

    Returns:
        A session; use it as a context manager or call `detach`.

    Raises:
        UsageError: unknown method or implementation, shapes that `fused` does not support, layers that the model does
            not have, or a missing artifact.
        ConfigError: settings that do not exist or do not fit.
        ArtifactError: an artifact that cannot be used with this model.
        UnsupportedModelError: attention that is not understood, or layers that are offloaded.
        ModelError: the model, or another one with the same config object, is attached already.

    Example:
        >>> with kvcli.attach(model, "kivi-2", residual_length=128) as session:
        ...     cache = session.new_cache()
        ...     model.generate(**inputs, past_key_values=cache)
    """
    loaded = model if isinstance(model, LoadedModel) else None
    module: Any = model.model if isinstance(model, LoadedModel) else model
    if not isinstance(module, nn.Module) or not hasattr(module, "config"):
        raise UnsupportedModelError(f"'{type(module).__name__}' is not a model of transformers; attach takes one")
    if (recipe is None) == (method == "") or (recipe is not None and isinstance(artifact, Artifact)):
        raise UsageError("attach takes a method, or a recipe with or without its artifact's folder")
    if recipe is not None:
        given = Recipe.read(recipe)
        method, config = given.method, {**given.settings, **config}
        artifact = given.find_artifact(artifact)  # type: ignore[arg-type]
    record, _ = parse_method(method)
    if module.dtype == torch.float64 and record.name != BASELINE:
        raise UnsupportedModelError(
            f"method '{method}' does not take a model in float64; load it in float32, bfloat16 or float16"
        )
    devices = devices_of_layers(module)
    spec = loaded.spec if loaded is not None else probe(module).spec
    if isinstance(artifact, (str, Path)):
        artifact = Artifact.load(artifact)

    def digest() -> str:
        return loaded.fingerprint if loaded is not None else fingerprint(module, spec)

    if recipe is not None:
        given.check_model(digest())
    settings, codecs = make_codecs(method, artifact, config, spec, attention=lambda: probe(module), digest=digest)
    if layers is not None:
        unknown = sorted(set(layers) - set(range(spec.num_layers)))
        if unknown or not layers:
            raise UsageError(f"layers to compress are some of 0 to {spec.num_layers - 1}, not {unknown or 'none'}")
        baseline = get_method(BASELINE)
        plain = build_codecs(baseline, spec, make_config(baseline, {}))
        codecs = [codec if layer_idx in layers else plain[layer_idx] for layer_idx, codec in enumerate(codecs)]
    for layer_idx, codec in enumerate(codecs):
        codec.to(devices[spec.in_model(layer_idx)]).eval()
    name = loaded.name if loaded is not None else str(getattr(module.config, "name_or_path", ""))
    return Session(module, spec, record, settings, codecs, impl, layers, fitted=artifact is not None, model_name=name)


def make_codecs(
    method: str,
    artifact: Artifact | None,
    config: dict[str, Any],
    spec: ModelSpec,
    *,
    attention: Callable[[], ModelAttention],
    digest: Callable[[], str],
) -> tuple[CacheConfig, list[LayerCodec]]:
    """The settings of a method and the codecs of all layers of a model, on the CPU.

    Args:
        method, artifact, config: as of `attach`.
        spec: of the model.
        attention, digest: called for how the model attends, and for its fingerprint, where these are needed.

    Raises:
        UsageError, ConfigError, ArtifactError: as `attach`.
    """
    record, from_bits = parse_method(method)
    config = {**from_bits, **config}
    if record.needs_artifact and artifact is None:
        raise UsageError(
            f"method '{method}' needs an artifact; make one with 'kvcli fit --method {method}' and 'kvcli export'"
        )
    if artifact is None:
        settings = make_config(record, config)
        codecs = build_codecs(record, spec, settings)
    else:
        artifact.check_model(spec, digest(), record.name)
        settings = artifact.config_with(config)
        codecs = artifact.build_codecs(settings)
    return _choose_offsets(attention, settings, codecs), codecs


def _choose_offsets(
    attention: Callable[[], ModelAttention], settings: CacheConfig, codecs: list[LayerCodec]
) -> CacheConfig:
    """Gives codecs the constant part of keys that the settings ask for; returns settings that say which that is."""
    if isinstance(settings, SequenceOffsetConfig):
        if settings.sequence_offset == "auto":
            settings = settings.model_copy(
                update={"sequence_offset": "mean" if attention().normalizes_keys else "none"}
            )
        for codec in codecs:
            codec.sequence_offset = settings.sequence_offset == "mean"
    if isinstance(settings, BiasOffsetConfig) and settings.key_offset == "bias":
        for codec, bias in zip(codecs, attention().key_biases(), strict=True):
            codec.key_offset = bias
    return settings


def build_codecs(method: Method, spec: ModelSpec, config: CacheConfig) -> list[LayerCodec]:
    """The codecs of all layers of a method that is not fitted; ConfigError for settings that do not fit the shapes."""
    try:
        codecs = [make_codec(method, spec, config, layer_idx) for layer_idx in range(spec.num_layers)]
        if spec.value_dim != spec.head_dim:
            values = spec.for_values()
            for layer_idx, codec in enumerate(codecs):
                codec.value = make_codec(method, values, config, layer_idx).value
        return codecs
    except ValueError as error:
        raise ConfigError(f"{method.name}: {error}") from error


def make_config(method: Method, values: dict[str, Any]) -> CacheConfig:
    """A method's settings from plain values; ConfigError for unknown names or values out of range."""
    try:
        return method.config_cls(**values)
    except ValidationError as error:
        raise ConfigError(f"{method.name}: {explain(error, method.config_cls.model_fields)}") from error
