"""The rotary module of a model: where it is, what it returns, and a wrapper that withholds its rotation."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from kvcli.errors import ModelError
from kvcli.rope import Layout, Rope, Rotation
from kvcli.seam.identity import identity_factors
from kvcli.seam.layer import RotaryOutput, untraced

_ANGLE_TOLERANCE = 5e-3
"""Of cos and sin: at position 4096 angles have this rounding in float32."""

_FAR = 2**22
"""A text longer than any."""


@dataclass(frozen=True)
class RotaryCall:
    """One call of a rotary module.

    Attributes:
        positions: int64 [batch or 1, time].
        arguments: other arguments than a tensor and positions.
        output: what it returned.
        axes: as of `Rope`.
    """

    module: nn.Module
    positions: Tensor
    arguments: tuple[Any, ...]
    output: Any
    axes: int = 0

    @classmethod
    def of(cls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> RotaryCall | None:
        """A record of a call; None if its arguments are not those of a rotary module."""
        others = {name: value for name, value in kwargs.items() if name not in ("x", "hidden_states")}
        first = [others.pop("position_ids")] if "position_ids" in others else []
        rest = [*first, *args[1:], *others.values()]
        if isinstance(output, Tensor):
            rotation = output.is_complex() and output.dim() == 3
        else:
            pair = isinstance(output, tuple) and len(output) == 2 and all(isinstance(x, Tensor) for x in output)
            rotation = pair and output[0].dim() == 3 and output[0].shape == output[1].shape
        if not rotation or not rest or not isinstance(rest[0], Tensor):
            return None
        return cls(module, rest[0], tuple(rest[1:]), output)

    @classmethod
    def by(cls, module: Any) -> RotaryCall:
        """A call on the CPU as layers of full attention make it, which tells them from others by an argument."""
        positions, arguments = torch.arange(8).unsqueeze(0), rope_arguments(module)
        return cls(module, positions, arguments, module(torch.empty(0), positions, *arguments))

    def of_text(self) -> RotaryCall:
        """The same with positions [batch or 1, time], if those of time, height and width (M-RoPE) are equal."""
        x = self.positions
        # those of a text are one tensor, expanded, for which a GPU need not be asked
        same = x.dim() == 3 and (x.stride(0) == 0 or bool((x == x[:1]).all()))
        return replace(self, positions=x[0], axes=len(x)) if same else self

    def rope(self) -> Rope | None:
        """The rotation, if its angles depend on the positions alone and a second call returns the same."""
        if not self.has_indices or (self.switch is not None and not self._are_equal(self.switch + 1, self._far)):
            return None
        layout = _layout(self.output)
        rope = Rope(self.module, layout, self.arguments)
        rope.switch, rope.axes = self.switch, self.axes
        dtype = (self.output if layout == "complex" else self.output[0]).real.dtype
        again = rope.for_length(1).rotation(self.positions, dtype)
        # accelerate moves what a module is given to its device, and leaves what it returns there
        returned = Rotation.from_model(self.output, layout).to(self.positions.device)
        same = torch.equal(again.cos, returned.cos) and torch.equal(again.sin, returned.sin)
        return rope if same and _is_steady(rope.for_length(_FAR), min(self._far - 1, 4096)) else None

    @property
    def has_indices(self) -> bool:
        """Whether positions are integers [batch or 1, time]."""
        return self.positions.dim() == 2 and not self.positions.is_floating_point()

    @cached_property
    def switch(self) -> int | None:
        """As of `Rope`, found by bisection."""
        least, most = self.positions.shape[1], self._far
        if not self.has_indices or self._are_equal(least, most):
            return None
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (middle, most) if self._are_equal(self.positions.shape[1], middle) else (least, middle)
        return least

    @cached_property
    def _far(self) -> int:
        """A text longer than any, or about as long as the longest of a module that has a table of positions."""
        for length in (_FAR, 2**17, 2**13, 2**10):
            with suppress(IndexError):
                self._at(length)
                return length
        return self.positions.shape[1]

    def _are_equal(self, length: int, other: int) -> bool:
        """Whether these positions have the same angles in texts of both lengths."""
        return all(map(torch.equal, self._at(length), self._at(other)))

    def _at(self, length: int) -> tuple[Tensor, ...]:
        """The output for these positions in a text of a length.

        A copy is called, because it may remember that, and on the CPU, which survives an index beyond a table's end.
        """
        module, like, positions = _copied(self.module).to("cpu"), torch.empty(0), self.positions.cpu()
        positions = torch.cat((positions, torch.full_like(positions[:, :1], length - 1)), dim=1)
        output = module(like, positions.expand(self.axes, -1, -1) if self.axes else positions, *self.arguments)
        return tuple(x[:, :-1] for x in ((output,) if isinstance(output, Tensor) else output))


def rope_arguments(rotary: nn.Module) -> tuple[Any, ...]:
    """What a rotary module takes besides positions to rotate as layers of full attention do."""
    return ("full_attention",) if "layer_type" in inspect.signature(rotary.forward).parameters else ()


def passes_on(value: Any, output: Any, elsewhere: bool = False) -> bool:
    """Whether an argument of an attention module is what a rotary module returned, or a new tuple of its tensors.

    With `elsewhere`, also a copy of these on another device.
    """
    if value is output:
        return True
    pairs = [(value, output)] if isinstance(value, Tensor) and isinstance(output, Tensor) else []
    if isinstance(value, tuple | list) and isinstance(output, tuple) and len(value) == len(output):
        if value[0] is output[0]:
            return True
        pairs = list(zip(value, output, strict=True))
    return bool(elsewhere and pairs) and all(
        isinstance(x, Tensor) and x.device != y.device and torch.equal(x.to(y.device), y) for x, y in pairs
    )


class PreRopeRotary(nn.Module):
    """Replaces a rotary module: returns (1, 0), so that queries and keys stay as they are before RoPE.

    Args:
        rope: asks the module that is replaced; calls with other arguments pass through.
        on_call: given positions and rotation of a pass, what the module returned and what the model gets instead.
        rope_of_pass: the rotation of the text that the pass belongs to; None: of a text that ends with it.
    """

    def __init__(
        self,
        rope: Rope,
        on_call: Callable[[RotaryOutput, Any, Any], None],
        rope_of_pass: Callable[[], Rope | None] = lambda: None,
    ) -> None:
        super().__init__()
        self.inner = rope.module
        self.rope, self.on_call, self.rope_of_pass = rope, on_call, rope_of_pass

    def __getattr__(self, name: str) -> Any:
        """Attributes of the rotary module that a model reads, such as its config."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    @untraced
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.inner(*args, **kwargs)
        call = RotaryCall.of(self.inner, args, kwargs, output)
        if call is None or call.arguments != self.rope.arguments:
            return output
        call = call.of_text()
        if not call.has_indices:
            raise ModelError("positions of images, which differ in time, height and width, are not those of a text")
        rope = self.rope
        if rope.switch is not None:
            known = self.rope_of_pass()
            rope = known if known is not None else rope.for_length(int(call.positions.max()) + 1)
            output = rope.output(args[0] if args else next(iter(kwargs.values())), call.positions)
        rotation = Rotation.from_model(output, rope.layout)
        if isinstance(output, Tensor):
            rotation = Rotation(rotation.cos.to(args[0].dtype), rotation.sin.to(args[0].dtype))
        identity = identity_like(output)
        self.on_call(RotaryOutput(call.positions, rotation.to(call.positions.device).contiguous()), output, identity)
        return identity


