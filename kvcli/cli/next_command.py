"""Words of the next command line, which a command says with its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvcli.builtin_models import DEFAULT_MODEL
from kvcli.registry import BASELINE, DEFAULT_METHOD, METHODS, get_config, parse_name

PROMPT = "Photosynthesis is"
FOLLOW_UP = "In short,"


def model_argument(model: str) -> list[str]:
    """A model as an argument, if it is not the default."""
    return [] if model == DEFAULT_MODEL else [model]


def try_method(method: str, command: str, model: Sequence[str] = ()) -> list[str]:
    """A command with a method, or the first step towards the artifact that the method needs."""
    if get_config(parse_name(method)[0]).needs_artifact:
        return ["kvcli", "calibrate", *model]
    return ["kvcli", command, *model, "--method", method]


def last_method(rows: Sequence[Mapping[str, Any]]) -> str:
    """The last method measured that compresses, else one that needs no artifact."""
    names = [str(row["method"]) for row in rows if row["method"] != BASELINE]
    return names[-1] if names else next(name for name in METHODS if name not in (BASELINE, DEFAULT_METHOD))
