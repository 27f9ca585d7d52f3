"""Without a GPU, kernels run in Triton's interpreter; Triton reads this once, so import this module first."""

from __future__ import annotations

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
            blocks[key] = vars(self)
        self.__dict__ = blocks[key]

    def make_tensor(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = kind.tensor if kind.is_block() else (tl.tuple([]), tl.constexpr(1))

    tl.block_type.__init__, tl.tensor.__init__ = make_block, make_tensor


if not torch.cuda.is_available() and os.environ.setdefault("TRITON_INTERPRET", "1") == "1" and find_spec("triton"):
    remember()
