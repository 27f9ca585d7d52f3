"""Attaching any method of the registry to a tiny model."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from contexts_made import attach_example


@pytest.fixture
def attach(tiny_artifact: Callable[[Any], Any]) -> Callable[..., Any]:
    """Attaches a method with its example settings."""
    return partial(attach_example, tiny_artifact)
