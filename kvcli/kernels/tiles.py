"""Tile sizes of kernels: those tuned on Hopper, or smaller ones for GPUs with less shared memory.

Triton makes other code before compute capability 9.0: operands of products stay in registers, and a block of threads
may ask for 163 KiB of shared memory (8.0) or 99 KiB (8.6, 8.9, 12.0) instead of 227 KiB.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch

from kvcli.kernels.launch import shared_memory_limit

HOPPER_SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory that a block of threads may ask for on the H100 and H200."""


@cache
def has_hopper_shared_memory(device: torch.device) -> bool:
    """Whether a GPU has the shared memory that tiles are tuned for; so does a machine without a GPU."""
    return shared_memory_limit(device) >= HOPPER_SHARED_MEMORY


@dataclass(frozen=True)
class Tiles:
    """Tile sizes, warps and stages of one kernel, as its launch takes them.

    Attributes:
        hopper: tuned on one H100 or H200.
        smaller: fits 99 KiB of shared memory; compiled for 8.0, 8.6 and 8.9, and not timed.
    """

    hopper: Mapping[str, int]
    smaller: Mapping[str, int]

    def on(self, device: torch.device) -> dict[str, int]:
        """The tile for a device."""
        return dict(self.hopper if has_hopper_shared_memory(device) else self.smaller)
