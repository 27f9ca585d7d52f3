"""The methods by name. Strings only, so that listing them imports nothing heavy."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from kvcli.errors import UsageError

if TYPE_CHECKING:
    from kvcli.methods.base import Method

METHODS = {
    "fp16": "kvcli.methods.full",
    "commvq": "kvcli.methods.commvq.method",
}
"""Method name to the module that holds its `METHOD` record."""


def get_method(name: str) -> Method:
    """Loads one method's record.

    Raises:
        UsageError: no such method; the message lists those that exist.
    """
    if name not in METHODS:
        raise UsageError(f"unknown method '{name}'; choose one of {', '.join(METHODS)}")
    method: Method = import_module(METHODS[name]).METHOD
    return method
