"""Checksums of tensors, several at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor


def tensor_digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """sha256 of each tensor's dtype, shape and bytes, by its name.

    Args:
        tensors: on any device, of any shape.
    """
    with ThreadPoolExecutor() as pool:
        return dict(zip(tensors, pool.map(_digest, tensors.values()), strict=True))


def _digest(x: Tensor) -> str:
    digest = hashlib.sha256(f"{x.dtype} {list(x.shape)} ".encode())
    digest.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
