"""Identity RoPE factors (cos = 1, sin = 0) that skip the multiplies in the model's `apply_rotary_pos_emb`.

Models compute q * cos + rotate_half(q) * sin. With plain tensors of ones and zeros that is three passes over q and
three over k which change nothing: 5 % of the time of a prompt of 8K tokens (one H200, Llama-3.1-8B's shape).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

_MAX_PLAIN_TOKENS = 32
"""Up to this many tokens plain tensors beat the dispatch to the subclass (measured on a CPU, 32 heads)."""


class IdentityFactor(Tensor):
    """A constant 0 or 1 tensor whose multiplications and additions are elided.

    A factor of ones and a summand of zeros give the other operand itself, not a copy, and a factor of zeros gives
    zeros, where shape and dtype of the other operand are those of the result. Other operations compute with it as with
    any tensor; one that changes it in place makes an ordinary tensor of it.

    Attributes:
        number: what it holds everywhere, 1 or 0; None once that is not known.
    """

    number: int | None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            rule = _RULES.get(func) if len(args) == 2 else None
            result = None if rule is None else rule(*args)
            if result is not None:
                return result
            name = func.__name__
            in_place = name.startswith(("__set", "__i")) or (name.endswith("_") and not name.endswith("__"))
            changed = (kwargs or {}).get("out", args[0] if in_place else None)
            if isinstance(changed, IdentityFactor):
                changed.number = None
            return func(*args, **(kwargs or {}))


def identity_factors(like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines of 1 and sines of 0, shaped like a rotary embedding's [batch, time, rotary_dim]."""
    if like.device.type == "cpu" and like.shape[:-1].numel() <= _MAX_PLAIN_TOKENS:
        return torch.ones_like(like), torch.zeros_like(like)
    return _view(torch.ones_like(like), 1), _view(torch.zeros_like(like), 0)


class Shortcut:
    """Makes `apply_rotary_pos_emb` of an attention module's file return queries and keys at once, given such factors.

    It computes rotate_half(q), four kernels of a layer, before they are multiplied by 0. Nothing is replaced where it
    does not return queries and keys [batch, heads, time, channels] as they are, as where it reorders channels.
    """

    def __init__(self, module: nn.Module, heads: tuple[int, int], channels: int, width: int) -> None:
        """Queries and keys have so many `heads`; cos and sin have `width` channels."""
        self._file = vars(sys.modules[type(module).__module__])
        self._original: Any = self._file.get("apply_rotary_pos_emb")
        self._replacement: Any = None
        if hasattr(self._original, "takes_shortcut"):
            return
        before = [torch.arange(1.0, 3 * count * channels + 1).view(1, count, 3, channels) for count in heads]
        factors = (_view(make(1, 3, width), number) for number, make in ((1, torch.ones), (0, torch.zeros)))
        try:
            after = self._original(*before, *factors)  # type: ignore[misc]
        except (RuntimeError, TypeError, ValueError, IndexError):  # it does not exist, or is another function
            return
        if isinstance(after, tuple) and len(after) == 2 and all(map(torch.equal, before, after)):
            self._replacement = self._file["apply_rotary_pos_emb"] = _unless_identity(self._original)

    def remove(self) -> None:
        """Puts the model's own function back."""
        if self._replacement is not None and self._file["apply_rotary_pos_emb"] is self._replacement:
            self._file["apply_rotary_pos_emb"] = self._original


def _unless_identity(function: Any) -> Any:
    @wraps(function)
    def rotated(q: Tensor, k: Tensor, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> Any:
        are_constants = isinstance(cos, IdentityFactor) and isinstance(sin, IdentityFactor)
        if are_constants and cos.number == 1 and sin.number == 0 and q.dtype == k.dtype == cos.dtype:
            return q, k
        return function(q, k, cos, sin, *args, **kwargs)

    rotated.takes_shortcut = True  # type: ignore[attr-defined]
    return rotated


def _view(x: Tensor, number: int | None) -> IdentityFactor:
    constant = x.as_subclass(IdentityFactor)
    constant.number = number
    return constant


def _broadcasts_into(result: Any, constant: Any) -> bool:
    """Whether an operation of both has the first one's shape and dtype."""
    if not isinstance(constant, IdentityFactor) or not isinstance(result, Tensor) or isinstance(result, IdentityFactor):
        return False
    if result.dtype != constant.dtype or result.device != constant.device or result.dim() < constant.dim():
        return False
    sizes = zip(reversed(result.shape), reversed(constant.shape), strict=False)
    return all(theirs in (1, ours) for ours, theirs in sizes)


def _product(x: Any, y: Any) -> Tensor | None:
    if not _broadcasts_into(x, y) or y.number is None:
        return None
    return x if y.number else _view(y.expand(x.shape), 0)


_RULES: dict[Any, Callable[..., Tensor | None]] = {
    Tensor.unsqueeze: lambda x, dim: _view(x.unsqueeze(dim), x.number) if isinstance(x, IdentityFactor) else None,
    Tensor.mul: _product,
    Tensor.add: lambda x, y: x if _broadcasts_into(x, y) and y.number == 0 else None,
}
