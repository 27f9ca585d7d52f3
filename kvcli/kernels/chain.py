"""Kernels of one call that overlap: the next one is set up, and reads what is not new, while the one before ends.

The first kernel of a chain is launched as ever, and the others with `follows()`. All but the last call `let_next_begin`
at their start; all but the first call `wait_for_previous` before they read anything that was written since the chain's
first kernel was launched, by whatever kernel, and before they write anything. A kernel that has waited knows that all
before it are done, because they waited, too. A kernel outside may stand between two of a chain: it waits for all before
it and is waited for. This is programmatic dependent launch, which begins with compute capability 9.0; elsewhere, and
with a Triton that does not have it, kernels run one after the other.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from kvcli.kernels.launch import interpreted


def _overlaps() -> bool:
    """Whether Triton and every GPU here can."""
    if interpreted() or torch.version.hip is not None or not torch.cuda.is_available():
        return False
    if not hasattr(cuda, "gdc_wait"):
        return False
    return all(torch.cuda.get_device_capability(index) >= (9, 0) for index in range(torch.cuda.device_count()))


OVERLAPS = tl.constexpr(_overlaps())


@triton.jit
def let_next_begin():
    """Lets the next kernel of the chain begin as soon as all programs of this one have begun."""
    if OVERLAPS:
        cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous():
    """Waits until the kernel before is done and what it wrote can be read."""
    if OVERLAPS:
        cuda.gdc_wait()


def follows() -> dict[str, Any]:
    """Launch options of a kernel that follows another one of its chain."""
    return {"launch_pdl": True} if OVERLAPS.value else {}
