"""Attaching any method of the registry to a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from contract import asked_for

import kvcli
from kvcli.artifact import Artifact
from kvcli.methods.config import CacheConfig
from kvcli.registry import get_method


@pytest.fixture
def attach(tiny_artifact: Callable[[Any], Artifact]) -> Callable[..., Any]:
    """Attaches a method with its example settings."""

    def make(model: Any, name: str, **changes: Any) -> Any:
        method = get_method(name)
        artifact = tiny_artifact(method) if method.needs_artifact else None
        known = CacheConfig.model_fields if artifact else method.config_cls.model_fields
        settings = {key: value for key, value in method.example_settings.items() if key in known}
        asked = name if artifact else asked_for(method)
        return kvcli.attach(model, asked, artifact=artifact, **{"sink_length": 2, **settings, **changes})

    return make
