"""Which versions of transformers were tried, and the argument by which models of the installed one take a cache."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import transformers
from packaging.version import Version
from transformers import GenerationMixin

OLDEST, NEWEST = "5.4", "5.24"
"""The first and the last version that the tests run on; newer ones are used, too."""

_OLD_NAME = "past_key_values"
_parameters = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE_ARGUMENT = "cache" if "cache" in _parameters else _OLD_NAME


def with_cache(cache: Any) -> dict[str, Any]:
    """Arguments of a forward pass, or of `generate`, that goes on with a cache and fills it."""
    return {CACHE_ARGUMENT: cache, "use_cache": True}


def cache_of(arguments: Mapping[str, Any]) -> Any:
    """The cache among arguments of a call, or None; as in transformers, the new name goes before the old one."""
    return arguments.get(CACHE_ARGUMENT if CACHE_ARGUMENT in arguments else _OLD_NAME)


def newer_than_tried() -> str | None:
    """A line that says so if this transformers is newer than those that were tried; else None."""
    if Version(transformers.__version__).release[:2] <= Version(NEWEST).release:
        return None
    return f"transformers {transformers.__version__} is newer than {NEWEST}, the newest that kvcli was tried with"
