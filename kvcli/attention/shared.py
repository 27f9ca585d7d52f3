"""Caches without a session to hold: a model is attached while one of them lives."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary, finalize

from torch import nn

from kvcli.artifact.choice import MethodChoice
from kvcli.attention.attach import attach
from kvcli.attention.session import Session
from kvcli.cache.compressed import CompressedCache
from kvcli.errors import UsageError
from kvcli.models.load import LoadedModel


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
