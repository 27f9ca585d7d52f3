"""What kernels and their references share on the host: numbers, whether kernels can run here, how launches are cut.

This module imports Triton only when asked to.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from kvcli.errors import UsageError

FP16_MAX = 65504.0
"""The largest finite float16."""

FP16_BELOW_MAX = 65472.0
"""The float16 before it: a stored number above this one may have been clamped to `FP16_MAX`."""

TINY = 1e-30
"""Lower bound of divisors that may be 0, so that 0 / 0 is 0 instead of NaN."""

HOPPER_SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory that a block of threads may ask for on the H100 and H200."""

_NUM_SMS = 132
"""Streaming multiprocessors of the H100 and H200, for which split sizes are tuned; on smaller GPUs programs queue."""


def has_triton() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, which needs no GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def all_gpus_have(capability: tuple[int, int]) -> bool:
    """Whether there are NVIDIA GPUs, all of at least this compute capability, and kernels run on them."""
    if interpreted() or torch.version.hip is not None or not torch.cuda.is_available():
        return False
    return all(torch.cuda.get_device_capability(index) >= capability for index in range(torch.cuda.device_count()))


def check_device(device: torch.device) -> None:
    """Checks that kernels can run on a device; UsageError: they cannot."""
    if not has_triton():
        raise UsageError("fused kernels need Triton, which is not installed; use --impl reference")
    if device.type != "cuda" and not interpreted():
        raise UsageError(f"fused kernels need a CUDA device, not '{device}'; use --impl reference")


def shared_memory_limit(device: torch.device) -> int:
    """Bytes of shared memory that a block of threads may ask for; without a GPU, that of an H100."""
    if device.type != "cuda":
        return HOPPER_SHARED_MEMORY
    properties: Any = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))


def cdiv(count: int, size: int) -> int:
    """ceil(count / size); Triton's own `cdiv` and `next_power_of_2` cost microseconds per call."""
    return -(-count // size)


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def row_major(x: Tensor) -> Tensor:
    """x with unit stride in the last dimension (copied only if needed); kernels take any strides in the others."""
    return x if x.stride(-1) == 1 else x.contiguous()


def tokens_per_split(length: int, programs_per_split: int, multiple_of: int, programs_per_sm: int) -> int:
    """Tokens per split, a multiple of `multiple_of`, so that the grid fills the GPU in one wave; the last has the rest.

    `programs_per_split` programs work on the same tokens; a multiprocessor runs `programs_per_sm` at once.
    """
    num_splits = most_splits(programs_per_split, programs_per_sm)
    return max(1, cdiv(cdiv(length, multiple_of), num_splits)) * multiple_of


def most_splits(programs_per_split: int, programs_per_sm: int) -> int:
    """Splits of tokens of which a GPU runs all programs at once, 1 or more."""
    return max(1, _NUM_SMS * programs_per_sm // programs_per_split)


def norm_unit(width: int) -> float:
    """The unit of stored L2 norms of `width` channels, a power of two that keeps them in the range of float16."""
    return 2.0 ** math.ceil(math.log2(width) / 2)


@cache
def has_hopper_shared_memory(device: torch.device) -> bool:
    """Whether a GPU has the shared memory that tiles are tuned for; so does a machine without a GPU."""
    return shared_memory_limit(device) >= HOPPER_SHARED_MEMORY


@dataclass(frozen=True)
class Tiles:
    """Tile sizes, warps and stages of one kernel, as its launch takes them.

    Attributes:
        hopper: tuned on one H100 or H200.
        smaller: fits 99 KiB of shared memory; compiled for 8.0, 8.6 and 12.0, and not timed.
    """

    hopper: Mapping[str, int]
    smaller: Mapping[str, int]

    def on(self, device: torch.device) -> dict[str, int]:
        """The tile for a device."""
        return dict(self.hopper if has_hopper_shared_memory(device) else self.smaller)
