"""Attaching a method to a model, until it is detached or while a cache lives."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch
from torch import nn

from kvcli.artifact.artifact import Artifact
from kvcli.artifact.choice import MethodChoice
from kvcli.attention.session import Session, devices_of_layers
from kvcli.cache.compressed import CompressedCache
from kvcli.errors import UnsupportedModelError, UsageError
from kvcli.models.fingerprint import fingerprint
from kvcli.models.load import LoadedModel
from kvcli.registry import BASELINE
from kvcli.seam.probe import probe


def attach(
    model: nn.Module | LoadedModel,
    method: str | MethodChoice = "",
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
        method: name of a method, with or without bits (`kivi`, `kivi-2`); see `kvcli methods`. Or all of a choice, in
            place of artifact, recipe and settings.
        artifact: for methods that are fitted, the artifact or its folder, which also names its method.
        recipe: file of `kvcli tune`, which names method, artifact and settings.
        impl: `reference` (PyTorch, float32), `fused` (Triton kernels), or `auto`: fused on a GPU, else reference.
        layers: indices of the layers to compress; the others keep their keys and values in full precision. Default all.
        config: settings of the method; with an artifact, only those of the cache (`sink_length`, `residual_length`,
            `flush_block`) may differ from the artifact's.

    Returns:
        A session; use it as a context manager or call `detach`.

    Raises:
        UsageError: unknown method or implementation, shapes that `fused` does not support, layers that the model does
            not have, a missing artifact, or another default dtype of torch than float32.
        ConfigError: settings that do not exist or do not fit.
        ArtifactError: an artifact that cannot be used with this model.
        UnsupportedModelError: attention that is not understood, or layers that are offloaded.
        ModelError: the model, or another one with the same config object, is attached already.

    Example:
        >>> with kvcli.attach(model, "kivi-2", residual_length=128) as session:
        ...     cache = session.new_cache()
        ...     model.generate(**inputs, cache=cache)  # past_key_values=cache before transformers 5.24
    """
    loaded = model if isinstance(model, LoadedModel) else None
    module: Any = model.model if isinstance(model, LoadedModel) else model
    if not isinstance(module, nn.Module) or not hasattr(module, "config"):
        raise UnsupportedModelError(f"'{type(module).__name__}' is not a model of transformers; attach takes one")
    choice = MethodChoice.of(method, artifact, recipe, config)
    choice.check()
    if module.dtype == torch.float64 and not choice.is_baseline:
        raise UnsupportedModelError(
            f"method '{choice.method}' does not take a model in float64; load it in float32, bfloat16 or float16"
        )
    if torch.get_default_dtype() != torch.float32 and not choice.is_baseline:  # buffers and states would be of it
        raise UsageError(f"torch.set_default_dtype is {torch.get_default_dtype()}; methods need torch.float32")
    devices = devices_of_layers(module)
    spec = loaded.spec if loaded is not None else probe(module).spec

    def digest() -> str:
        return loaded.fingerprint if loaded is not None else fingerprint(module, spec)

    settings, codecs = choice.codecs(spec, lambda: probe(module), digest)
    if layers is not None:
        unknown = sorted(set(layers) - set(range(spec.num_layers)))
        if unknown or not layers:
            raise UsageError(f"layers to compress are some of 0 to {spec.num_layers - 1}, not {unknown or 'none'}")
        _, plain = MethodChoice(BASELINE).codecs(spec)
        codecs = [codec if layer_idx in layers else plain[layer_idx] for layer_idx, codec in enumerate(codecs)]
    for layer_idx, codec in enumerate(codecs):
        codec.to(devices[spec.in_model(layer_idx)]).eval()
    name = loaded.name if loaded is not None else str(getattr(module.config, "name_or_path", ""))
    fitted = choice.artifact is not None
    return Session(module, spec, choice.record, settings, codecs, impl, layers, fitted=fitted, model_name=name)


@dataclass
class _Shared:
    session: Session
    made_by: tuple[MethodChoice, str]
    living: int = 1  # caches


_shared, _lock = WeakKeyDictionary[nn.Module, _Shared](), RLock()


def new_cache(
    model: nn.Module | LoadedModel,
    method: str = "",
    *,
    artifact: str | Path | None = None,
    recipe: str | Path | None = None,
    impl: str = "auto",
    **config: Any,
) -> CompressedCache:
    """An empty cache for a call of the model, which is attached while one of these caches lives.

    Caches of the same arguments share a session. When the last one is gone, the model is exactly as before. While one
    lives, the model takes no other caches: see `attach`, whose arguments these are.

    Raises:
        UsageError: caches of other arguments live; others as of `attach`.

    Example:
        >>> model.generate(**inputs, cache=kvcli.new_cache(model, "kivi-2"))
    """
    module: Any = model.model if isinstance(model, LoadedModel) else model
    made_by = MethodChoice.of(method, artifact, recipe, config), impl
    with _lock:
        if (shared := _shared.get(module)) is not None:
            shared.living += 1
        if shared is None or _shared.get(module) is not shared:  # or the last of its caches ended just now
            shared = _shared[module] = _Shared(attach(model, made_by[0], impl=impl), made_by)
        try:
            if shared.made_by != made_by:
                raise UsageError(
                    f"the model has caches of '{shared.made_by[0].method}'; delete them before making others"
                )
            cache = shared.session.new_cache()
        except BaseException:
            _release(module, shared)
            raise
    finalize(cache, _release, module, shared).atexit = False
    return cache


def _release(module: nn.Module, shared: _Shared) -> None:
    with _lock:
        shared.living -= 1
        if not shared.living:
            del _shared[module]
            shared.session.detach()
