"""A plug-in of pytest (`-p sabotage.plugin`) that breaks one function of kvcli: `KVCLI_SABOTAGE=module:name=how`.

`raises`: the function raises. `differs`: it returns something else; where it returns nothing, it does nothing.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import os
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch


class SabotageError(Exception):
    """What a sabotaged function raises; nothing expects it."""


def pytest_sessionstart() -> None:
    """Breaks the function before a test module imports it."""
    target, _, how = os.environ["KVCLI_SABOTAGE"].partition("=")
    module_name, _, path = target.partition(":")
    module = importlib.import_module(module_name)
    owner_name, _, name = path.rpartition(".")
    owner = getattr(module, owner_name) if owner_name else module
    plain = vars(owner)[name]
    function = plain.fget if isinstance(plain, property) else getattr(plain, "__func__", plain)
    broken = (raising if how == "raises" else differing)(function)
    if owner is module:  # others hold the function itself: only its code can be exchanged
        exchange(inspect.unwrap(function), how)
        return
    kind: Callable[[Any], Any] = (
        type(plain) if isinstance(plain, (classmethod, staticmethod, property)) else lambda f: f
    )
    setattr(owner, name, kind(broken))


def raising(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise SabotageError

    return broken


def differing(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def broken(*args: Any, **kwargs: Any) -> Any:
        annotation = inspect.signature(function).return_annotation
        return None if annotation in ("None", None) else another(function(*args, **kwargs))

    return broken


ORIGINALS: dict[str, Callable[..., Any]] = {}


def exchange(function: Any, how: str) -> None:
    """Gives a function without free variables other code."""

    def raises(*args: Any, **kwargs: Any) -> Any:
        from sabotage.plugin import SabotageError

        raise SabotageError

    def differs(*args: Any, **kwargs: Any) -> Any:
        from sabotage.plugin import ORIGINALS, differing

        return differing(ORIGINALS["function"])(*args, **kwargs)

    kept = type(function)(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    kept.__kwdefaults__, kept.__annotations__ = function.__kwdefaults__, function.__annotations__
    ORIGINALS["function"] = kept
    if inspect.isgeneratorfunction(function):  # of a context manager or an iterator

        def nothing(*args: Any, **kwargs: Any) -> Any:
            if args is None:
                yield
            from sabotage.plugin import SabotageError

            raise SabotageError

        function.__code__ = nothing.__code__
    else:
        function.__code__ = (raises if how == "raises" else differs).__code__
    function.__defaults__ = function.__kwdefaults__ = None


def another(x: Any) -> Any:
    """Something of the same form with other numbers."""
    if isinstance(x, torch.Tensor):
        if x.dtype == torch.bool:
            return ~x
        if x.is_floating_point() or x.is_complex():
            return x + 0.1 * x.abs().float().mean().to(x.dtype) + 0.01 if x.numel() else x
        return x ^ 1
    if isinstance(x, bool):
        return not x
    if isinstance(x, (int, float)):
        return x + 1
    if isinstance(x, str):
        return x + "x"
    if x is None:
        return "a sabotaged result"
    if isinstance(x, dict):
        return {key: another(value) for key, value in x.items()}
    if isinstance(x, tuple):
        changed = [another(value) for value in x]
        return type(x)(*changed) if hasattr(x, "_fields") else tuple(changed)
    if isinstance(x, list):
        return [another(value) for value in x] if x else ["a sabotaged result"]
    if is_dataclass(x) and not isinstance(x, type):
        changed = copy.copy(x)
        for field in fields(x):
            object.__setattr__(changed, field.name, another(getattr(x, field.name)))
        return changed
    return None
