"""Whether kernels can run here, and how launches are cut. This module imports Triton only when asked to."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch
from torch import Tensor

from kvcli.errors import UsageError


def has_triton() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, which needs no GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def check_device(device: torch.device) -> None:
    """Raises UsageError unless kernels can run on a device."""
    if not has_triton():
        raise UsageError("fused kernels need Triton, which is not installed; use --impl reference")
    if device.type != "cuda" and not interpreted():
        raise UsageError(f"fused kernels need a CUDA device, not '{device}'; use --impl reference")


def unsupported_shape(what: str) -> UsageError:
    """The error for a shape that a kernel does not support."""
    return UsageError(f"the fused kernel does not support {what}; use --impl reference")


def cdiv(count: int, size: int) -> int:
    """Tiles of a size that hold `count` elements; Triton's own, and its next power of two, cost microseconds a call."""
    return -(-count // size)


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def row_major(x: Tensor) -> Tensor:
    """x with its last axis side by side, which is all that kernels ask of a layout."""
    return x if x.stride(-1) == 1 else x.contiguous()


_MULTIPROCESSORS = 132
"""Of the largest GPUs in use; on smaller ones, programs queue."""


def tokens_per_split(length: int, others: int, granule: int, per_multiprocessor: int) -> int:
    """Tokens a program takes, a multiple of `granule`, so that a GPU is full and no program waits for another.

    Args:
        length: tokens.
        others: programs that every range of tokens needs.
        granule: tokens of a tile.
        per_multiprocessor: programs that run at once.
    """
    parts = max(1, _MULTIPROCESSORS * per_multiprocessor // others)
    return max(1, cdiv(cdiv(length, granule), parts)) * granule
