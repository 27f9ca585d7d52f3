"""Kernels of one call that overlap: the next one is set up, and reads what is not new, while the one before ends.

Each kernel of a chain calls `let_next_begin` at its start, and `wait_for_previous` before it reads what an earlier
kernel of the chain wrote and before it writes anything; all but the first are launched with `follows()`. A kernel that
has waited knows that all before it are done, because they waited, too. A kernel outside may stand between two of a
chain: it waits for all before it and is waited for. This is programmatic dependent launch, which begins with compute
capability 9.0; elsewhere kernels run one after the other.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from kvcli.kernels.launch import interpreted


def _overlaps() -> bool:
    """Whether every GPU here can."""
    if interpreted() or torch.version.hip is not None or not torch.cuda.is_available():
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
