"""The method that environment variables name."""

import json
import os

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


def variables_of(choice: MethodChoice) -> dict[str, str]:
    """The variables that name a choice; others that are set are emptied."""
    named = dict.fromkeys((METHOD, ARTIFACT, RECIPE, SETTINGS), "")
    if not choice.is_baseline:
        *names, settings = choice.to_dict().values()
        named = dict(zip(named, [*names, json.dumps(settings) if settings else ""], strict=True))
    return {x: text for x, text in named.items() if text or os.environ.get(x)}
