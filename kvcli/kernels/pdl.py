"""Programmatic dependent launch (PDL, compute capability 9.0+): a kernel's prologue overlaps its predecessor's tail.

The first kernel of a chain is launched normally, the others with `pdl_launch_options()`; or the first one, too, if it
begins with `pdl_begin`, after which all that was launched before it is complete (not in an engine's pages, whose passes
are on several streams). Every other kernel but the last calls `pdl_launch_dependents` at its start, and `pdl_wait`
before it writes anything, and before it reads anything that was written after the first kernel's launch; as each of
them waits, all earlier kernels are complete then. A kernel without PDL may run between two of a chain: it waits for all
before it and is waited for. On older GPUs, and with a Triton without PDL, kernels run one after the other.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra import cuda

from kvcli.kernels.launch import all_gpus_have

PDL_SUPPORTED = tl.constexpr(hasattr(cuda, "gdc_wait") and all_gpus_have((9, 0)))
"""Whether Triton and every GPU of this machine support PDL."""


@triton.jit
def pdl_launch_dependents():
    """griddepcontrol.launch_dependents: the next kernel may start once all programs of this one have called it."""
    if PDL_SUPPORTED:
        cuda.gdc_launch_dependents()


@triton.jit
def pdl_wait():
    """griddepcontrol.wait: returns once the previous kernel is complete and its writes are visible."""
    if PDL_SUPPORTED:
        cuda.gdc_wait()


@triton.jit
def pdl_begin():
    """The beginning of a chain: no other kernel of it starts before all that was launched before it is complete."""
    pdl_wait()
    pdl_launch_dependents()


def pdl_launch_options(early: bool = True) -> dict[str, Any]:
    """Launch options of every kernel of a chain but the first, and of that if it begins `early`, with `pdl_begin`."""
    return {"launch_pdl": True} if early and PDL_SUPPORTED.value else {}
