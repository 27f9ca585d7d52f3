"""Without a GPU, kernels run in Triton's interpreter; Triton reads this once, so import this module first."""

import os
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy
import torch


def remember() -> None:
    """Patches of the language, types and shapes are made once: at each call and tensor, they took most of the time."""
    from triton import language as tl
    from triton.runtime import interpreter

    interpreter._patch_lang = cache(interpreter._patch_lang)
    interpreter._LangPatchScope.restore = lambda scope: None
    # overflows of integers are computed for an assertion that debug builds alone have
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    number, block, blocks = cache(interpreter._get_np_dtype), tl.block_type.__init__, {}
    interpreter._get_np_dtype = lambda dtype: numpy.dtype("u8") if dtype.scalar.is_ptr() else number(dtype.scalar)

    def make_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (str(element_ty), *[getattr(size, "value", size) for size in shape])
        if key not in blocks:
            block(self, element_ty, shape)
            self.tensor = tl.tuple([tl.constexpr(size) for size in self.shape]), tl.constexpr(self.numel)
            self.sizes = key[1:]
            blocks[key] = vars(self)
        self.__dict__ = blocks[key]

    def make_tensor(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = kind.tensor if kind.is_block() else (tl.tuple([]), tl.constexpr(1))

    tl.block_type.__init__, tl.tensor.__init__ = make_block, make_tensor
    keep_operands()


def keep_operands() -> None:
    """Operands of equal shapes are not broadcast, those of equal usual dtypes not cast, and blocks of a number are made
    once: what else the language does for each operator ends the same, and took a third of the time.
    """
    from triton import language as tl
    from triton.language.semantic import TritonSemantic

    check, broadcast = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value
    integers, numbers = {"int32": 2**31, "int64": 2**63}, dict[Any, Any]()

    def sizes(x: Any) -> Any:
        return getattr(x.type, "sizes", None)

    def same_shape(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        return (lhs, rhs) if sizes(lhs) == sizes(rhs) else broadcast(self, lhs, rhs)

    def fits(number: Any, dtype: str) -> bool:
        if dtype == "fp32":
            return type(number) in (int, float)
        return type(number) is int and -integers[dtype] <= number < integers[dtype]

    def filled(self: Any, number: Any, like: Any) -> Any:
        key = repr(number), like.dtype.name, sizes(like)  # 0.0 and -0.0 are equal
        if key not in numbers:
            scalar = self.scalar_constant(number, dtype=like.dtype)
            numbers[key] = broadcast(self, like, scalar)[1] if like.type.is_block() else scalar
        return numbers[key]

    def operands(self: Any, lhs: Any, rhs: Any, *args: Any, **named: Any) -> tuple[Any, Any]:
        left, right = isinstance(lhs, tl.tensor), isinstance(rhs, tl.tensor)
        dtype = lhs.dtype.name if left else rhs.dtype.name if right else ""
        if dtype == "fp32" or dtype in integers:
            if left and right and rhs.dtype.name == dtype:
                return same_shape(self, lhs, rhs)
            if left and not right and fits(rhs, dtype):
                return lhs, filled(self, rhs, lhs)
            if right and not left and fits(lhs, dtype):
                return filled(self, lhs, rhs), rhs
        return check(self, lhs, rhs, *args, **named)

    TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value = operands, same_shape


if not torch.cuda.is_available() and os.environ.setdefault("TRITON_INTERPRET", "1") == "1" and find_spec("triton"):
    remember()
