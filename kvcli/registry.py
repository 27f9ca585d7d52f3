"""The methods by name. Strings only, so that listing them imports nothing heavy."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvcli.errors import UsageError

if TYPE_CHECKING:
    from kvcli.methods.method import Method

METHODS = {
    "fp16": "kvcli.methods.fp16:METHOD",
    "fp8": "kvcli.methods.fp8:METHOD",
    "rtn": "kvcli.methods.rtn:METHOD",
    "kivi": "kvcli.methods.kivi:METHOD",
    "squat": "kvcli.methods.squat.method:METHOD",
    "squat-pre": "kvcli.methods.squat.method:METHOD_PRE",
    "qjl": "kvcli.methods.qjl.method:METHOD",
    "commvq": "kvcli.methods.commvq.method:METHOD",
}
"""Method name to `module:record`."""

BASELINE = "fp16"
"""The method that compresses nothing, with which others are compared."""

DEFAULT_METHOD = "commvq"
"""The method of `kvcli demo`, of `kvcli fit` and of examples."""


def get_method(name: str) -> Method:
    """Loads one method's record.

    Raises:
        UsageError: no such method; the message lists those that exist.
    """
    if name not in METHODS:
        raise UsageError(f"unknown method '{name}'; choose one of {', '.join(METHODS)}")
    module, record = METHODS[name].split(":")
    method: Method = getattr(import_module(module), record)
    return method


def parse_method(text: str) -> tuple[Method, dict[str, Any]]:
    """Reads a method with optional bits, such as `kivi` or `kivi-2`.

    Returns:
        The method's record and the settings that the bits stand for.

    Raises:
        UsageError: no such method, or one that takes no bits.
    """
    name, dash, bits = text.rpartition("-")
    if text in METHODS or not dash or not bits.isdigit():
        return get_method(text), {}
    method = get_method(name)
    if method.for_bits is None:
        raise UsageError(f"method '{name}' takes no bits; say --method {name}")
    return method, method.for_bits(int(bits))
