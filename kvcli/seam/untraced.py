"""Functions that `torch.compile` must run as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Params = ParamSpec("Params")
Result = TypeVar("Result")


def untraced(function: Callable[Params, Result]) -> Callable[Params, Result]:
    """Breaks the graph of a compiled model at a function with effects that a tracer would miss, put off or repeat."""
    disabled: Callable[Params, Result] = torch.compiler.disable(function)
    return disabled