def identity_like(output: Any) -> Any:
    """cos = 1 and sin = 0 in the format of a rotary module's output."""
    return torch.ones_like(output) if isinstance(output, Tensor) else identity_factors(output[0])


def _layout(output: Any) -> Layout:
    """The order of pairs in the channels of a rotary module's output."""
    if isinstance(output, Tensor):
        return "complex"
    half, odd = divmod(output[0].shape[-1], 2)
    if not odd and all(torch.equal(x[..., :half], x[..., half:]) for x in output):
        return "halves"
    if not odd and all(torch.equal(x[..., ::2], x[..., 1::2]) for x in output):
        return "neighbours"
    return "pairs"


def _copied(module: nn.Module) -> nn.Module:
    """A copy without hooks: what these refer to, such as the whole model, would be copied, too."""
    memo: dict[int, Any] = {id(x): type(x)() for x in (module._forward_hooks, module._forward_pre_hooks)}
    if (placing := getattr(module, "_hf_hook", None)) is not None:  # accelerate's, which may know tied weights
        memo[id(placing)] = placing
    return copy.deepcopy(module, memo)


def _is_steady(rope: Rope, most: int) -> bool:
    """Whether angles grow in proportion to positions, which makes rotations products of each other."""
    frequencies = rope.inv_freq
    some = [x for x in (*range(64), *(2**n for n in range(6, 13))) if x <= most]
    positions = torch.tensor([some], device=frequencies.device)
    rotation = rope.rotation(positions, torch.float32)
    angles = positions[:, None, :, None] * frequencies
    scale = (rotation.cos[:, :, :1] ** 2 + rotation.sin[:, :, :1] ** 2).sqrt()
    pairs = ((angles.cos() * scale, rotation.cos), (angles.sin() * scale, rotation.sin))
    return all(torch.allclose(x, y, atol=_ANGLE_TOLERANCE) for x, y in pairs)
