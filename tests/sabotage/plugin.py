"""A plug-in of pytest (`-p sabotage.plugin`) that breaks one function of kvcli: `KVCLI_SABOTAGE=module:name=how`.

`raises`: the function raises. `differs`: it returns something else; where it returns nothing, it does nothing.
"""

import copy
import functools
import importlib
import inspect
import os
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from types import FunctionType
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
    if owner is module:  # others hold the function itself: only its code can be exchanged
        exchange(inspect.unwrap(function), how)
        return
    kind: Any = type(plain) if isinstance(plain, (classmethod, staticmethod, property)) else lambda f: f
    setattr(owner, name, kind(broken(function, how)))


def broken(function: Callable[..., Any], how: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if how == "raises":
            raise SabotageError
        annotation = inspect.signature(function).return_annotation
        return None if annotation in ("None", None) else another(function(*args, **kwargs))

    return replacement


EXCHANGED: list[Callable[..., Any]] = []


def exchange(function: Any, how: str) -> None:
    """Gives a function without free variables other code."""

    def replacement(*args: Any, **kwargs: Any) -> Any:
        from sabotage.plugin import EXCHANGED

        return EXCHANGED[0](*args, **kwargs)

    def generator(*args: Any, **kwargs: Any) -> Any:
        from sabotage.plugin import SabotageError

        raise SabotageError
        yield

    kept = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    kept.__kwdefaults__, kept.__annotations__ = function.__kwdefaults__, function.__annotations__
    EXCHANGED.append(broken(kept, how))
    # a generator is of a context manager or an iterator
    function.__code__ = (generator if inspect.isgeneratorfunction(function) else replacement).__code__
    function.__defaults__ = function.__kwdefaults__ = None


def another(x: Any) -> Any:
    """Something of the same form with other numbers."""
    if isinstance(x, torch.Tensor):
        if x.dtype == torch.bool:
            return ~x
        if x.is_floating_point() or x.is_complex():
            # not the same everywhere, and large: logits have margins, and a softmax does not see a constant
            ramp = torch.linspace(-3, 3, x.numel(), device=x.device).view(x.shape)
            return x + ((x.abs().float().mean() + 0.01) * ramp).to(x.dtype) if x.numel() else x
        return x ^ 1
    if isinstance(x, bool):
        return not x
    if isinstance(x, (int, float)):
        return -x - 1
    if isinstance(x, str):
        return x + "x"
    if x is None:
        return "a sabotaged result"
    if isinstance(x, dict):
        return {key: another(value) for key, value in x.items()}
    if isinstance(x, list):
        return [another(value) for value in x or [None]]
    if isinstance(x, tuple):
        changed = map(another, x)
        return type(x)(*changed) if hasattr(x, "_fields") else tuple(changed)
    if is_dataclass(x) and not isinstance(x, type):
        changed = copy.copy(x)
        for field in fields(x):
            object.__setattr__(changed, field.name, another(getattr(x, field.name)))
        return changed
    return None
