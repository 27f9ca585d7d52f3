"""The method that environment variables name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from kvcli.artifact.choice import MethodChoice
from kvcli.errors import ConfigError, UsageError, error_text

METHOD, ARTIFACT, RECIPE, SETTINGS = "KVCLI_METHOD", "KVCLI_ARTIFACT", "KVCLI_RECIPE", "KVCLI_SETTINGS"


def choice_of_environment() -> MethodChoice | None:
    """The choice by KVCLI_METHOD, KVCLI_ARTIFACT or KVCLI_RECIPE, with KVCLI_SETTINGS; None: the three are not there.

    UsageError, ConfigError, ArtifactError: as those of a `MethodChoice` for pages, or settings that are no JSON object.
    """
    method, artifact, recipe, text = (os.environ.get(x, "") for x in (METHOD, ARTIFACT, RECIPE, SETTINGS))
    if not (method or artifact or recipe):
        if text:
            raise UsageError(f"{SETTINGS} are of a method: set {METHOD}, {ARTIFACT} or {RECIPE}, or unset it")
        return None
    try:
        values = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{SETTINGS} is no JSON: {error_text(error)}") from error
    if not isinstance(values, dict):
        raise ConfigError(f'{SETTINGS} is a JSON object of settings, such as {{"key_offset": "none"}}')
    return MethodChoice.of(method, artifact, recipe, values).for_pages()


def variables_of(choice: MethodChoice, recipe: Path | None) -> dict[str, str]:
    """The variables that name a choice, and the file of its recipe; others that are set are emptied."""
    named: dict[str, Any] = dict.fromkeys(x for x in (METHOD, ARTIFACT, RECIPE, SETTINGS) if os.environ.get(x))
    if not choice.is_baseline:
        named |= {METHOD: choice.method, ARTIFACT: choice.folder, RECIPE: recipe}
        named[SETTINGS] = choice.settings and json.dumps(dict(choice.settings))
    return {x: str(y or "") for x, y in named.items() if y or x in os.environ}
