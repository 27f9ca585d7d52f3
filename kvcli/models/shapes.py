"""Models by their shapes alone, so that speed and memory can be measured without weights.

This module makes configurations; reading them is the business of `kvcli.spec`.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvcli.errors import ModelError, UsageError, suggestion
from kvcli.spec import ModelSpec

SHAPES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text())
"""Settings of a transformers config, of a Llama model unless `model_type` says otherwise."""


def check_shape(name: str) -> None:
    """Raises UsageError unless a shape has this name."""
    if name not in SHAPES:
        hint = suggestion(name, SHAPES) or f"; choose one of {', '.join(SHAPES)}"
        raise UsageError(f"unknown shape '{name}'{hint}")


@contextmanager
def naming_shapes(name: str) -> Iterator[None]:
    """A ModelError in the block, of a model of this name, also says what needs none."""
    try:
        yield
    except ModelError as error:
        hint = f"shapes that need no model: {', '.join(SHAPES)}{suggestion(name, SHAPES)}"
        raise type(error)(f"{error}; {hint}") from error


def shape_config(name: str, num_layers: int | None = None) -> Any:
    """The transformers configuration of one of `SHAPES`, with another depth if one is named; UsageError for others."""
    from transformers import AutoConfig

    check_shape(name)
    values = {"model_type": "llama", "bos_token_id": 1, "eos_token_id": None, "pad_token_id": None, **SHAPES[name]}
    config = AutoConfig.for_model(**values)
    if num_layers is not None:
        config.num_hidden_layers = num_layers
    return config


def shape_spec(name: str) -> ModelSpec:
    """What kvcli needs to know of a shape."""
    return ModelSpec.from_config(shape_config(name))
