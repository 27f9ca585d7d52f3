"""Checksums of tensors, several at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from blake3 import blake3
from torch import Tensor

_PIECE_BYTES = 4 * 2**20
"""Bytes of a tensor that have a checksum of their own, so that several threads can compute them."""


def tensor_digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """BLAKE3 of each tensor's dtype, shape and content, by its name.

    Args:
        tensors: on any device, of any shape.
    """
    hosted = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    pieces = {name: pieces_of(x.flatten().view(torch.uint8)) for name, x in hosted.items()}
    with ThreadPoolExecutor() as pool:
        # all pieces are begun before the first is waited for
        running = {name: pool.map(_piece_digest, parts) for name, parts in pieces.items()}
        return {name: combined(x.dtype, x.shape, list(running[name])) for name, x in hosted.items()}


def pieces_of(data: Tensor) -> tuple[Tensor, ...]:
    """The bytes of a tensor, uint8 [bytes], as the pieces that have a checksum each."""
    return data.split(_PIECE_BYTES)


def combined(dtype: torch.dtype, shape: Sequence[int], pieces: Sequence[str]) -> str:
    """BLAKE3 of a tensor, from those of its pieces."""
    return blake3(f"{dtype} {list(shape)} {' '.join(pieces)}".encode()).hexdigest()


def _piece_digest(piece: Tensor) -> str:
    return blake3(piece.numpy().data).hexdigest()
