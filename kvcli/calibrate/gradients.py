"""Finds layers that block gradients without an error, as some quantized linear layers do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from kvcli.errors import SamplesError
from kvcli.seam.rotary import RotaryCall

_NOT_DIFFERENTIABLE = ("NotImplemented", "WarnNotImplemented")
"""Nodes that autograd puts where an operation has no derivative."""


@contextmanager
def passing_gradients(decoder: nn.Module, remedy: str) -> Iterator[None]:
    """Checks every innermost module when it is called: its output must lead back to its input.

    Args:
        decoder: whose modules are checked.
        remedy: what to do instead, for the message.

    Raises:
        SamplesError: inside the block, at the first module whose input has gradients and whose output gives it none.
    """

    innermost = {module: name for name, module in decoder.named_modules() if next(module.children(), None) is None}

    def check(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.requires_grad]
        several = output if isinstance(output, tuple | list) else (output,)
        outputs = [x for x in several if isinstance(x, Tensor) and x.is_floating_point()]
        if not inputs or not outputs or RotaryCall.of(module, args, kwargs, output) is not None:
            return
        if not _leads_to(outputs[0], inputs[0]):
            raise SamplesError(f"{innermost[module]} ({type(module).__name__}) lets no gradients through; {remedy}")

    hooks = [module.register_forward_hook(check, with_kwargs=True) for module in innermost]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _leads_to(output: Tensor, source: Tensor) -> bool:
    """Whether a gradient of the output reaches a tensor that it was computed from."""
    if output is source:
        return True
    visited: set[Any] = set()
    nodes = [output.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in visited or node.name().rpartition("::")[2] in _NOT_DIFFERENTIABLE:
            continue
        if node is source.grad_fn or getattr(node, "variable", None) is source:
            return True
        visited.add(node)
        nodes += [following for following, _ in node.next_functions]
    return False
