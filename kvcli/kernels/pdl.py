"""Programmatic dependent launch (PDL, compute capability 9.0+): a kernel's prologue overlaps its predecessor's tail.

The first kernel of a chain is launched as usual, the others with `pdl_launch_options()`. All but the last call
`pdl_launch_dependents` at their start. All but the first call `pdl_wait` before they read anything that was written
since the chain's first kernel was launched, by whatever kernel, and before they write anything; then all kernels before
them are done, because those waited, too. A kernel without PDL may stand between two of a chain: it waits for all before
it and is waited for. On older GPUs, and with a Triton without PDL, kernels run one after the other.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from kvcli.kernels.launch import interpreted


def _pdl_supported() -> bool:
    """Whether Triton and every GPU here can."""
    if interpreted() or torch.version.hip is not None or not torch.cuda.is_available():
        return False
    if not hasattr(cuda, "gdc_wait"):
        return False
    return all(torch.cuda.get_device_capability(index) >= (9, 0) for index in range(torch.cuda.device_count()))


PDL_SUPPORTED = tl.constexpr(_pdl_supported())


@triton.jit
def pdl_launch_dependents():
    """Lets the next kernel of the chain begin as soon as all programs of this one have begun."""
    if PDL_SUPPORTED:
        cuda.gdc_launch_dependents()


@triton.jit
def pdl_wait():
    """Waits until the kernel before is done and what it wrote can be read."""
    if PDL_SUPPORTED:
        cuda.gdc_wait()


def pdl_launch_options() -> dict[str, Any]:
    """Launch options of a kernel that follows another one of its chain."""
    return {"launch_pdl": True} if PDL_SUPPORTED.value else {}
